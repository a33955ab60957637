"""The way of events from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from service.core import Event

Deliver: TypeAlias = Callable[[int, Event], None]
"""Takes an event with the number of its answer, on the event loop."""


class Mailbox:
    """Events of all requests between two flushes. Each flush wakes the event loop once, and only when there is an event:
    a wake-up is a system call, and the loop then takes the interpreter's lock from the engine's thread."""

    def __init__(self) -> None:
        self._events: deque[tuple[Deliver, int, Event]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        """Deliver on the event loop that runs now."""
        self._loop = asyncio.get_running_loop()

    def put(self, deliver: Deliver, index: int, events: Sequence[Event]) -> None:
        """Leave events of the answer of this number, to be delivered on the event loop. From any thread; wakes nobody."""
        self._events.extend((deliver, index, event) for event in events)

    def flush(self) -> None:
        """Deliver what was put. From any thread; does nothing after the event loop was closed, when nobody waits."""
        if self._events and self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._events:
            deliver, index, event = self._events.popleft()
            deliver(index, event)
