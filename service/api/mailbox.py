"""Passes events from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from service.core import Event

Deliver: TypeAlias = Callable[[int, Event], None]
"""Receives an event with the number of its answer, on the event loop."""


class Mailbox:
    """Collects the events of all requests between two flushes. Each flush wakes the event loop at most once: a wake-up
    is a system call, and the loop then takes the GIL from the engine's thread."""

    def __init__(self) -> None:
        self._events: deque[tuple[Deliver, int, Event]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        """Binds delivery to the running event loop."""
        self._loop = asyncio.get_running_loop()

    def put(self, deliver: Deliver, index: int, events: Sequence[Event]) -> None:
        """Stores events of an answer for delivery on the event loop. From any thread; does not wake the loop."""
        self._events.extend((deliver, index, event) for event in events)

    def flush(self) -> None:
        """Delivers the stored events. From any thread; does nothing after the event loop was closed."""
        if self._events and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._events:
            deliver, index, event = self._events.popleft()
            deliver(index, event)
