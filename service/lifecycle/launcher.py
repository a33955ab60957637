"""Starting child processes, or giving another job to one that waits for it: core.Launcher over real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from service.core import python_command
from service.lifecycle.child import GRACE_SECONDS

READY_SECONDS = 60.0
"""How long a child that has done its job waits for another. The first checks of a promotion come sooner where there is traffic,
and elsewhere the seconds that a child takes to start (14 on an H200) cost little."""

LOG_BYTES = 8 * 2**20
"""Size at which the log of children is rotated, when the next child starts."""


class Process:
    """core.JobHandle: a child whose stdout is read on a thread of its own, so that its pipe never fills. keep: gets the
    process when its job has ended and it waits for another."""

    def __init__(
        self,
        command: list[str],
        spec: Mapping[str, object],
        log: Path,
        environment: Mapping[str, str],
        on_gone: Callable[[], None],
        keep: Callable[[Process], None],
    ) -> None:
        self._on_gone = on_gone
        self._keep = keep
        self._waits = False
        log.parent.mkdir(parents=True, exist_ok=True)
        _rotate(log)
        with log.open("ab") as stderr:
            # A session of its own: a Ctrl-C meant for the server must reach the server first, which then ends the
            # child.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",  # bytes that are no text must not end the thread that reads them
                bufsize=1,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._messages: deque[Mapping[str, object]] = deque()
        self._reader = threading.Thread(target=self._read, name="redraft-child", daemon=True)
        self._reader.start()
        self.begin(spec)

    def begin(self, spec: Mapping[str, object]) -> None:
        """Send it a job."""
        self._waits = False
        self._write(json.dumps(dict(spec)))

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def poll(self) -> list[Mapping[str, object]]:
        """Messages received since the last call, oldest first; a line that is no JSON object has the type "garbage"."""
        messages = [self._messages.popleft() for _ in range(len(self._messages))]
        self._waits = self._waits or any(message.get("waits") is True for message in messages)
        return messages

    def exit_code(self) -> int | None:
        """None while the child runs, else its exit code; waits up to 5 s for its last messages to be read."""
        code = self._process.poll()
        if code is not None:
            # Its last messages may still be in the pipe.
            self._reader.join(timeout=5.0)
        return code

    def pause(self, paused: bool) -> None:
        """Ask the child to pause or to resume; no effect once it has ended."""
        self._write("pause" if paused else "resume")

    def stop(self, grace_seconds: float) -> None:
        """End the process, unless it is kept for another job."""
        if self._waits and self._process.poll() is None:
            self._keep(self)
        else:
            self.end(grace_seconds)

    def end(self, grace_seconds: float) -> None:
        """Close the child's stdin, wait `grace_seconds`, then kill it; returns when it has ended."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            # The child exits when its line to the parent ends.
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join(timeout=5.0)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._on_gone()

    def _write(self, line: str) -> None:
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
        except (OSError, ValueError):
            # It has ended: exit_code shows it.
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                message = {"type": "garbage", "line": line[:200]}
            self._messages.append(
                cast("Mapping[str, object]", message if isinstance(message, dict) else {"type": "garbage"})
            )


def _rotate(log: Path) -> None:
    """Begin a new file where a log has reached LOG_BYTES. One earlier file stays, with `.1` behind its name."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size >= LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


class ProcessLauncher:
    """core.Launcher. log: where the child's stderr goes. threads: BLAS threads of the child, 0 for half of the cores.

    A child that has done its job is kept for READY_SECONDS: a comparison goes to it. Training starts in a new process.

    share: called with the number of cores left for this process while a child runs (all where it practises, since that pauses
    while anything is asked), and with all when it has ended. Two BLAS libraries that each use every core wait for each other's
    threads: on 2 cores both ran ten times slower.
    """

    def __init__(
        self,
        log: Path,
        threads: int = 0,
        command: tuple[str, ...] = ("-m", "service.learning.job"),
        share: Callable[[int], None] = lambda cores: None,
    ) -> None:
        self._log = log
        self._cores = os.cpu_count() or 1
        self._threads = threads or max(self._cores // 2, 1)
        self._command = python_command(*command)
        self._share = share
        self._ready: Process | None = None
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()

    def launch(self, spec: Mapping[str, object]) -> Process:
        """Send `spec` as one JSON line to the child that is kept ready, or start one with its BLAS threads set. Raises
        OSError."""
        with self._lock:
            process = self._take()
            if process is not None and process.exit_code() is None and spec.get("kind") == "score":
                process.begin(spec)
            else:
                if process is not None:
                    process.end(GRACE_SECONDS)
                process = self._start(spec)
            self._share(self._cores if spec.get("practice") else max(self._cores - self._threads, 1))
            return process

    def end_ready(self) -> None:
        """End the child that is kept ready, if there is one. Idempotent."""
        with self._lock:
            if (ready := self._take()) is not None:
                ready.end(GRACE_SECONDS)

    def _start(self, spec: Mapping[str, object]) -> Process:
        # Set before the child starts: BLAS libraries read it when they are loaded.
        environment = {name: str(self._threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")}
        return Process(self._command, spec, self._log, environment, lambda: self._share(self._cores), self._keep)

    def _keep(self, process: Process) -> None:
        with self._lock:
            self.end_ready()
            self._ready = process
            self._timer = threading.Timer(READY_SECONDS, self.end_ready)
            self._timer.daemon = True
            self._timer.start()
            self._share(self._cores)

    def _take(self) -> Process | None:
        ready, self._ready = self._ready, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return ready
