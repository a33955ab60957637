"""A request on its way through the engine, and the place in the queue that it has before."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Self

from service.core import Delta, Event, Prompt, Sink
from service.engine.request import Request


class Place:
    """core.Place. on_release: called once, when the place is free or used."""

    def __init__(self, on_release: Callable[[], None]) -> None:
        self._on_release = on_release
        self._lock = threading.Lock()
        self._held = True

    def release(self) -> bool:
        """Idempotent; False from the second time on."""
        with self._lock:
            held, self._held = self._held, False
        if held:
            self._on_release()
        return held

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


class Ticket:
    """core.Ticket: a request, its sink, and its row once it has one."""

    def __init__(self, prompt: Prompt, sink: Sink) -> None:
        self.id = uuid.uuid4().hex
        self.prompt = prompt
        self.sink = sink
        self.cancelled = threading.Event()
        self.row: Request | None = None
        self._sending = threading.RLock()
        self._over = False

    def cancel(self) -> None:
        """See core.Ticket. Only sets a flag, which the engine's thread reads before its next round."""
        self.cancelled.set()

    def send(self, event: Event) -> None:
        """Give the sink an event, unless it has the last one: the watchdog may fail a request that the thread still decodes."""
        with self._sending:
            if not self._over:
                self._over = not isinstance(event, Delta)
                self.sink(event)
