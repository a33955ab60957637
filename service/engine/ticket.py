"""A submitted request as its client sees it, and a reserved queue slot."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from math import inf
from typing import Self

from service.core import Delta, Event, Prompt, RequestState, RequestStatus, Sink
from service.engine.request import Request


class Place:
    """core.Place: a reserved queue slot. on_release: called once, when the slot is used or released."""

    def __init__(self, on_release: Callable[[], None]) -> None:
        self._on_release = on_release
        self._lock = threading.Lock()
        self._reserved = True

    def release(self) -> bool:
        """Release the slot. Returns whether it was still reserved."""
        with self._lock:
            reserved, self._reserved = self._reserved, False
        if reserved:
            self._on_release()
        return reserved

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


class Ticket:
    """core.Ticket: a submitted request. arrived_at: perf_counter. row: its state in the engine, None until it first has a row.
    sink: receives its events. route: the HTTP route of the request."""

    def __init__(self, prompt: Prompt, sink: Sink, route: str = "") -> None:
        self.id = uuid.uuid4().hex
        self.route = route
        self.arrived_at = time.perf_counter()
        self.prompt = prompt
        self.sink = sink
        self.cancelled = threading.Event()
        self.row: Request | None = None
        self.cached, self.counted_at = 0, -inf
        """Number of cached tokens, and when they were counted (perf_counter)."""
        self._sending = threading.RLock()
        self._ended = False

    @property
    def tokens(self) -> Sequence[int]:
        """Its prompt and its output so far."""
        return self.prompt.tokens if self.row is None else self.row.tokens

    def status(self, state: RequestState) -> RequestStatus:
        """Its status, given the scheduler's state. May be called from any thread."""
        row, now = self.row, time.perf_counter()
        started_at = row.decode_started_at if row is not None else 0.0
        last = row.rounds[-1] if row is not None and row.rounds else None
        return RequestStatus(
            id=self.id,
            state=state,
            route=self.route,
            prompt_tokens=len(self.prompt.tokens),
            tokens=0 if row is None else row.emitted,
            waiting_seconds=(started_at or now) - self.arrived_at,
            running_seconds=now - started_at if started_at else None,
            adapter=None if last is None else last.adapter,
        )

    def cancel(self) -> None:
        """See core.Ticket. Sets a flag that the engine thread reads before its next round."""
        self.cancelled.set()

    def send(self, event: Event) -> None:
        """Pass an event to the sink, unless the last event was already sent: the watchdog may fail a request while the engine
        thread still works on it."""
        with self._sending:
            if not self._ended:
                self._ended = not isinstance(event, Delta)
                self.sink(event)
