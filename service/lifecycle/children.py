"""A child process at work: what it may say, and what it has said so far."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias, cast

from service.core import FailureCase, JobHandle, Progress, Score

GRACE_SECONDS = 5.0


class Pause(StrEnum):
    """Why a child pauses. BUSY: requests wait. STRAIN: the machine cannot spare what it takes."""

    BUSY = "busy"
    STRAIN = "strain"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A finished adapter, published in its own folder."""

    folder: Path
    sha256: str
    rank: int
    scale: float
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """Adapter id, or "candidate", to its scores. by_adapter: on logged texts. golden: on the golden set, where there is one.
    steps: what a draft step costs with each, in any unit."""

    by_adapter: Mapping[str, Sequence[Score]]
    golden: Mapping[str, Sequence[Score]]
    steps: Mapping[str, float] = field(default_factory=dict[str, float])

    def step(self, adapter: str, *, relative_to: str) -> float:
        """How many times what it costs with `relative_to` a draft step costs with `adapter`; 1 where that was not measured."""
        if adapter not in self.steps or relative_to not in self.steps:
            return 1.0
        return self.steps[adapter] / self.steps[relative_to]


@dataclass(frozen=True, slots=True)
class Cases:
    """by_generation: id of an undrafted text to the cases that the draft would have left there."""

    by_generation: Mapping[str, Sequence[FailureCase]]


@dataclass(frozen=True, slots=True)
class Texts:
    """Generation ids of what a run learns from besides what it was claimed for."""

    window: tuple[str, ...]
    replay: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """All that was asked has been said."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The job itself says why there is no result."""

    reason: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process ended or broke off without saying so."""

    reason: str


Ending: TypeAlias = Done | GaveUp | Crashed
Message: TypeAlias = Progress | Texts | Candidate | Scores | Cases | Ending


def parse(message: Mapping[str, object]) -> Message:
    """One JSON object of the child's. Raises ValueError when it is none that a child may send."""
    match message.get("type"):
        case "progress":
            return Progress(
                step=_integer(message, "step"),
                steps=_integer(message, "steps"),
                loss=_optional(message, "loss"),
                grad_norm=_optional(message, "grad_norm"),
                tokens_per_second=_optional(message, "tokens_per_second"),
                seconds_left=_optional(message, "seconds_left"),
            )
        case "texts":
            return Texts(_names(message, "window"), _names(message, "replay"))
        case "candidate":
            return Candidate(
                folder=Path(_text(message, "folder")),
                sha256=_text(message, "sha256"),
                rank=_integer(message, "rank"),
                scale=_number(message, "scale"),
                keys=tuple(str(key) for key in _list(message, "keys")),
            )
        case "scores":
            return Scores(
                _scores(message.get("scores"), "scores"),
                _scores(message.get("golden", {}), "golden"),
                {name: _positive(cost, "step") for name, cost in _object(message.get("steps", {}), "steps").items()},
            )
        case "cases":
            by_generation = _object(message.get("cases"), "cases")
            return Cases({name: tuple(_case(item) for item in _list(by_generation, name)) for name in by_generation})
        case "failed":
            return GaveUp(_text(message, "reason"))
        case "done":
            return Done()
        case other:
            raise ValueError(f"unknown message type {other!r}")


