# io
"""Looks for a network of any kind."""
import socket
for family in range(1, 46):
    try:
        socket.socket(family, socket.SOCK_STREAM)
        print("ESCAPE: a socket of family", family)
    except OSError:
        pass
