# io
"""Abstract Unix sockets have no file, only a network namespace."""
import socket
s = socket.socket(socket.AF_UNIX)
s.bind("\0hotcold_canary")
print("ESCAPE: an abstract socket")
