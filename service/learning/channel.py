"""The child's channel to its parent: messages on stdout; jobs, pause and resume on stdin."""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.02
_LONGEST_SLEEP = 1.0
"""Maximum length of one throttling sleep in seconds: a sleep as long as loading a model took would be too long."""
_REPORT_SECONDS = 5.0
"""Throttled seconds between two reports to the parent."""
ORPHANED = 75
"""Exit status after the parent went away (EX_TEMPFAIL)."""


class Channel:
    """Owns stdin and stdout of this process.

    All prints are redirected to stderr, so that stdout carries only messages. A thread reads stdin. At its end the
    process exits at once with ORPHANED, because a child without a parent must not publish anything.
    """

    def __init__(self, stdin: int, stdout: TextIO) -> None:
        self._lines = _lines(stdin)
        self._out = stdout
        self._jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._paused = threading.Event()
        self.share = 1.0
        """Fraction of the time in which this process works, above 0 and at most 1; `hold` throttles to it."""
        self._throttled, self._reported = 0.0, 0.0
        """Throttled seconds in this job, and the part already reported to the parent."""
        self._working_since = time.perf_counter()

    @classmethod
    def claim(cls) -> Channel:
        """A channel over the stdin and stdout of this process."""
        stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(sys.stdin.fileno(), stdout)

    def jobs(self) -> Iterator[str]:
        """The jobs that arrive on stdin, endlessly. Call once: it starts the thread that reads stdin."""
        threading.Thread(target=self._watch, name="redraft-stdin", daemon=True).start()
        while True:
            yield self._jobs.get()

    @property
    def paused(self) -> bool:
        """Whether the parent's last command was `pause`."""
        return self._paused.is_set()

    def hold(self) -> float:
        """Call between two pieces of work. Sleeps to limit work to `share` of the time, then waits while the parent
        wants a pause.

        Returns the paused seconds. Throttled time is not included but reported to the parent, because it does not count
        towards the run's time limit.
        """
        stopped_at = time.perf_counter()
        worked = stopped_at - self._working_since
        time.sleep(min(worked * (1 / self.share - 1), _LONGEST_SLEEP))
        paused_at = time.perf_counter()
        if self.share < 1.0:
            self._report_throttling(paused_at - stopped_at)
        while self.paused:
            time.sleep(_PAUSE_SECONDS)
        self._working_since = time.perf_counter()
        return self._working_since - paused_at

    def _report_throttling(self, seconds: float) -> None:
        self._throttled += seconds
        if self._throttled - self._reported >= _REPORT_SECONDS:
            self._reported = self._throttled
            self.send("throttled", {"seconds": self._throttled})

    def send(self, kind: str, message: Mapping[str, object] | None = None) -> None:
        """Sends one message as a line of JSON with the type `kind`. Exits with ORPHANED when the parent no longer reads."""
        try:
            self._out.write(json.dumps({"type": kind, **(message or {})}) + "\n")
            self._out.flush()
        except OSError:
            os._exit(ORPHANED)

    def _watch(self) -> None:
        for line in self._lines:
            if line.strip() == "pause":
                self._paused.set()
                log.info("paused")
            elif line.strip() == "resume":
                self._paused.clear()
                log.info("resumed")
            else:
                # A pause belongs to the previous job.
                self._paused.clear()
                self._jobs.put(line)
        os._exit(ORPHANED)


def _lines(descriptor: int) -> Iterator[str]:
    """Lines of a pipe. Does not use sys.stdin: a thread blocked in it holds its lock while the process exits."""
    pending = b""
    while block := os.read(descriptor, 2**16):
        *complete, pending = (pending + block).split(b"\n")
        for line in complete:
            yield line.decode("utf-8", "replace")
