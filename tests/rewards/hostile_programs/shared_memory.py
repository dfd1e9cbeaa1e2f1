# io
"""Memory that counts as shared, in many processes."""
import mmap
import os
import time
ready, done = os.pipe()
for _ in range(12):
    if os.fork() == 0:
        shared = mmap.mmap(-1, 2 * 10**8)
        for _ in range(20):
            shared.write(b"x" * 10**7)
        os.write(done, b"x")
        time.sleep(100)
for _ in range(12):
    os.read(ready, 1)
print("ESCAPE: 2 GB of shared memory", flush=True)
time.sleep(100)
