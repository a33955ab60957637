"""Publishes a folder and is killed at its n-th fsync or rename. Arguments: scratch, final, n."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.store.artifacts import publish

count = 0


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Counts a step before and after each call."""

    def wrapped(*arguments: Any) -> Any:
        step()
        result = call(*arguments)
        step()
        return result

    return wrapped


def step() -> None:
    global count
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)


os.fsync = counted(os.fsync)
os.rename = counted(os.rename)
print(publish(Path(sys.argv[1]), Path(sys.argv[2])))
