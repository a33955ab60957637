"""`redraft eval agreement`: how well a draft predicts the target's greedy text.

Agreement, acceptance length and overlap are three different figures; docs/results/learning.md defines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
import numpy as np

from service.core import BARE_DRAFT, Generation, Score
from service.engine.adapters import load, served
from service.evaluation.prompts import PromptLine
from service.evaluation.target_outputs import greedy_generations
from service.learning.scoring.acceptance import overlap
from service.learning.scoring.score import score
from service.models.pair import Pair, load_pair
from service.settings import Settings
from service.store.stores import open_stores

K = 4
"""Draft length at which the acceptance length is reported."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Figures of one draft on greedy text.

    agreement: share of the output tokens that are the draft's argmax. acceptance_length: tokens per target call at draft length
    K. overlap: mean of the sum of min(p, q) at T = 1, the acceptance rate of unfiltered sampling.
    """

    agreement: float
    acceptance_length: float
    overlap: float
    tokens: int
    prompts: int

    def plain(self) -> dict[str, float | int]:
        """The figures by name, JSON-ready; the acceptance length is `tokens_per_call`."""
        return {
            "agreement": self.agreement,
            "tokens_per_call": self.acceptance_length,
            "overlap": self.overlap,
            "tokens": self.tokens,
            "prompts": self.prompts,
        }


def run_agreement(
    settings: Settings,
    models: tuple[Path, Path],
    lines: Sequence[PromptLine],
    adapter: int = BARE_DRAFT,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> Agreement:
    """The figures of the draft with an adapter on the target's greedy answers to `lines`.

    models: folders of target and draft. on_step: (answers at hand, of all). Raises NotFound for an unknown adapter, and
    AdapterRefused or ModelError for files that cannot be used.
    """
    pair = load_pair(*models)
    model = _draft(settings, pair, adapter)
    generations = greedy_generations(pair, lines, settings.home, on_step=on_step)
    return measure(model, generations, pair.vocabulary)[0]


def _draft(settings: Settings, pair: Pair, adapter: int) -> nn.Module:
    assert pair.draft is not None
    bare = served(pair.draft).model
    if adapter == BARE_DRAFT:
        return bare
    stores = open_stores(settings)
    try:
        ref = stores.adapters.get(adapter)
    finally:
        stores.close()
    return load(bare, ref, pair.provenance.draft).model


def measure(model: nn.Module, generations: Sequence[Generation], vocabulary: int) -> tuple[Agreement, list[Score]]:
    """The figures of one draft, and its score on each generation with output.

    Makes two teacher-forced passes: one for the scores, one for the overlap. `generations` are greedy and carry targets;
    vocabulary is the width that logits are cut to.
    """
    answered = [generation for generation in generations if generation.output]
    scores = score(model, answered, k=K, vocabulary=vocabulary)
    overlaps = overlap(model, answered, vocabulary=vocabulary)
    tokens = sum(one.tokens for one in scores)
    return (
        Agreement(
            agreement=sum(one.agreed for one in scores) / tokens,
            acceptance_length=tokens / sum(one.calls[K - 1] for one in scores),
            overlap=float(np.concatenate(overlaps).mean()),
            tokens=tokens,
            prompts=len(scores),
        ),
        scores,
    )


def paired_low90(before: Sequence[Score], after: Sequence[Score], resamples: int = 2000, seed: int = 0) -> float:
    """Lower end of the two-sided 90 % bootstrap interval, over prompts, of the change in agreement.

    before, after: scores of two drafts on the same generations, in the same order.
    """
    tokens = np.array([one.tokens for one in before], dtype=np.float64)
    gained = np.array([b.agreed - a.agreed for a, b in zip(before, after, strict=True)], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(tokens), (resamples, len(tokens)))
    return float(np.quantile(gained[drawn].sum(axis=1) / tokens[drawn].sum(axis=1), 0.05))
