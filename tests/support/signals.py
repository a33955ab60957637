"""Signals that a process was started with."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def sigint(action: signal.Handlers) -> Generator[None]:
    """Gives this process, and the processes that it starts, SIG_DFL or SIG_IGN for SIGINT until the block ends.

    A test that sends SIGINT to a child needs SIG_DFL: a test run that a script started in its background has SIG_IGN, which
    children inherit.
    """
    before = signal.signal(signal.SIGINT, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
