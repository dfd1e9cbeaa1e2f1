# calls
"""A thread that answers on its own, many times."""
import os
import threading
import time
def answer():
    while True:
        os.write(4, b'{"value": 3}\n')
        time.sleep(0.001)
threading.Thread(target=answer, daemon=True).start()
def f(x):
    return 0
