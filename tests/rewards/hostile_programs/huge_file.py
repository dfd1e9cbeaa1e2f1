# io
"""Fills the disk with one file."""
with open("x", "wb") as file:
    for _ in range(200):
        file.write(b"x" * 10**6)
print("ESCAPE: a file of 200 MB")
