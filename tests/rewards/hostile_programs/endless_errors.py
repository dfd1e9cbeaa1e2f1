# io
"""Writes to standard error without end."""
import sys
while True:
    sys.stderr.write("y" * 10**6)
