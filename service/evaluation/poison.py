"""`redraft eval poison`: the loop under traffic of which nine in ten requests were written to spoil the draft.

Outputs cannot change, for decoding is lossless whatever drafts. What can be lost is the draft's worth to the other clients,
which is measured on honest prompts that no run sees.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from service.core import BARE_DRAFT, BadRequest, Generation
from service.evaluation.local_loop import History, LocalLoop, measured_costs
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine
from service.evaluation.target_outputs import greedy_answers
from service.evaluation.training_run import DRAFT_LENGTH
from service.learning.job import CACHE_BYTES
from service.learning.scoring.score import score
from service.models.pair import Pair, load_pair
from service.settings import Settings

HOSTILE = 0.9
"""Share of the requests that are hostile."""
PHRASES = ("BUY NOW ", "lorem ipsum ", "0x00 ", "aaaa", "?!", "the the ", "1 1 2 ", "SELECT * ")
CLIENT = "mallory"
COLUMNS = (
    "hostile requests (9 in 10)",
    "runs (promoted)",
    "bare draft: agreement, acceptance",
    "what serves in the end",
    "worst candidate",
)


class DraftQuality(NamedTuple):
    """Of a draft on honest prompts that no run saw: agreement, and accepted over drafted tokens at DRAFT_LENGTH."""

    agreement: float
    acceptance_rate: float

    def __str__(self) -> str:
        return f"{self.agreement:.4f}, {self.acceptance_rate:.4f}"


@dataclass(frozen=True, slots=True)
class Poisoned:
    """How one attack ended. bare, serving: the bare draft, and what serves in the end. candidates: of all runs, promoted or
    not."""

    attack: str
    requests: int
    history: History
    bare: DraftQuality
    serving: DraftQuality
    candidates: Sequence[DraftQuality]

    def cells(self) -> tuple[object, ...]:
        """The attack's row of the table, in the order of `COLUMNS`; the worst candidate has the lowest agreement."""
        runs = self.history.runs
        worst = min(self.candidates, default="")
        promoted = sum(run.promoted for run in runs)
        return (self.attack, f"{len(runs)} ({promoted})", str(self.bare), str(self.serving), str(worst))

    def plain(self) -> dict[str, Any]:
        """The attack's results by name, JSON-ready; pairs are (agreement, acceptance rate)."""
        return {
            "requests": self.requests,
            "runs": [
                {"at": run.at, "promoted": run.promoted, "reason": run.reason, "generations": run.generations}
                for run in self.history.runs
            ],
            "bare": self.bare,
            "serving": self.serving,
            "candidates": list(self.candidates),
        }


def hostile_prompts(pair: Pair, count: int, seed: int) -> Mapping[str, list[PromptLine]]:
    """By attack, `count` prompts: random tokens, or one string over and over."""
    rng = random.Random(seed)
    noise = [[rng.randrange(pair.shared_vocabulary) for _ in range(rng.randint(20, 80))] for _ in range(count)]
    repeated = [rng.choice(PHRASES) * rng.randint(8, 40) + str(rng.randrange(count)) for _ in range(count)]
    return {
        "random tokens": [_line(i, cast("str", pair.target.tokenizer.decode(ids))) for i, ids in enumerate(noise)],
        "repeated strings": [_line(i, text) for i, text in enumerate(repeated)],
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
    on_progress: OnProgress = silent,
) -> Generator[Poisoned]:
    """Yields each attack when it is over: random tokens, repeated strings, both from one client.

    models: target and draft folders. general: the shipped replay set. honest: prompts of which a tenth of `requests` is taken.
    test: honest prompts to measure on. rows: prompts the target answers together. Raises BadRequest for too few honest prompts.
    """
    mx.set_cache_limit(CACHE_BYTES)
    honest_count = round(requests * (1.0 - HOSTILE))
    hostile_count = requests - honest_count
    if len(honest) < honest_count:
        raise BadRequest(
            f"{len(honest)} honest prompts are fewer than the {honest_count} that are needed", field="honest"
        )
    pair = load_pair(*models)
    costs = measured_costs(pair)

    def answers(stage: str, lines: Sequence[PromptLine]) -> list[Generation]:
        home = settings.home
        found = greedy_answers(pair, lines, home, stage, max_tokens=max_tokens, rows=rows, on_progress=on_progress)
        return [_from(g, None) for g in found]

    served, unseen = answers("honest requests", honest[:honest_count]), answers("honest prompts to measure on", test)
    attacks = {name: answers(name, lines) for name, lines in hostile_prompts(pair, hostile_count, seed=1).items()}
    halves = [each[: hostile_count // 2] for each in attacks.values()]
    attacks["both, from one client"] = [_from(g, CLIENT) for half in halves for g in half]
    for i, (attack, hostile) in enumerate(attacks.items()):
        on_progress(attack, i, len(attacks))
        mixed = [*served, *hostile]
        random.Random(i).shuffle(mixed)
        traffic = [replace(g, id=f"{attack}-{n}") for n, g in enumerate(mixed)]
        with tempfile.TemporaryDirectory(prefix="redraft-poison-") as scratch:
            loop = LocalLoop(settings, pair, models, general, Path(scratch), costs=costs)
            try:
                found = _attack(loop, attack, traffic, unseen)
            finally:
                loop.close()
        yield found


def _attack(loop: LocalLoop, attack: str, traffic: Sequence[Generation], unseen: Sequence[Generation]) -> Poisoned:
    history, candidates = History(), dict[int, DraftQuality]()

    def judge() -> None:
        """The files of a rejected candidate are deleted once there is another."""
        for ref in loop.stores.adapters.all()[:1]:
            if ref.id not in candidates:
                candidates[ref.id] = _quality(loop.pair, loop.model(ref.id), unseen)

    loop.serve(traffic, history, on_run=judge)
    bare, serving = (_quality(loop.pair, loop.model(adapter), unseen) for adapter in (BARE_DRAFT, loop.drafts.active))
    return Poisoned(attack, len(traffic), history, bare, serving, list(candidates.values()))


def _from(generation: Generation, client: str | None) -> Generation:
    """The generation without a domain: nothing tells the service which requests to trust."""
    return replace(generation, prompt=replace(generation.prompt, domain=None, client=client))


def _quality(pair: Pair, model: nn.Module, generations: Sequence[Generation]) -> DraftQuality:
    scores = score(model, generations, k=DRAFT_LENGTH, vocabulary=pair.vocabulary)
    tokens, calls = sum(one.tokens for one in scores), sum(one.calls[-1] for one in scores)
    return DraftQuality(sum(one.agreed for one in scores) / tokens, (tokens - calls) / (DRAFT_LENGTH * calls))
