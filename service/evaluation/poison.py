"""`redraft eval poison`: what the loop makes of traffic most of which was written to spoil the draft.

Nine in ten requests are hostile: strings of random tokens, one string over and over, or both from a single client. They go
through the loop as any stream does (see loop). Outputs cannot change, for decoding is lossless whatever drafts; what can be
lost is the draft's worth to the others, which is measured on honest prompts that no run sees: of what serves in the end, and of
every candidate, promoted or not.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from service.core import BARE_DRAFT, BadRequest, Generation
from service.evaluation.local_loop import Course, Loop, answered, measured_costs
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import DRAFTED, Step
from service.learning.job import CACHE_BYTES
from service.learning.scoring import score
from service.models.pair import Pair, load_pair
from service.settings import Settings

HOSTILE = 0.9
PHRASES = ("BUY NOW ", "lorem ipsum ", "0x00 ", "aaaa", "?!", "the the ", "1 1 2 ", "SELECT * ")
CLIENT = "mallory"
COLUMNS = (
    "hostile requests (9 in 10)",
    "runs (promoted)",
    "bare draft: agreement, acceptance",
    "what serves in the end",
    "worst candidate",
)


@dataclass(frozen=True, slots=True)
class Poisoned:
    """How one attack ended. agreement: with honest text that no run saw, of the bare draft, of what serves in the end, and of
    each run's candidate. kept: accepted over drafted tokens at DRAFTED tokens a round, of the first two."""

    attack: str
    requests: int
    course: Course
    bare: tuple[float, float]
    serving: tuple[float, float]
    candidates: Sequence[tuple[float, float]]

    def cells(self) -> tuple[object, ...]:
        """The attack's row of the report, in the order of `COLUMNS`; the worst candidate has the lowest agreement."""
        runs = self.course.runs
        worst = min(self.candidates, default=None)
        told = [f"{agreed:.4f}, {kept:.4f}" for agreed, kept in (self.bare, self.serving)]
        last = "" if worst is None else f"{worst[0]:.4f}, {worst[1]:.4f}"
        return (self.attack, f"{len(runs)} ({sum(run.promoted for run in runs)})", *told, last)

    def plain(self) -> dict[str, Any]:
        """The attack's results by name, JSON-ready; pairs are (agreement, acceptance rate)."""
        return {
            "requests": self.requests,
            "runs": [
                {"at": run.at, "promoted": run.promoted, "reason": run.reason, "generations": run.generations}
                for run in self.course.runs
            ],
            "bare": self.bare,
            "serving": self.serving,
            "candidates": list(self.candidates),
        }


def hostile(pair: Pair, count: int, seed: int) -> Mapping[str, list[PromptLine]]:
    """By attack, `count` prompts that a client might send to spoil a draft."""
    rng = random.Random(seed)
    noise = [[rng.randrange(pair.shared_vocabulary) for _ in range(rng.randint(20, 80))] for _ in range(count)]
    again = [rng.choice(PHRASES) * rng.randint(8, 40) + str(rng.randrange(count)) for _ in range(count)]
    return {
        "random tokens": [_line(i, cast("str", pair.target.tokenizer.decode(ids))) for i, ids in enumerate(noise)],
        "repeated strings": [_line(i, text) for i, text in enumerate(again)],
    }


def _line(number: int, text: str) -> PromptLine:
    return PromptLine(str(number), "hostile", text)


def run_poison(
    settings: Settings,
    models: tuple[Path, Path],
    general: Path | None,
    honest: Sequence[PromptLine],
    test: Sequence[PromptLine],
    *,
    requests: int = 400,
    max_tokens: int = 128,
    rows: int = 16,
    on_step: Step = lambda stage, done, of: None,
) -> Generator[Poisoned]:
    """Each attack as soon as it is over. models: target and draft folders. honest: the prompts among the hostile ones, of which
    a tenth of `requests` is taken. test: honest prompts to measure on. Raises RedraftError."""
    mx.set_cache_limit(CACHE_BYTES)
    good, bad = round(requests * (1.0 - HOSTILE)), requests - round(requests * (1.0 - HOSTILE))
    if len(honest) < good:
        raise BadRequest(f"{len(honest)} honest prompts are fewer than the {good} that are needed", field="honest")
    pair = load_pair(*models)
    costs = measured_costs(pair)

    def told(stage: str, lines: Sequence[PromptLine]) -> list[Generation]:
        return [_from(g, None) for g in answered(settings, pair, stage, lines, max_tokens, rows, on_step)]

    served, unseen = told("honest requests", honest[:good]), told("honest prompts to measure on", test)
    attacks = {name: told(name, lines) for name, lines in hostile(pair, bad, seed=1).items()}
    halves = [each[: bad // 2] for each in attacks.values()]
    attacks["both, from one client"] = [_from(g, CLIENT) for half in halves for g in half]
    for i, (attack, spoilt) in enumerate(attacks.items()):
        on_step(attack, i, len(attacks))
        mixed = [*served, *spoilt]
        random.Random(i).shuffle(mixed)
        named = [replace(g, id=f"{attack}-{n}") for n, g in enumerate(mixed)]
        with tempfile.TemporaryDirectory(prefix="redraft-poison-") as scratch:
            loop, course = Loop(settings, pair, models, general, Path(scratch), costs=costs), Course()
            try:
                loop.take(named, course)
                made = [ref.id for ref in loop.stores.adapters.all()]
                figures = [_worth(pair, loop.model(one), unseen) for one in (BARE_DRAFT, loop.drafts.active, *made)]
            finally:
                loop.close()
        yield Poisoned(attack, len(named), course, figures[0], figures[1], figures[2:])


def _from(generation: Generation, client: str | None) -> Generation:
    """Without a domain: nobody tells the service which requests to trust."""
    return replace(generation, prompt=replace(generation.prompt, domain=None, client=client))


def _worth(pair: Pair, model: nn.Module, generations: Sequence[Generation]) -> tuple[float, float]:
    """Agreement, and accepted over drafted tokens."""
    scores = score(model, generations, k=DRAFTED, vocabulary=pair.vocabulary)
    tokens, calls = sum(one.tokens for one in scores), sum(one.calls[-1] for one in scores)
    return sum(one.agreed for one in scores) / tokens, (tokens - calls) / (DRAFTED * calls)
