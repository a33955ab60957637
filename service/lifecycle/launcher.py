"""Starts child processes, or gives the next job to a waiting one: core.Launcher with real processes."""

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
"""Time for which a child waits for another job after finishing one. With traffic, the first checks of a promotion come
sooner; otherwise the seconds that a child takes to start (14 on an H200) matter little."""

LOG_BYTES = 8 * 2**20
"""Size at which the children's log is rotated when the next child starts."""


class Process:
    """core.JobHandle: a child whose stdout is read by a dedicated thread, so that its pipe never fills up. keep:
    receives the process when its job has ended and it waits for another."""

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
            # A separate session: Ctrl-C must reach the server first, which then ends the child.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",  # undecodable bytes must not end the reader thread
                bufsize=1,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._messages: deque[Mapping[str, object]] = deque()
        self._reader = threading.Thread(target=self._read, name="redraft-child", daemon=True)
        self._reader.start()
        self.begin(spec)

    def begin(self, spec: Mapping[str, object]) -> None:
        """Sends it a job."""
        self._waits = False
        self._write(json.dumps(dict(spec)))

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def poll(self) -> list[Mapping[str, object]]:
        """Messages received since the last call, oldest first. A line that is not a JSON object gets the type "garbage"."""
        messages = [self._messages.popleft() for _ in range(len(self._messages))]
        self._waits = self._waits or any(message.get("waits") is True for message in messages)
        return messages

    def exit_code(self) -> int | None:
        """The exit code, or None while the child runs. Waits up to 5 s for its last messages."""
        code = self._process.poll()
        if code is not None:
            # Its last messages may still be in the pipe.
            self._reader.join(timeout=5.0)
        return code

    def pause(self, paused: bool) -> None:
        """Asks the child to pause or resume. Has no effect once it has ended."""
        self._write("pause" if paused else "resume")

    def stop(self, grace_seconds: float) -> None:
        """Ends the process, unless it is kept for another job."""
        if self._waits and self._process.poll() is None:
            self._keep(self)
        else:
            self.end(grace_seconds)

    def end(self, grace_seconds: float) -> None:
        """Closes the child's stdin, waits `grace_seconds`, then kills it. Returns when it has ended."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            # The child exits when its stdin closes.
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
            # It has ended, which `exit_code` reports.
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
    """Starts a new file when a log has reached LOG_BYTES. One older file is kept with the suffix `.1`."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size >= LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))


class ProcessLauncher:
    """core.Launcher. log: receives the child's stderr. threads: BLAS threads of the child, 0 for half of the cores.

    A child that has finished its job is kept for READY_SECONDS and used for a comparison. Training starts in a new process.

    share: called with the number of cores left for this process while a child runs, and with all cores when it has
    ended. Practice leaves all cores, because it pauses while a request is being answered. Two BLAS libraries that each
    use every core wait for each other's threads: on 2 cores both ran ten times slower.
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
        """Sends `spec` as one JSON line to the waiting child, or starts one with its BLAS threads set. Raises OSError."""
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
        """Ends the waiting child, if there is one. Idempotent."""
        with self._lock:
            if (ready := self._take()) is not None:
                ready.end(GRACE_SECONDS)

    def _start(self, spec: Mapping[str, object]) -> Process:
        # Set before the child starts: BLAS libraries read these when they are loaded.
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
