"""Notices immediately when requests wait for a row, or when any request is answered, so that a child can pause."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
QUIET_SECONDS = 0.5
"""A queue counts as empty after this many seconds without a request: pausing a child for less would only waste time."""
IDLE_SECONDS = 5.0
"""A server counts as idle after this many seconds without a request: clients leave short gaps between consecutive requests."""


class RequestMonitor:
    """Calls `on_change` on a dedicated thread whenever `busy` changes. It becomes true when `notify` is called, and
    false once `count()`, the number of requests watched for, has been 0 for `quiet_seconds`."""

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
        """True from the first request until there has been none for `quiet_seconds`."""
        return self._busy.is_set()

    @property
    def quiet_for(self) -> float:
        """Seconds since the last request; 0 while `busy`."""
        return 0.0 if self.busy else time.monotonic() - self._quiet_since

    def notify(self) -> None:
        """Reports one more request. Returns at once, from any thread."""
        self._wake.set()

    def start(self) -> None:
        """Starts the thread. Call once."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:  # checked again: the loop below may have cleared what `stop` set
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
            # This thread must survive; the next tick retries.
            log.exception("the child could not be paused or resumed")
