# io
"""A file that is longer than any disk."""
import os
fd = os.open("x", os.O_CREAT | os.O_RDWR)
os.truncate("x", 10**12)
print("ESCAPE: a file of 1 TB")
