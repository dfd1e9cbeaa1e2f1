# io
"""Takes 10 GB and writes to all of it."""
taken = [bytearray(b"x" * 10**8) for _ in range(100)]
print("ESCAPE: 10 GB of memory")
