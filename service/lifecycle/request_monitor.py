"""Notices at once that requests wait for a row, or that any is answered: a child has to pause then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
QUIET_SECONDS = 0.5
"""A queue that has been empty for so long is over: a child that paused for less would only lose time."""
IDLE_SECONDS = 5.0
"""Clients that ask one thing after another leave pauses: nothing is asked any more when it was quiet for so long."""


class RequestMonitor:
    """Calls `on_change` on a thread of its own whenever `busy` changes: true as soon as `notify` is called, false once
    `count()`, the number of requests that are meant, has been 0 for `quiet_seconds`."""

    def __init__(
        self, count: Callable[[], int], on_change: Callable[[], None], quiet_seconds: float = QUIET_SECONDS
    ) -> None:
        self._count = count
        self._on_change = on_change
        self._quiet_seconds = quiet_seconds
        self._quiet_since = time.monotonic()
        self._wake = threading.Event()
        self._busy = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="redraft-queue", daemon=True)

    @property
    def busy(self) -> bool:
        """True from the first request until there has been none for a moment."""
        return self._busy.is_set()

    @property
    def quiet_for(self) -> float:
        """Seconds since there was a request; 0 while `busy`."""
        return 0.0 if self.busy else time.monotonic() - self._quiet_since

    def notify(self) -> None:
        """There is one more request. Returns at once, from any thread."""
        self._wake.set()

    def start(self) -> None:
        """Start the thread. Call once."""
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:  # asked again: the loop below may have cleared what `stop` set
            self._wake.wait()
            if self._stopping:
                return
            self._change(True)
            empty_since = time.monotonic()
            while not self._stopping and time.monotonic() - empty_since < self._quiet_seconds:
                self._wake.clear()
                time.sleep(POLL_SECONDS)
                if self._count() or self._wake.is_set():
                    empty_since = time.monotonic()
            self._quiet_since = empty_since
            if not self._stopping:
                self._change(False)

    def _change(self, busy: bool) -> None:
        if busy:
            self._busy.set()
        else:
            self._busy.clear()
        try:
            self._on_change()
        except Exception:
            # This thread must live; the next tick does the same.
            log.exception("the child could not be paused or resumed")
