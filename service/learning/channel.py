"""The child's line to its parent: messages out on stdout, pause, resume and the end of the line in on stdin."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TextIO

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.02
_LONGEST_SLEEP = 1.0
"""Seconds of throttling at a time, at most: loading a model need not be followed by as long a sleep."""
ORPHANED = 75
"""Exit status after the parent went away (EX_TEMPFAIL)."""


class Channel:
    """Owns stdin and stdout of this process.

    Whatever else prints goes to stderr, so that stdout carries messages alone. A thread watches stdin: at its end the
    process exits on the spot, since a child without a parent must not publish anything.
    """

    def __init__(self, stdin: int, stdout: TextIO) -> None:
        self._lines = _lines(stdin)
        self._out = stdout
        self._paused = threading.Event()
        self.share = 1.0
        """Share of the time in which this process works: `hold` throttles it to that."""
        self._working_since = time.perf_counter()

    @classmethod
    def claim(cls) -> Channel:
        """Take over this process's streams."""
        stdout = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(sys.stdin.fileno(), stdout)

    def first_line(self) -> str:
        """The job. Then starts to watch for what follows."""
        line = next(self._lines, "")
        threading.Thread(target=self._watch, name="redraft-stdin", daemon=True).start()
        return line

    @property
    def paused(self) -> bool:
        """Whether the parent's last command was `pause`."""
        return self._paused.is_set()

    def hold(self) -> float:
        """Between two pieces of work: sleep for as long as throttles work to `share` of the time, then wait while the parent
        wants this process to pause. Returns the seconds it was paused for."""
        worked = time.perf_counter() - self._working_since
        time.sleep(min(worked * (1 / self.share - 1), _LONGEST_SLEEP))
        paused_at = time.perf_counter()
        while self.paused:
            time.sleep(_PAUSE_SECONDS)
        self._working_since = time.perf_counter()
        return self._working_since - paused_at

    def send(self, kind: str, message: Mapping[str, object] | None = None) -> None:
        """One message. A parent that no longer listens is a parent that went away."""
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
        os._exit(ORPHANED)


def _lines(descriptor: int) -> Iterator[str]:
    """Lines of a pipe. Read below sys.stdin, whose lock a thread that waits in it would hold while the process ends."""
    pending = b""
    while block := os.read(descriptor, 2**16):
        *whole, pending = (pending + block).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")
