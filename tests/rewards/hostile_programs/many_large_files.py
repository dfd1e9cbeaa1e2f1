# io
"""Fills the disk with files that are each small enough."""
total = 0
try:
    for number in range(100):
        with open(f"x{number}", "wb") as file:
            for _ in range(10):
                total += file.write(b"x" * 10**6)
except OSError:
    pass
if total > 10**8:
    print("ESCAPE: wrote", total)
