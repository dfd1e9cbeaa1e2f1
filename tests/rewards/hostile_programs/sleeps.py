# io
"""Does nothing for long."""
import time
time.sleep(10**6)
