"""`redraft eval gate`: does the gate tell apart what a run made better, what it made worse, and what is no different?

Candidates are made and judged by the loop itself, each in a log of its own: a run on texts as the target wrote them, or on
texts whose targets were dealt out among all positions anew, so that there is nothing to learn from them. Both are judged
against the bare draft. Others are the first of the good ones with noise on its weights, judged against that one as the gate
would. What each is worth is measured on prompts that neither a run nor the gate sees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import BARE_DRAFT, BadRequest, Generation, RedraftError, Score, Targets, TrainingRun, Verdict
from service.engine.costs import Costs
from service.engine.folding import as_served
from service.evaluation.local_loop import Loop, answered, measured_costs, round_seconds
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import DRAFTED, Step
from service.learning import lora
from service.learning.job import CACHE_BYTES
from service.learning.scoring import held_out, score
from service.lifecycle import gate
from service.models import vocabulary
from service.models.pair import Pair, load_pair
from service.settings import Settings
from service.store.generations import HELD_OUT, split_of

NOISES = (0.01, 0.02, 0.05, 0.1)
"""Standard deviations of the noise, of each weight matrix's own; the noisy ones take them in turn."""
TRUTHS = "tokens-per-call.json"


class Kind(StrEnum):
    """How a candidate was made."""

    BETTER = "trained"
    SHUFFLED = "trained on shuffled targets"
    NOISY = "the active one with noise"


@dataclass(frozen=True, slots=True)
class Candidate:
    """seed: what it was trained on, or its noise."""

    kind: Kind
    seed: int

    @property
    def name(self) -> str:
        """Unique name of the candidate, such as `better-3`."""
        return f"{self.kind.name.lower()}-{self.seed}"


FIRST = Candidate(Kind.BETTER, 1)
"""The one that serves while those with noise are judged."""


@dataclass(frozen=True, slots=True)
class Judged:
    """worth: relative change of tokens per target call, at DRAFTED tokens a round, on the separate prompts; not measured of
    what has noise."""

    candidate: Candidate
    verdict: Verdict
    worth: float | None

    def plain(self) -> dict[str, Any]:
        """The candidate, its verdict and its worth by name, JSON-ready; gain, low90 and worth are fractions."""
        verdict = self.verdict
        return {
            "name": self.candidate.name,
            "kind": self.candidate.kind.value,
            "promoted": verdict.promoted,
            "reason": verdict.reason,
            "gain": verdict.gain,
            "low90": verdict.low90,
            "worth": self.worth,
        }


COLUMNS = (
    "adapters",
    "judged",
    "promoted",
    "gain by the gate",
    "tokens per call on other prompts",
    "of these at least +2 %",
)


def cells(judged: Sequence[Judged]) -> tuple[tuple[object, ...], ...]:
    """A row for each kind: least, median and largest gain and worth."""
    found: list[tuple[object, ...]] = []
    for kind in Kind:
        mine = [one for one in judged if one.candidate.kind is kind]
        if not mine:
            continue
        worth = [one.worth for one in mine if one.worth is not None]
        good = [one for one in mine if one.worth is not None and one.worth >= 0.02]
        kept = f"{len(good)}, promoted {sum(one.verdict.promoted for one in good)}" if worth else ""
        spread = (_spread([one.verdict.gain for one in mine]), _spread(worth) if worth else "")
        found.append((kind.value, len(mine), sum(one.verdict.promoted for one in mine), *spread, kept))
    return tuple(found)


def _spread(values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, (0.0, 0.5, 1.0)).tolist()
    return f"{low:+.1%}, {middle:+.1%}, {high:+.1%}"


def run_gate(
    settings: Settings,
    models: tuple[Path, Path],
    general: Path | None,
    learn: Sequence[PromptLine],
    test: Sequence[PromptLine],
    folder: Path,
    *,
    count: int = 20,
    noisy: int = 100,
    cases: int = 400,
    max_tokens: int = 128,
    rows: int = 16,
    on_step: Step = lambda stage, done, of: None,
) -> Generator[Judged]:
    """Each candidate as soon as it is judged. models: target and draft folders. folder: keeps each candidate's log, adapter and
    verdict, and what it is worth; what is there already is not made again. count: adapters trained of either kind, each on
    `cases` texts of its own draw. noisy: so many with noise.

    Raises RedraftError.
    """
    mx.set_cache_limit(CACHE_BYTES)
    pair = load_pair(*models)
    held = [line for line in learn if split_of(line.prompt) == HELD_OUT]
    learnt = [line for line in learn if split_of(line.prompt) != HELD_OUT]
    if len(learnt) < cases or len(held) < settings.gate.min_prompts:
        raise BadRequest(f"{len(learnt)} prompts to learn from and {len(held)} held out are too few", field="train")

    def answers(stage: str, lines: Sequence[PromptLine]) -> list[Generation]:
        return answered(settings, pair, stage, lines, max_tokens, rows, on_step)

    bench = _Bench(
        settings,
        pair,
        models,
        general,
        cases,
        measured_costs(pair),
        held=answers("held-out texts", held),
        texts=answers("texts to learn from", learnt),
        others=lambda: answers("other prompts", test),
        folder=folder,
    )
    trained = [Candidate(kind, seed) for seed in range(1, count + 1) for kind in (Kind.BETTER, Kind.SHUFFLED)]
    order = [*trained, *(Candidate(Kind.NOISY, seed) for seed in range(1, noisy + 1))]
    for i, candidate in enumerate(order):
        on_step(candidate.kind, i, len(order))
        yield bench.disturbed(candidate) if candidate.kind is Kind.NOISY else bench.trained(candidate)


