# io
"""A computation inside C code, which no Python signal handler interrupts."""
x = 9**9**9
