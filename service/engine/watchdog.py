"""Watchdog thread: detects that the engine thread has ended or hangs, including in native code, where nothing is raised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Watches a thread that calls `beat` regularly, from its first beat on.

    hang_seconds: maximum time without a beat while `busy` returns True. give_up: called with the reason when the thread has
    died or hangs. on_fatal: called after that with the reason, and also when the thread itself has set `dead`. dead: why the
    thread ended or was abandoned; None while it runs.
    """

    def __init__(
        self,
        thread: threading.Thread,
        *,
        hang_seconds: float,
        busy: Callable[[], bool],
        give_up: Callable[[str], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        self.hang_seconds = hang_seconds
        self.dead: str | None = None
        self._watched = thread
        self._busy = busy
        self._give_up = give_up
        self._on_fatal = on_fatal
        self._beat: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redraft-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the thread may end from now on."""
        self._stopped.set()

    def beat(self) -> None:
        """Called by the watched thread when it makes progress."""
        self._beat = time.monotonic()

    def rest(self) -> None:
        """Stop watching until the next beat. Called by the watched thread before work without a time limit."""
        self._beat = None

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last beat while there is work; 0 without work, before the first beat, and after `rest`."""
        beat = self._beat
        return time.monotonic() - beat if beat is not None and self._busy() else 0.0

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self.hang_seconds / 4)):
            reason = self._failure()
            # A thread that ends with an error has set `dead` itself.
            if reason is not None and self.dead is None:
                self.dead = reason
                self._give_up(reason)
            if self.dead is not None:
                self._on_fatal(self.dead)
                return

    def _failure(self) -> str | None:
        if self._beat is None:
            return None
        if not self._watched.is_alive() and not self._stopped.is_set():
            return "the engine thread died"
        if self.idle_seconds > self.hang_seconds:
            return f"the engine made no progress for {self.hang_seconds:.0f} s"
        return None
