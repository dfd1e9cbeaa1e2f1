# io
"""Exponential time inside the regular expression engine."""
import re
re.match(r"(a+)+$", "a" * 64 + "b")
