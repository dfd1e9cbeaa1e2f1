# asserts
"""Hooks that run when something is raised, warned of or imported."""
import sys
import warnings
sys.excepthook = lambda *args: None
sys.settrace(lambda *args: None)
sys.setprofile(lambda *args: None)
warnings.showwarning = lambda *args, **kwargs: print("4")
sys.meta_path.insert(0, type("Find", (), {"find_spec": staticmethod(lambda *args: None)}))
def f(x):
    warnings.warn("x", stacklevel=1)
    return 0
