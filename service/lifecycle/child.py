"""A running child process: its messages, its pauses and its end."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from service.core import JobHandle, RunState
from service.lifecycle.messages import Ending, Failed, Message, Throttled, parse

GRACE_SECONDS = 5.0
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Sent by an operator, or by a service manager that stops the server with its children."""


class Pause(StrEnum):
    """Why a child pauses. BUSY: requests wait. STRAIN: the machine cannot spare what it takes."""

    BUSY = "busy"
    STRAIN = "strain"


class Child:
    """One job of a child process. `poll` fills `inbox`. The reader removes a message only after handling it, so that a
    failure (the database is unavailable) loses nothing. The last message is always an Ending; the job has then ended.
    timer: a monotonic time in seconds; the default stands still while the machine sleeps."""

    def __init__(self, handle: JobHandle, timer: Callable[[], float] = time.monotonic) -> None:
        self.inbox: deque[Message] = deque()
        self._handle = handle
        self._timer = timer
        self._started = timer()
        self._silent_end = False
        self._ended = False
        self._paused_since: float | None = None
        self._paused_before = 0.0
        self.throttled = 0.0
        """Seconds for which the child reports that it was throttled."""
        self._reasons: set[Pause] = set()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._handle.pid

    @property
    def ended(self) -> bool:
        """Whether its job has ended; messages may be left in `inbox`."""
        return self._ended

    @property
    def over(self) -> bool:
        """Whether it has ended and all of its messages have been handled."""
        return self._ended and not self.inbox

    def poll(self, limit_seconds: float) -> None:
        """Receives new messages. The child is killed after `limit_seconds` of work; paused and throttled time does not
        count."""
        if self._ended:
            return
        code = self._handle.exit_code()  # before the messages, so that everything written before the exit is read
        try:
            for message in [parse(message) for message in self._handle.poll()]:
                if isinstance(message, Throttled):
                    self.throttled = message.seconds
                else:
                    self.inbox.append(message)
        except ValueError as error:
            self.inbox.append(Failed(f"unreadable message from the child: {error}", RunState.CRASHED))
        ending = next((index for index, message in enumerate(self.inbox) if isinstance(message, Ending)), None)
        if ending is not None:
            while len(self.inbox) > ending + 1:
                self.inbox.pop()
        elif code == 0 and not self._silent_end:
            self._silent_end = True  # its last messages may still be in the pipe
            return
        elif code is not None:
            self.inbox.append(exit_failure(code))
        elif self._timer() - self._started - self._paused_seconds() - self.throttled > limit_seconds:
            reason = f"the child did not end within {limit_seconds:g} s of work"
            self.inbox.append(Failed(reason, RunState.TIMED_OUT))
        else:
            return
        self.stop()

    def pause(self, reason: Pause, on: bool) -> None:
        """Sets or clears one reason to pause, from any thread. The child pauses while there is any reason; only changes
        are sent."""
        with self._lock:
            if on:
                self._reasons.add(reason)
            else:
                self._reasons.discard(reason)
            paused = bool(self._reasons)
            if paused is (self._paused_since is not None) or self._ended:
                return
            self._paused_before = self._paused_seconds()
            self._paused_since = self._timer() if paused else None
            self._handle.pause(paused)

    def fail(self, state: RunState, reason: str) -> None:
        """Ends the job early: its last message becomes a failure with this reason."""
        if not self._ended:
            self.inbox.append(Failed(reason, state))
            self.stop()

    def _paused_seconds(self) -> float:
        return self._paused_before + (self._timer() - self._paused_since if self._paused_since is not None else 0.0)

    def stop(self) -> None:
        """Ends the job, whatever it is doing. Idempotent: its process may have another job by then."""
        if not self._ended:
            self._ended = True
            self._handle.stop(GRACE_SECONDS)


def exit_failure(code: int) -> Failed:
    """The failure of a process that sent no last message. code: its exit code, or the negative number of the signal."""
    if code == -signal.SIGKILL:
        # Only the system sends SIGKILL here: `stop` sends it only after the ending is known.
        return Failed("the child was killed, as the system does when memory is short", RunState.OUT_OF_MEMORY)
    if -code in _ENDING_SIGNALS:
        return Failed(f"the child was ended by {signal.Signals(-code).name}", RunState.ENDED)
    name = f" ({signal.Signals(-code).name})" if -code in signal.valid_signals() else ""
    return Failed(f"the child ended with exit code {code}{name}", RunState.CRASHED)
