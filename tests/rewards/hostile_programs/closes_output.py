# io
"""Closes standard output and goes on."""
import os
import time
os.close(1)
os.close(2)
time.sleep(1000)
