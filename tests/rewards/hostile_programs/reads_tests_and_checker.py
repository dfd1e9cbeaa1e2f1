# io
"""Looks for the tests, the checker and this file on the disk."""
import os
import sys
for top in ("/srv", "/mnt", "/opt", "/tmp", *sys.path):
    for folder, _, files in os.walk(top):
        for name in files:
            if "hotcold" in folder or name in ("tests.jsonl", "secret", "code_tests.py"):
                print("ESCAPE: found", name)
                sys.exit()