class _Bench:
    """The pair, its texts, and the candidates' folders."""

    def __init__(
        self,
        settings: Settings,
        pair: Pair,
        models: tuple[Path, Path],
        general: Path | None,
        cases: int,
        costs: Costs,
        *,
        held: Sequence[Generation],
        texts: Sequence[Generation],
        others: Callable[[], Sequence[Generation]],
        folder: Path,
    ) -> None:
        self.settings = settings
        self.pair = pair
        self.models = models
        self.general = general
        self.cases = cases
        self.costs = costs
        self.held = held
        self.texts = texts
        self._others = others
        self.folder = folder

    @cached_property
    def others(self) -> Sequence[Generation]:
        """Answers to the separate prompts."""
        return self._others()

    def trained(self, candidate: Candidate) -> Judged:
        """Let the loop make and judge it, or read what it said."""
        loop = self._loop(candidate)
        try:
            run = next(iter(loop.stores.runs.latest(1)), None) or self._run(loop, candidate)
            if run.verdict is None or run.adapter is None:
                raise RedraftError(f"{candidate.name}: the run {run.state}: {run.error}")
            worth = self._per_call(candidate.name, loop, run.adapter) / self._per_call("bare", loop, BARE_DRAFT) - 1.0
        finally:
            loop.close()
        return Judged(candidate, run.verdict, worth)

    def disturbed(self, candidate: Candidate) -> Judged:
        """Judge the first good one with noise against itself, on texts that the gate of a run with its number would draw."""
        self.trained(FIRST)
        loop = self._loop(FIRST)
        try:
            ref, rules = loop.stores.adapters.all()[0], self.settings.gate
            drawn = held_out(loop.stores.generations, self.pair.provenance, limit=rules.max_prompts, run=candidate.seed)
        finally:
            loop.close()
        noisy = self._noisy(ref.folder, NOISES[(candidate.seed - 1) % len(NOISES)], candidate.seed)
        mine, first = (self._scores(model, drawn) for model in (noisy, self._noisy(ref.folder, 0.0, 0)))
        verdict = gate.judge(mine, first, rules, seconds=round_seconds(self.costs), seed=candidate.seed)
        return Judged(candidate, verdict, None)

    def _loop(self, candidate: Candidate) -> Loop:
        # General texts are as the target wrote them: something could be learnt from these.
        general = None if candidate.kind is Kind.SHUFFLED else self.general
        folder = self.folder / candidate.name
        return Loop(self.settings, self.pair, self.models, general, folder, costs=self.costs)

    def _run(self, loop: Loop, candidate: Candidate) -> TrainingRun:
        fresh = random.Random(candidate.seed).sample(self.texts, self.cases)
        if candidate.kind is Kind.SHUFFLED:
            fresh = shuffled(fresh, candidate.seed)
        loop.log([*(replace(g, id=f"held-out-{g.id}") for g in self.held), *fresh])
        return loop.train()

    def _scores(self, model: nn.Module, generations: Sequence[Generation]) -> list[Score]:
        return score(model, generations, k=DRAFTED, vocabulary=self.pair.vocabulary)

    def _per_call(self, name: str, loop: Loop, adapter: int) -> float:
        path = self.folder / TRUTHS
        known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if name not in known:
            scores = self._scores(loop.model(adapter), self.others)
            known[name] = sum(s.tokens for s in scores) / sum(s.calls[-1] for s in scores)
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        return known[name]

    def _noisy(self, adapter: Path, share: float, seed: int) -> nn.Module:
        """The draft as it would serve with an adapter on whose matrices there is noise of `share` times their own deviation.
        Drawn by numpy: the same on any machine."""
        assert self.pair.draft is not None
        draft, rng = self.pair.draft.model, np.random.default_rng(seed)
        lora.attach(draft, adapter, self.pair.provenance.draft)
        try:
            weights: list[tuple[str, mx.array]] = []
            for name, array in lora.weights_of(draft).items():
                exact = np.array(array.astype(mx.float32))
                noise = rng.standard_normal(exact.shape) * share * exact.std()
                weights.append((name, mx.array((exact + noise).astype(np.float32)).astype(array.dtype)))
            draft.load_weights(weights, strict=False)
            return as_served(draft, vocabulary.read(adapter) or vocabulary.read(self.models[1]))
        finally:
            lora.detach(draft)


def shuffled(generations: Sequence[Generation], seed: int) -> list[Generation]:
    """The same texts, each position with the target's distribution at some other position of some text. All have targets."""
    stored = [(g, g.targets) for g in generations if g.targets is not None]
    parts = [
        (
            np.frombuffer(targets.ids, dtype="<u4").reshape(-1, targets.top),
            np.frombuffer(targets.logprobs, dtype="<f2").reshape(-1, targets.top),
            np.frombuffer(targets.tail, dtype="<f2"),
        )
        for _, targets in stored
    ]
    ids, logprobs, tail = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.random.default_rng(seed).permutation(len(tail))
    ends = np.cumsum([targets.positions for _, targets in stored])[:-1]
    return [
        replace(g, targets=Targets(targets.top, ids[at].tobytes(), logprobs[at].tobytes(), tail[at].tobytes()))
        for (g, targets), at in zip(stored, np.split(order, ends), strict=True)
    ]
