# io
"""The program ends at once; its child keeps standard output open and prints the rest later."""
import os
import time
if os.fork() == 0:
    os.setsid()
    time.sleep(100)
    print(4)
