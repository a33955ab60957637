"""Native code can block or die where no exception is seen: someone outside must notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Watches a thread that says by beats that it goes on, from its first one on. busy: whether there is work for it.
    dead: why it ended or was given up, said by the thread itself or found here.

    `give_up` is told what was found here: that the thread is gone, or did not beat for `hang_seconds` while there was work.
    `on_fatal` is told after that, and also what the thread said itself.
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
        """Start watching; nothing is found before the first beat."""
        self._thread.start()

    def stop(self) -> None:
        """From now on the thread may end."""
        self._stopped.set()

    def beat(self) -> None:
        """Called by the watched thread: it makes progress."""
        self._beat = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """Since the last beat while there is work; 0 without, and before the first."""
        return time.monotonic() - self._beat if self._beat is not None and self._busy() else 0.0

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self.hang_seconds / 4)):
            found = self._found()
            # A thread that ends says why first: what it said stands.
            if found is not None and self.dead is None:
                self.dead = found
                self._give_up(found)
            if self.dead is not None:
                self._on_fatal(self.dead)
                return

    def _found(self) -> str | None:
        if self._beat is None:
            return None
        if not self._watched.is_alive() and not self._stopped.is_set():
            return "the engine's thread is gone"
        if self.idle_seconds > self.hang_seconds:
            return f"the engine made no progress for {self.hang_seconds:.0f} s"
        return None
