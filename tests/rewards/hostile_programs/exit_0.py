# io
"""An exit code of 0 proves nothing."""
import os
os._exit(0)
