"""Publishes a folder and is killed at the n-th step towards the disk. Arguments: scratch, final, n."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.store.files import publish

steps = 0


def deadly(act: Callable[..., Any]) -> Callable[..., Any]:
    """Before and after the act are two moments to die at."""

    def acting(*arguments: Any) -> Any:
        perhaps_die()
        result = act(*arguments)
        perhaps_die()
        return result

    return acting


def perhaps_die() -> None:
    global steps
    steps += 1
    if steps == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)


os.fsync = deadly(os.fsync)
os.rename = deadly(os.rename)
print(publish(Path(sys.argv[1]), Path(sys.argv[2])))
