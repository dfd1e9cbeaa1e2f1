# io
"""What an earlier program left behind."""
import os
for name in os.listdir("."):
    print("ESCAPE: found", name)
