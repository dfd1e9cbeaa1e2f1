"""A real SIGKILL at a chosen file operation."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def killed_before_file_operation(number: int, root: Path, body: Callable[[], Any]) -> bool:
    """Run `body` in a child that SIGKILLs itself just before its `number`-th file operation under `root`, from 1.
    Whether it was killed; False means that `body` came to its end."""
    child = os.fork()
    if child == 0:
        left = [number]

        def hook(event: str, args: tuple[Any, ...]) -> None:
            if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove") and str(root) in str(args[0]):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        body()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0
