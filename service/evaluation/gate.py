"""`redraft eval gate`: candidates whose worth is known, judged by the gate.

Three kinds of candidates. Trained: one real run each, in a database of its own. Shuffled: the same on texts whose target
distributions are permuted among all positions, so that there is nothing to learn. Noisy: the first trained one with noise on
its weights, judged against itself without noise. The worth of the first two is measured on prompts that neither runs nor gate
see.
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

from service.core import (
    BARE_DRAFT,
    BadRequest,
    Generation,
    RedraftError,
    Score,
    Targets,
    TrainingRun,
    Verdict,
)
from service.engine.costs import Costs
from service.engine.folding import as_served
from service.evaluation.local_loop import LocalLoop, measured_costs, round_seconds
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine
from service.evaluation.target_outputs import greedy_answers
from service.evaluation.training_run import DRAFT_LENGTH
from service.learning import lora
from service.learning.job import CACHE_BYTES
from service.learning.scoring.score import held_out, score
from service.lifecycle import gate
from service.models import vocabulary
from service.models.pair import Pair, load_pair
from service.settings import Settings
from service.store.log.generations import HELD_OUT, split_of

NOISES = (0.01, 0.02, 0.05, 0.1)
"""Standard deviations of the noise, as shares of each weight matrix's own; noisy candidates use them in turn."""
ACCEPTANCE_LENGTHS = "tokens-per-call.json"
"""File in the folder with the acceptance lengths that are measured already."""
GOOD = 0.02
"""Worth from which on a candidate should be promoted."""


class Kind(StrEnum):
    """How a candidate was made."""

    BETTER = "trained"
    SHUFFLED = "trained on shuffled targets"
    NOISY = "the active one with noise"


@dataclass(frozen=True, slots=True)
class GateCandidate:
    """seed: of the texts it is trained on, or of its noise."""

    kind: Kind
    seed: int

    @property
    def name(self) -> str:
        """Unique name of the candidate, such as `better-3`."""
        return f"{self.kind.name.lower()}-{self.seed}"


FIRST = GateCandidate(Kind.BETTER, 1)
"""The active adapter against which noisy candidates are judged."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate with its verdict. worth: relative change of the acceptance length, at DRAFT_LENGTH tokens a round, on prompts
    that the gate does not see; None for noisy candidates."""

    candidate: GateCandidate
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
    """A row of the table for each kind; of gain and worth the least, the median and the largest."""
    rows: list[tuple[object, ...]] = []
    for kind in Kind:
        mine = [one for one in judged if one.candidate.kind is kind]
        if not mine:
            continue
        measured = [one for one in mine if one.worth is not None]
        good = [one for one in measured if one.worth is not None and one.worth >= GOOD]
        rows.append(
            (
                kind.value,
                len(mine),
                _promoted(mine),
                _spread([one.verdict.gain for one in mine]),
                _spread([one.worth for one in measured if one.worth is not None]) if measured else "",
                f"{len(good)}, promoted {_promoted(good)}" if measured else "",
            )
        )
    return tuple(rows)


def _promoted(judged: Sequence[Judged]) -> int:
    return sum(one.verdict.promoted for one in judged)


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
    on_progress: OnProgress = silent,
) -> Generator[Judged]:
    """Yields each candidate when it is judged.

    models: target and draft folders. general: the shipped replay set. learn: prompts to train on; held-out ones go to the gate.
    test: prompts on which the worth is measured. folder: for each candidate's database, adapter and verdict, and measured
    worths; what is there already is not made again. count: adapters trained of either kind, each on `cases` texts of its own
    draw. noisy: number of noisy candidates. rows: prompts the target answers together.

    Raises BadRequest for too few prompts, RedraftError when a run fails.
    """
    mx.set_cache_limit(CACHE_BYTES)
    pair = load_pair(*models)
    held_out_lines = [line for line in learn if split_of(line.prompt) == HELD_OUT]
    learnt_lines = [line for line in learn if split_of(line.prompt) != HELD_OUT]
    if len(learnt_lines) < cases or len(held_out_lines) < settings.gate.min_prompts:
        counts = f"{len(learnt_lines)} prompts to learn from and {len(held_out_lines)} held out"
        raise BadRequest(f"{counts} are too few", field="train")

    def answers(stage: str, lines: Sequence[PromptLine]) -> list[Generation]:
        home = settings.home
        return greedy_answers(pair, lines, home, stage, max_tokens=max_tokens, rows=rows, on_progress=on_progress)

    trial = _GateTrial(
        settings=settings,
        pair=pair,
        models=models,
        general=general,
        cases=cases,
        costs=measured_costs(pair),
        held_out=answers("held-out texts", held_out_lines),
        texts=answers("texts to learn from", learnt_lines),
        answer_test=lambda: answers("other prompts", test),
        folder=folder,
    )
    candidates = _candidates(count, noisy)
    for i, candidate in enumerate(candidates):
        on_progress(candidate.kind, i, len(candidates))
        yield trial.judge_noisy(candidate) if candidate.kind is Kind.NOISY else trial.judge_trained(candidate)


