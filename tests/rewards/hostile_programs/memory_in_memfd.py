# io
"""Memory that no process has mapped."""
import os
taken = 0
for number in range(40):
    fd = os.memfd_create("x")
    for _ in range(15):
        taken += os.write(fd, b"x" * 10**6)
if taken > 5 * 10**8:
    print("ESCAPE: memory outside of every process")
