"""Waits for what another thread or process does."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], said: Callable[[], object] = str, seconds: float = 60.0) -> float:
    """Seconds until it holds. said: what a failure shows."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, said()
        time.sleep(0.01)
    return time.monotonic() - begun