def _candidates(count: int, noisy: int) -> list[GateCandidate]:
    trained = [GateCandidate(kind, seed) for seed in range(1, count + 1) for kind in (Kind.BETTER, Kind.SHUFFLED)]
    return [*trained, *(GateCandidate(Kind.NOISY, seed) for seed in range(1, noisy + 1))]


@dataclass(frozen=True)
class _GateTrial:
    """Makes and judges candidates of one pair.

    cases: texts of which each candidate learns. held_out, texts: generations for the gate, and to learn from. answer_test:
    makes the generations on which the worth is measured, when they are needed. folder: of all candidates.
    """

    settings: Settings
    pair: Pair
    models: tuple[Path, Path]
    general: Path | None
    cases: int
    costs: Costs
    held_out: Sequence[Generation]
    texts: Sequence[Generation]
    answer_test: Callable[[], Sequence[Generation]]
    folder: Path

    @cached_property
    def test(self) -> Sequence[Generation]:
        """Generations on which the worth is measured."""
        return self.answer_test()

    def judge_trained(self, candidate: GateCandidate) -> Judged:
        """Train and judge it through the loop, or read the run that is in its folder. Raises RedraftError when the run
        failed."""
        loop = self._loop(candidate)
        try:
            judged = (run for run in loop.stores.runs.latest(100) if run.state.judged)
            run = next(judged, None) or self._train(loop, candidate)
            if run.verdict is None or run.adapter is None:
                raise RedraftError(f"{candidate.name}: the run {run.state}: {run.error}")
            length = self._acceptance_length(candidate.name, loop, run.adapter)
            worth = length / self._acceptance_length("bare", loop, BARE_DRAFT) - 1.0
        finally:
            loop.close()
        return Judged(candidate, run.verdict, worth)

    def judge_noisy(self, candidate: GateCandidate) -> Judged:
        """Judge FIRST with noise against FIRST, on the held-out texts that the gate would draw for a run of that number."""
        self.judge_trained(FIRST)
        loop = self._loop(FIRST)
        try:
            ref, rules = loop.stores.adapters.all()[0], self.settings.gate
            drawn = held_out(loop.stores.generations, self.pair.provenance, limit=rules.max_prompts, run=candidate.seed)
        finally:
            loop.close()
        noisy = self._with_noise(ref.folder, NOISES[(candidate.seed - 1) % len(NOISES)], candidate.seed)
        first = self._with_noise(ref.folder, 0.0, 0)
        seconds = round_seconds(self.costs)
        verdict = gate.judge(
            gate.Scored(self._scores(noisy, drawn), seconds=seconds),
            gate.Scored(self._scores(first, drawn), seconds=seconds),
            rules,
            seed=candidate.seed,
        )
        return Judged(candidate, verdict, None)

    def _loop(self, candidate: GateCandidate) -> LocalLoop:
        # Of general texts, which keep the target's own distributions, something could be learnt.
        general = None if candidate.kind is Kind.SHUFFLED else self.general
        folder = self.folder / candidate.name
        return LocalLoop(self.settings, self.pair, self.models, general, folder, costs=self.costs)

    def _train(self, loop: LocalLoop, candidate: GateCandidate) -> TrainingRun:
        fresh = random.Random(candidate.seed).sample(self.texts, self.cases)
        if candidate.kind is Kind.SHUFFLED:
            fresh = shuffled(fresh, candidate.seed)
        loop.record([*(replace(g, id=f"held-out-{g.id}") for g in self.held_out), *fresh])
        return loop.train()

    def _scores(self, model: nn.Module, generations: Sequence[Generation]) -> list[Score]:
        return score(model, generations, k=DRAFT_LENGTH, vocabulary=self.pair.vocabulary)

    def _acceptance_length(self, name: str, loop: LocalLoop, adapter: int) -> float:
        """On the test generations; read from the folder where it is there."""
        path = self.folder / ACCEPTANCE_LENGTHS
        known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if name not in known:
            scores = self._scores(loop.model(adapter), self.test)
            known[name] = sum(s.tokens for s in scores) / sum(s.calls[-1] for s in scores)
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        return known[name]

    def _with_noise(self, adapter: Path, share: float, seed: int) -> nn.Module:
        """The draft as it would serve with an adapter whose matrices have noise of `share` times their own deviation. NumPy
        draws it: the same on any machine."""
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
    """The same texts, with the target's distributions permuted among all their positions. All have targets."""
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
