"""A request on its way through the engine."""

from __future__ import annotations

import threading
import uuid

from service.core import Delta, Event, Prompt, Sink
from service.engine.row import Row


class Ticket:
    """core.Ticket: a request and what the thread knows of it."""

    def __init__(self, prompt: Prompt, sink: Sink) -> None:
        self.id = uuid.uuid4().hex
        self.prompt = prompt
        self.sink = sink
        self.cancelled = threading.Event()
        self.row: Row | None = None
        self._telling = threading.RLock()
        self._over = False

    def cancel(self) -> None:
        self.cancelled.set()

    def tell(self, event: Event) -> None:
        """Hand an event on, unless the end was told already: the watchdog may end what the thread still works at."""
        with self._telling:
            if not self._over:
                self._over = not isinstance(event, Delta)
                self.sink(event)
