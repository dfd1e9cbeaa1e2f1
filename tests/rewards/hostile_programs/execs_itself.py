# io
"""Starts a fresh interpreter, where nothing of the sandbox's modules is loaded."""
import os
import sys
code = "import os, sys; sys.path.insert(0, '@SOURCES@'); import hotcold; print('ESCAPE')"
os.execv(sys.executable, [sys.executable, "-c", code])
