"""The bounded buffer between the engine's thread and the database: recording never delays or breaks decoding."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from service.core import Generation, Outdated, Selection, Unavailable
from service.store.log.generations import Generations

log = logging.getLogger(__name__)

BATCH = 32
ATTEMPTS = 5
"""Attempts to write one batch before it is dropped: a batch that can never be written must not block later ones."""


class Recorder:
    """Takes finished generations from the engine and writes them in the background.

    `record` only appends to a buffer of `capacity` generations. A dedicated thread hands batches to the store and waits
    for each, so at most one batch is queued there. When the store is slow or unavailable, the buffer fills up and the
    oldest generations are dropped, because training needs the newest. Every loss is counted and reported to `on_drop`,
    which is called from the engine's or the recorder's thread and must return at once.
    """

    def __init__(
        self,
        generations: Generations,
        *,
        capacity: int = 512,
        on_drop: Callable[[int], None] | None = None,
        backoff_seconds: float = 0.25,
    ) -> None:
        self._generations = generations
        self._capacity = capacity
        self._on_drop = on_drop
        self._backoff = backoff_seconds
        self._buffer: deque[Generation] = deque()
        self._in_flight = 0
        self._batches = 0
        """Batches that were written or dropped."""
        self._dropped = 0
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="redraft-recorder", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Generations lost since the start."""
        return self._dropped

    def record(self, generation: Generation) -> None:
        """Buffer a generation for writing, unless its request set `store` to false. Returns at once, never raises."""
        if not generation.prompt.store:
            return
        with self._changed:
            if self._closing.is_set():
                lost = 1
            else:
                self._buffer.append(generation)
                lost = max(len(self._buffer) - self._capacity, 0)
                for _ in range(lost):
                    self._buffer.popleft()
                self._changed.notify_all()
        self._drop(lost)

    def flush(self, timeout: float) -> bool:
        """Waits until everything recorded so far is written or dropped. False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._buffer and not self._in_flight, timeout)

    def forget(self, selection: Selection, timeout: float = 60.0) -> None:
        """Drops the selected generations from the buffer and waits for the batch being written, so that its rows can
        then be deleted. Raises Unavailable after `timeout` seconds."""
        with self._changed:
            staying = [one for one in self._buffer if not selection.covers(one.id, one.prompt, one.created_at)]
            self._buffer = deque(staying)
            number = self._batches
            if not self._changed.wait_for(lambda: not self._in_flight or self._batches > number, timeout):
                raise Unavailable("the last recorded generations are still being written: the database is busy")

    def close(self, timeout: float) -> bool:
        """Refuses new generations and writes the buffered ones for at most `timeout` seconds; the rest is dropped.

        True when everything was written. Idempotent.
        """
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        drained = self.flush(timeout)
        with self._changed:
            lost = len(self._buffer)
            self._buffer.clear()
            self._changed.notify_all()
        self._drop(lost)
        if drained:
            self._thread.join(timeout)
        return drained

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._buffer or self._closing.is_set())
                batch = [self._buffer.popleft() for _ in range(min(BATCH, len(self._buffer)))]
                if not batch:
                    return
                self._in_flight = len(batch)
            if not self._write(batch):
                self._drop(len(batch))
            # Otherwise the batch would stay in memory until the next one.
            del batch
            with self._changed:
                self._in_flight = 0
                self._batches += 1
                self._changed.notify_all()

    def _write(self, batch: list[Generation]) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                self._generations.add(batch).result()
                return True
            except Outdated:
                return False  # logged once, where this process's lease is renewed
            except Exception as error:  # noqa: BLE001  (this thread must survive any error of the store)
                log.warning("could not record %d generations: %s", len(batch), type(error).__name__)
            if self._closing.wait(self._backoff * 2**attempt):
                break
        return False

    def _drop(self, count: int) -> None:
        if not count:
            return
        with self._changed:
            self._dropped += count
        if self._on_drop is not None:
            self._on_drop(count)
