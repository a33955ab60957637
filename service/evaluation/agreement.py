"""How well a draft predicts what the target says greedily: `redraft eval agreement`.

Three different figures, always named: agreement is the share of output tokens that are the draft's argmax; tokens per target
call follow from it by replaying the rounds exactly (greedy text is the same whatever drafted it); overlap is the mean of
Σ min(p, q) at T = 1, the acceptance that unfiltered sampling would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import mlx.nn as nn
import numpy as np

from service.core import Generation, Score
from service.learning.scoring.acceptance import overlap
from service.learning.scoring.score import score

K = 4
"""Draft length at which tokens per target call are reported."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Figures of one draft on greedy text. tokens_per_call: output tokens per target call at draft length K."""

    agreement: float
    tokens_per_call: float
    overlap: float
    tokens: int
    prompts: int

    def plain(self) -> dict[str, float | int]:
        """The figures by field name, JSON-ready."""
        return asdict(self)


def measure(model: nn.Module, generations: Sequence[Generation], vocabulary: int) -> tuple[Agreement, list[Score]]:
    """One teacher-forced pass for the scores, one for the overlap. `generations` are greedy and carry targets."""
    told = [generation for generation in generations if generation.output]
    scores = score(model, told, k=K, vocabulary=vocabulary)
    shared = overlap(model, told, vocabulary=vocabulary)
    tokens = sum(one.tokens for one in scores)
    return (
        Agreement(
            agreement=sum(one.agreed for one in scores) / tokens,
            tokens_per_call=tokens / sum(one.calls[K - 1] for one in scores),
            overlap=float(np.concatenate(shared).mean()),
            tokens=tokens,
            prompts=len(scores),
        ),
        scores,
    )


def paired_low90(before: Sequence[Score], after: Sequence[Score], resamples: int = 2000, seed: int = 0) -> float:
    """Lower end of the two-sided 90 % bootstrap interval, over prompts, of the change in agreement."""
    tokens = np.array([one.tokens for one in before], dtype=np.float64)
    gained = np.array([b.agreed - a.agreed for a, b in zip(before, after, strict=True)], dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(tokens), (resamples, len(tokens)))
    return float(np.quantile(gained[drawn].sum(axis=1) / tokens[drawn].sum(axis=1), 0.05))
