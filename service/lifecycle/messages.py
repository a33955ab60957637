"""Messages that a training child may send: one JSON object per line, parsed into these types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from service.core import Progress, RunState, Score


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
    """Scores by adapter id or "candidate". by_adapter: on logged texts. golden: on the golden set, if there is one.
    steps: cost of a draft step with each adapter, in any unit."""

    by_adapter: Mapping[str, Sequence[Score]]
    golden: Mapping[str, Sequence[Score]]
    steps: Mapping[str, float] = field(default_factory=dict[str, float])

    def lengths(self, adapter: str) -> int:
        """Number of draft lengths it was scored at; 0 without scores."""
        return max((len(score.calls) for score in self.by_adapter.get(adapter, ())), default=0)

    def step(self, adapter: str, *, relative_to: str) -> float:
        """Cost of a draft step with `adapter`, relative to one with `relative_to`; 1 when not measured."""
        if adapter not in self.steps or relative_to not in self.steps:
            return 1.0
        return self.steps[adapter] / self.steps[relative_to]


@dataclass(frozen=True, slots=True)
class Texts:
    """Ids of the generations a run learns from, in addition to those it was claimed for."""

    window: tuple[str, ...]
    replay: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """The child has sent everything it was asked for."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ended without a result, for this reason. state: the resulting state of its run."""

    reason: str
    state: RunState = RunState.FAILED


@dataclass(frozen=True, slots=True)
class Throttled:
    """Seconds for which the child has slept so far to leave the device to others."""

    seconds: float


Ending: TypeAlias = Done | Failed
Message: TypeAlias = Progress | Texts | Candidate | Scores | Ending


def parse(message: Mapping[str, object]) -> Message | Throttled:
    """Parses one JSON object from the child. Raises ValueError for an invalid message."""
    match message.get("type"):
        case "progress":
            return Progress(
                step=_integer(message, "step"),
                steps=_integer(message, "steps"),
                loss=_optional(message, "loss"),
                grad_norm=_optional(message, "grad_norm"),
                tokens_per_second=_optional(message, "tokens_per_second"),
                seconds_left=_optional(message, "seconds_left"),
                writing=message.get("writing") is True,
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
        case "failed":
            state = RunState.OUT_OF_MEMORY if message.get("memory") is True else RunState.FAILED
            return Failed(_text(message, "reason"), state)
        case "throttled":
            return Throttled(_number(message, "seconds"))
        case "done":
            return Done()
        case other:
            raise ValueError(f"unknown message type {other!r}")


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
        raise ValueError(f"{name} is not a non-empty string")
    return value


def _names(message: Mapping[str, object], name: str) -> tuple[str, ...]:
    found = _list(message, name)
    if not all(isinstance(one, str) for one in found):
        raise ValueError(f"{name} contains a value that is not a string")
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
        raise ValueError(f"{name} is not positive")
    return number


def _optional(message: Mapping[str, object], name: str) -> float | None:
    """A number that may be absent, or not finite in a single step of a run that continues."""
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
        raise ValueError("domain or conversation is not a string")
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
