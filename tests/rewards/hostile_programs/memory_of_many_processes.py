# io
"""Many processes, each with less memory than one may take."""
import os
import time
ready, done = os.pipe()
for _ in range(20):
    if os.fork() == 0:
        taken = bytearray(b"x" * 2 * 10**8)
        os.write(done, b"x")
        time.sleep(100)
for _ in range(10):
    os.read(ready, 1)
print("ESCAPE: 2 GB in ten processes", flush=True)
time.sleep(100)
