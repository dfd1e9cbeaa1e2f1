# io
"""Many processes, each with less memory than one may take."""
import os
import time
for _ in range(20):
    if os.fork() == 0:
        taken = bytearray(b"x" * 2 * 10**8)
        time.sleep(100)
time.sleep(0.4)
print("ESCAPE: 4 GB in twenty processes", flush=True)
time.sleep(100)
