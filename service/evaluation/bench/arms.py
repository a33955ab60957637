"""Arms of a benchmark, which take turns; and the arm that decodes one stream with this engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx

from service.core import BadRequest, Prompt
from service.engine.adapters import Draft
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.models.pair import Pair

Name = TypeVar("Name", str, int)

PLAIN = "plain"
"""The arm of the target alone. It always takes part: the others are compared with it."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer. tokens: with the end token. calls: of the target. seconds: of decoding, which starts when target and draft
    have prefilled all of the prompt but its last token, so that it includes the call of every output token."""

    tokens: list[int]
    calls: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.tokens) / self.seconds


def tokens_per_second(answers: Sequence[Decoded]) -> float:
    """Of several answers, one after another."""
    return sum(len(one.tokens) for one in answers) / sum(one.seconds for one in answers)


class Arm(Protocol):
    """One way of decoding."""

    @property
    def settings(self) -> Mapping[str, object]:
        """Settings of this arm by name, for the report."""
        ...

    def decode(self, prompt: Prompt) -> Decoded:
        """Decode one prompt to its end; prefill is not timed."""
        ...


class EngineArm:
    """This engine, without evidence for the log. draft: None for the target alone. k: draft length, at most where `adaptive`.
    lookup: tokens of prompt look-up, at most."""

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
        # On accelerators neither prefill nor a round that was launched ahead is waited for.
        mx.synchronize()
        started_at = time.perf_counter()
        while row.finish is None:
            self._decoder.round()
        seconds = time.perf_counter() - started_at
        mx.synchronize()
        return Decoded(row.output, len(row.rounds), seconds)


def rotated(names: Sequence[Name], turn: int) -> list[Name]:
    """The order of a turn, another first name each time: a machine that slows down, and what an arm leaves in the caches,
    affect all arms alike."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def take_turns(
    arms: Mapping[Name, Arm],
    prompts: Sequence[Prompt],
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> dict[Name, list[Decoded]]:
    """Every arm's answer to every prompt, by arm; the arms take turns prompt by prompt. on_step: (prompts done, of all)."""
    decoded: dict[Name, list[Decoded]] = {name: [] for name in arms}
    for turn, prompt in enumerate(prompts):
        on_step(turn, len(prompts))
        for name in rotated(list(arms), turn):
            decoded[name].append(arms[name].decode(prompt))
    return decoded


def choose(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The named ones of the known arms, and PLAIN, in the order of `known`; None: all. Raises BadRequest for a name that is not
    known."""
    for name in names or ():
        if name not in known:
            raise BadRequest(f"no arm {name!r}: choose among {', '.join(known)}", field="arms")
    return [name for name in known if names is None or name in names or name == PLAIN]


def missing(name: str) -> str:
    """What the named arm needs and lacks, as the text of the error."""
    if name == "lookup":
        return "the arm lookup needs engine.num_lookup_tokens above 0, and no --k"
    if name.startswith("mlx_lm"):
        return f"the arm {name} needs a draft that mlx-lm runs: give --mlx-lm-draft" + (
            ", and --adapt-on" if name.endswith("adapted") else ""
        )
    needs = "an adapter: give --adapter or --adapt-on" if name.endswith("adapted") else "a draft"
    return f"the arm {name} needs {needs}"
