# io
"""A child that leaves session and parent and goes on."""
import os
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        while True:
            time.sleep(0.01)
    os._exit(0)
print(3)
