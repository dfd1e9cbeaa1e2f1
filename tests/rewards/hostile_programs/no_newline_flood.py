# asserts
"""Never finishes its answer."""
import os
import time
def f(x):
    os.write(4, b'{"value": ')
    time.sleep(1000)
