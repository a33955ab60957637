"""`redraft eval ablate`: the training recipe, one thing varied at a time, on texts that the target wrote once.

Greedy text is the same whatever drafts it, and a sampled text is a sample of the target: so a recipe needs no serving to be
tried, only a run's own training on those texts and a teacher-forced pass of what came out over others. The whole head is
scored, not what it is cut to when it serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import BARE_DRAFT, BadRequest, Generation, TrainingFailed
from service.evaluation.agreement import K
from service.evaluation.outputs import generations
from service.evaluation.prompts import PromptLine
from service.evaluation.run import DRAFTED, Step
from service.evaluation.selection import position_losses, rejections_only, selected
from service.evaluation.variants import KEPT, Positions, Recipe, Table, tables
from service.evaluation.wholeloss import WholeDivergence
from service.learning import lora
from service.learning.buffer import GeneralSet, lesson
from service.learning.dataset import Example, build
from service.learning.fitting import fit
from service.learning.job import CACHE_BYTES
from service.learning.loss import TargetDivergence
from service.learning.offpolicy import overlap
from service.learning.rescore import TargetCache, with_targets
from service.learning.rounds import logged
from service.learning.scoring import score
from service.models.pair import Pair, load_pair
from service.settings import Settings

HEAVY = 2.0
"""Marks first rejections among the weights, where they are all that is kept."""
SEED = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """matched: at T = 0 agreement with the target's text, above it the overlap Σ min(p, q) at T = 1. per_call: tokens per
    target call at K = 4."""

    matched: float
    per_call: float


@dataclass(frozen=True, slots=True)
class Row:
    """One recipe's outcome. loss: nats at the run's end. seconds: of training alone. None where nothing was trained."""

    label: str
    tests: Mapping[str, Figures]
    loss: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A table as far as it is filled, the untrained draft in its first row."""

    table: Table
    tests: tuple[str, ...]
    rows: tuple[Row, ...] = ()

    @property
    def title(self) -> str:
        """The table's title, with the number of generations where all rows learn from the same number."""
        counts = {recipe.cases for recipe in self.table.rows.values()}
        return self.table.title if len(counts) > 1 else f"{self.table.title}, {counts.pop()} generations"

    @property
    def complete(self) -> bool:
        """Whether every recipe of the table has its row."""
        return len(self.rows) > len(self.table.rows)

    @property
    def columns(self) -> tuple[str, ...]:
        """Column headings of the report, in the order of `cells`."""
        what = "overlap" if self.table.temperature else "agreement"
        return ("", *(f"{test}: {what} (tokens per call)" for test in self.tests), "loss", "seconds")

    def cells(self) -> tuple[tuple[object, ...], ...]:
        """One tuple for each row, formatted for the report; empty text where nothing was trained."""
        return tuple(
            (
                row.label,
                *(f"{row.tests[test].matched:.4f} ({row.tests[test].per_call:.3f})" for test in self.tests),
                "" if row.loss is None else f"{row.loss:.3f}",
                "" if row.seconds is None else f"{row.seconds:.1f}",
            )
            for row in self.rows
        )

    def plain(self) -> dict[str, Any]:
        """The table as JSON-ready values, figures unrounded."""
        what = "overlap" if self.table.temperature else "agreement"
        return {
            "title": self.title,
            "temperature": self.table.temperature,
            "rows": [
                {
                    "name": row.label,
                    "loss": row.loss,
                    "seconds": row.seconds,
                    "tests": {name: {what: f.matched, "tokens_per_call": f.per_call} for name, f in row.tests.items()},
                }
                for row in self.rows
            ],
        }


def run_ablate(
    settings: Settings,
    models: tuple[Path, Path],
    general: Path | None,
    train: Sequence[PromptLine],
    tests: Mapping[str, Sequence[PromptLine]],
    *,
    cases: int = 200,
    only: Sequence[str] | None = None,
    max_tokens: int = 128,
    rows: int = 16,
    on_step: Step = lambda stage, done, of: None,
) -> Generator[Outcome]:
    """A table whenever a row of it is there, ending with all of them. models: target and draft folders. general: the shipped
    replay set. cases: generations learnt from, where that is not what is varied. rows: prompts the target answers together.

    Raises RedraftError.
    """
    if not 0 < cases <= len(train):
        raise BadRequest(f"{len(train)} prompts to train on are fewer than the {cases} asked for", field="train")
    chosen = tables(Recipe(settings.training, cases), len(train), only)
    mx.set_cache_limit(CACHE_BYTES)
    pair = load_pair(*models)
    assert pair.draft is not None
    bench = _Workbench(settings, pair, pair.draft.model, general, train, tests, max_tokens, rows, on_step)
    total = sum(len(table.rows) for table in chosen)
    done = 0
    for table in chosen:
        outcome = Outcome(table, tuple(tests), (Row("untrained", bench.static(table.temperature)),))
        for label, recipe in table.rows.items():
            on_step(table.name, done, total)
            outcome = replace(outcome, rows=(*outcome.rows, replace(bench.tried(recipe), label=label)))
            done += 1
            yield outcome