class Child:
    """One child process. `listen` fills `inbox`; whoever reads it takes a message off only after acting on it, so that
    a failure to act (the database is away) loses nothing. The last message is always an Ending, and then the process
    is gone.
    """

    def __init__(self, handle: JobHandle, started: datetime) -> None:
        self.inbox: deque[Message] = deque()
        self._handle = handle
        self._started = started
        self._silent_end = False
        self._ended = False
        self._paused_since: datetime | None = None
        self._held = timedelta()
        self._reasons: set[Pause] = set()
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._handle.pid

    @property
    def ended(self) -> bool:
        """Its process is gone; what it said may still be to be acted on."""
        return self._ended

    @property
    def over(self) -> bool:
        """It has ended and everything it said has been acted on."""
        return self._ended and not self.inbox

    def listen(self, now: datetime, limit_seconds: float) -> None:
        """Take what it has written since the last call. It may run for `limit_seconds`, pauses not counted, then it is
        ended by force."""
        if self._ended:
            return
        code = self._handle.exit_code()  # before the messages: what was written before the exit is then surely read
        try:
            self.inbox.extend([parse(message) for message in self._handle.poll()])
        except ValueError as error:
            self.inbox.append(Crashed(f"unreadable message from the child: {error}"))
        ending = next((index for index, message in enumerate(self.inbox) if isinstance(message, Ending)), None)
        if ending is not None:
            while len(self.inbox) > ending + 1:
                self.inbox.pop()
        elif code == 0 and not self._silent_end:
            self._silent_end = True  # its last words may still be on the way through the pipe
            return
        elif code is not None:
            self.inbox.append(Crashed(f"the child ended with exit code {code}"))
        elif (now - self._started - self._paused_for(now)).total_seconds() > limit_seconds:
            self.inbox.append(Crashed(f"the child did not end within {limit_seconds:g} s"))
        else:
            return
        self.stop()

    def pause(self, reason: Pause, on: bool, now: datetime) -> None:
        """Set or clear one reason to pause, from any thread: it pauses while there is any. Sends only what is new."""
        with self._lock:
            if on:
                self._reasons.add(reason)
            else:
                self._reasons.discard(reason)
            paused = bool(self._reasons)
            if paused is (self._paused_since is not None) or self._ended:
                return
            self._held = self._paused_for(now)
            self._paused_since = now if paused else None
            self._handle.pause(paused)

    def _paused_for(self, now: datetime) -> timedelta:
        """In all, until now. A clock set back takes nothing off."""
        here = now - self._paused_since if self._paused_since is not None else timedelta()
        return self._held + max(here, timedelta())

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._ended = True
        self._handle.stop(GRACE_SECONDS)


def _object(value: object, name: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is not an object")
    return cast("Mapping[str, object]", value)


def _list(message: Mapping[str, object], name: str) -> list[object]:
    value = message.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name} is not a list")
    return cast("list[object]", value)


def _text(message: Mapping[str, object], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is not a text")
    return value


def _names(message: Mapping[str, object], name: str) -> tuple[str, ...]:
    found = _list(message, name)
    if not all(isinstance(one, str) for one in found):
        raise ValueError(f"{name} holds something that is not a text")
    return tuple(str(one) for one in found)


def _integer(message: Mapping[str, object], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is not a count")
    return value


def _number(message: Mapping[str, object], name: str) -> float:
    return _finite(message.get(name), name)


def _finite(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is not a finite number")
    return float(value)


def _positive(value: object, name: str) -> float:
    number = _finite(value, name)
    if number <= 0:
        raise ValueError(f"{name} is not above 0")
    return number


def _optional(message: Mapping[str, object], name: str) -> float | None:
    """A number that may be absent, or not finite for one step of a run that survives it."""
    value = message.get(name)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return _number(message, name)


def _scores(value: object, name: str) -> Mapping[str, Sequence[Score]]:
    by_adapter = _object(value, name)
    return {adapter: tuple(_score(item) for item in _list(by_adapter, adapter)) for adapter in by_adapter}


def _score(value: object) -> Score:
    item = _object(value, "score")
    domain, conversation = item.get("domain"), item.get("conversation", "")
    if not isinstance(domain, str) or not isinstance(conversation, str):
        raise ValueError("domain or conversation is not a text")
    return Score(
        generation=_text(item, "generation"),
        domain=domain,
        tokens=_integer(item, "tokens"),
        agreed=_integer(item, "agreed"),
        calls=tuple(_finite(each, "calls") for each in _list(item, "calls")),
        conversation=conversation,
        rounds=_integer(item, "rounds"),
        accepted=_integer(item, "accepted"),
        predicted=_number(item, "predicted"),
    )


def _case(value: object) -> FailureCase:
    item = _object(value, "case")
    return FailureCase(
        position=_integer(item, "position"),
        drafted=_integer(item, "drafted"),
        target=_integer(item, "target"),
        p=_number(item, "p"),
        q=_number(item, "q"),
        margin=_number(item, "margin"),
        tie=item.get("tie") is True,
    )
