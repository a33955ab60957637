"""Arms that decode one stream, and their taking turns: the one timer of single streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx

from service.core import Prompt
from service.engine.adapters import Draft
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.models.pair import Pair

Name = TypeVar("Name", str, int)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer. tokens: with the end token. calls: of the target. seconds: from the moment when all of the prompt but its
    last token had been read (by target and draft) to the last token, so that every token has its call inside."""

    tokens: list[int]
    calls: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.tokens) / self.seconds


class Arm(Protocol):
    """One way of decoding. settings: what was chosen for it, for the report."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Settings of this arm by name, as the report shows them."""
        ...

    def decode(self, prompt: Prompt) -> Decoded:
        """Decode one prompt to its end and time it without prefill."""
        ...


class EngineArm:
    """This engine, without evidence for the log. draft None: the target alone. k: tokens drafted, at most so many where
    `adaptive`; lookup: tokens looked up at most."""

    def __init__(
        self,
        pair: Pair,
        draft: Draft | None,
        *,
        k: int,
        lookup: int = 0,
        adaptive: bool = True,
        prefill_chunk: int | None = None,
    ) -> None:
        self.settings: Mapping[str, object] = {} if draft is None else {"k": k, "adaptive": adaptive}
        self._eos = pair.eos
        self._decoder = Decoder(
            pair.target.model,
            draft,
            vocabulary=pair.vocabulary,
            k=k if draft is not None else 0,
            prefill_chunk=prefill_chunk,
            adaptive=adaptive,
            lookup=lookup,
        )
        self._decoder.profile(1)

    def decode(self, prompt: Prompt) -> Decoded:
        """Decode one prompt as the only row of the batch; prefill is not timed, and each round is one target call."""
        row = Request("", prompt, self._eos, None)
        self._decoder.admit(row)
        # On accelerators prefill is not waited for, nor a round that was launched for a text that has ended.
        mx.synchronize()
        started_at = time.perf_counter()
        while row.finish is None:
            self._decoder.round()
        seconds = time.perf_counter() - started_at
        mx.synchronize()
        return Decoded(row.output, len(row.rounds), seconds)


def rotated(names: Sequence[Name], turn: int) -> list[Name]:
    """The order of a turn: a machine that slows down, or what one arm leaves in the caches, meets all arms alike."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def take_turns(
    arms: Mapping[Name, Arm],
    prompts: Sequence[Prompt],
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> dict[Name, list[Decoded]]:
    """Every arm's answer to every prompt, prompt by prompt."""
    heard: dict[Name, list[Decoded]] = {name: [] for name in arms}
    for turn, prompt in enumerate(prompts):
        on_step(turn, len(prompts))
        for name in rotated(list(arms), turn):
            heard[name].append(arms[name].decode(prompt))
    return heard
