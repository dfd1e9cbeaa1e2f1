# io
"""Fills the disk with many files."""
import os
made = 0
try:
    for folder in range(50):
        os.mkdir(str(folder))
        for number in range(4000):
            open(f"{folder}/{number}", "w").close()
            made += 1
except OSError:
    pass
if made > 10000:
    print("ESCAPE: many files", made)