@dataclass(slots=True)
class _Workbench:
    """The pair, its texts, and what was tried on them."""

    settings: Settings
    pair: Pair
    draft: nn.Module
    general: Path | None
    train: Sequence[PromptLine]
    tests: Mapping[str, Sequence[PromptLine]]
    max_tokens: int
    rows: int
    on_step: Step
    _texts: dict[tuple[str, float], list[Generation]] = field(default_factory=dict[tuple[str, float], list[Generation]])
    _static: dict[float, dict[str, Figures]] = field(default_factory=dict[float, dict[str, Figures]])
    _tried: dict[Recipe, Row] = field(default_factory=dict[Recipe, Row])

    def static(self, temperature: float) -> dict[str, Figures]:
        if temperature not in self._static:
            self._static[temperature] = self._measured(temperature)
        return self._static[temperature]

    def tried(self, recipe: Recipe) -> Row:
        """Train by a recipe and measure, once."""
        if recipe not in self._tried:
            examples = self._examples(recipe)
            begun = time.perf_counter()
            with _wrapped(self.draft, recipe) as model:
                report = fit(model, examples, recipe.training, seed=SEED, loss=self._loss(recipe))
                seconds = time.perf_counter() - begun
                self._tried[recipe] = Row("", self._measured(recipe.temperature), report.loss, seconds)
        return self._tried[recipe]

    def _loss(self, recipe: Recipe) -> Callable[[nn.Module, Any], mx.array]:
        if recipe.full:
            return WholeDivergence(self.draft, self.pair.target.model, self.pair.shared_vocabulary, recipe.objective)
        return TargetDivergence(self.draft, recipe.objective)

    def _measured(self, temperature: float) -> dict[str, Figures]:
        found: dict[str, Figures] = {}
        for name in self.tests:
            told = [g for g in self._said(name, temperature) if g.output]
            scores = score(self.draft, told, k=K, vocabulary=self.pair.vocabulary)
            tokens = sum(one.tokens for one in scores)
            if temperature:
                matched = float(np.concatenate(overlap(self.draft, told, vocabulary=self.pair.vocabulary)).mean())
            else:
                matched = sum(one.agreed for one in scores) / tokens
            found[name] = Figures(matched, tokens / sum(one.calls[K - 1] for one in scores))
        return found

    def _said(self, name: str, temperature: float) -> list[Generation]:
        """What the target says to a test's prompts, or ("") to those that are learnt from."""
        if (name, temperature) not in self._texts:
            lines = self.tests[name] if name else self.train
            stage = f"{name or 'texts to learn from'}, T = {temperature:g}"
            self._texts[name, temperature] = generations(
                self.pair,
                lines,
                self.settings.home,
                temperature=temperature,
                max_tokens=self.max_tokens,
                rows=self.rows,
                on_step=lambda done, of: self.on_step(stage, done, of),
            )
        return self._texts[name, temperature]

    def _examples(self, recipe: Recipe) -> list[Example]:
        """What a run would learn from, weighed as the recipe says."""
        pair, training = self.pair, recipe.training
        who = pair.provenance
        only = recipe.positions is Positions.REJECTIONS
        heavy = HEAVY if only else training.reject_weight
        fresh = self._said("", recipe.temperature)[: recipe.cases]
        told = lesson(
            self._drafted(fresh) if heavy > 1.0 else fresh,
            share=training.replay,
            general=GeneralSet.load(self.general).generations(who, golden=False) if self.general is not None else [],
            reservoir=lambda count: [],
            seed=SEED,
        )
        told = with_targets(
            told,
            cache=TargetCache(self.settings.home / "targets", who.target),
            load_target=lambda: (pair.target.model, pair.vocabulary),
        )
        if only:
            # General texts, which a run replays without cases of their own, too.
            told = [*(g for g in told if g.rounds), *self._drafted([g for g in told if not g.rounds])]
        data = build(told, max_length=training.max_length, reject_weight=heavy, vocabulary=pair.shared_vocabulary)
        if not data.examples:
            raise TrainingFailed(f"no example to learn from: {data.skipped}")
        examples = list(data.examples)
        if only:
            return rejections_only(examples, heavy)
        return self._selected(examples, recipe) if recipe.positions is Positions.SELECTED else examples

    def _drafted(self, told: Sequence[Generation]) -> list[Generation]:
        """With the cases that the untrained draft would have left."""
        found = logged(self.draft, told, k=DRAFTED, adapter=BARE_DRAFT, vocabulary=self.pair.vocabulary)
        return [one.generation for one in found]

    def _selected(self, examples: Sequence[Example], recipe: Recipe) -> list[Example]:
        """AdaSPEC: positions that a reference, trained on all of them, does better at than the draft as it is."""
        size = recipe.training.batch_size
        before = position_losses(self.draft, examples, size)
        with _wrapped(self.draft, recipe) as reference:
            fit(reference, examples, recipe.training, seed=SEED)
            after = position_losses(reference, examples, size)
        return selected(examples, [b - a for b, a in zip(before, after, strict=True)], KEPT)


@contextmanager
def _wrapped(draft: nn.Module, recipe: Recipe) -> Generator[nn.Module]:
    """The draft with fresh LoRA layers for a while."""
    lora.wrap(draft, rank=recipe.training.rank, scale=recipe.training.scale, seed=SEED)
    try:
        yield draft
    finally:
        lora.detach(draft)
