# io
"""Prints without end."""
while True:
    print("y" * 10**6)
