"""A round in its stages: planned, launched, read, reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import Delta, Round, Source
from service.engine import device
from service.engine.costs import Load
from service.engine.drafters.lookup import LookupProposal
from service.engine.drafters.proposal import Proposal
from service.engine.evidence import RoundEvidence
from service.engine.planner import Choice, DraftSteps, Match
from service.engine.request import Request
from service.engine.sampling import SamplingBatch


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned round; everything by row. visible: tokens as the draft sees them. found, matches: look-ups. lags: the draft's
    cache lacks more tokens than a step takes, so that the round's time says nothing of others. started_at: perf_counter when
    it was planned."""

    rows: Sequence[Request]
    visible: Sequence[Sequence[int]]
    load: Load
    choice: Choice
    found: Sequence[LookupProposal | None]
    matches: Sequence[Match | None]
    steps: DraftSteps
    lags: bool
    started_at: float

    @property
    def sources(self) -> list[Source]:
        """Who proposes each row's tokens."""
        return [Source.LOOKUP if n else Source.DRAFT for n in self.choice.looked_up]

    def having(self, drafted: int) -> Plan:
        """The plan after the draft stopped at so many tokens."""
        return replace(self, choice=self.choice.with_drafted(drafted))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A round's tokens, by row. emitted: the accepted tokens and the bonus or corrected one. proposed: the proposal, without
    positions where the draft's logits were not finite. finite: whether they all were."""

    emitted: list[list[int]]
    proposed: list[list[int]]
    finite: list[bool]


@dataclass(slots=True)
class Step:
    """A launched round, not read yet. drafted: it has a proposal of the draft. follows: it was launched before the round
    before it was read. others: arrays to be computed with it.

    Arrays: accepted (B,); emitted (B, K+1), of which row b emits the first accepted[b] + 1; finite (B, K), whether the draft's
    logits were, None where nothing was drafted; logits and distribution (B, K+1, V) before and after the sampling transform."""

    plan: Plan
    sampling: SamplingBatch
    drafted: bool
    accepted: mx.array
    emitted: mx.array
    finite: mx.array | None
    logits: mx.array
    distribution: mx.array
    proposal: Proposal | None
    evidence: RoundEvidence | None
    others: Sequence[mx.array]
    follows: bool = False

    def _arrays(self) -> list[mx.array]:
        evidence = () if self.evidence is None else self.evidence.arrays()
        proposed = () if self.proposal is None else (self.accepted, self.proposal.tokens, self.proposal.usable)
        finite = () if self.finite is None else (self.finite,)
        return [self.emitted, *proposed, *finite, *evidence, *self.others]

    def launch(self) -> None:
        """Hand it to the device without waiting."""
        device.launch(self._arrays())
        # A cache that is still referred to would be copied by the next write.
        self.others = ()

    def read(self) -> Outcome:
        """Wait for it, once. Raises what went wrong in computing it."""
        device.wait(self._arrays())
        emitted: NDArray[np.int64] = np.array(self.emitted)
        rows = len(emitted)
        if self.proposal is None:
            return Outcome(emitted.tolist(), [[]] * rows, [True] * rows)
        accepted: list[int] = np.array(self.accepted).tolist()
        finite = [True] * rows if self.finite is None else np.all(np.array(self.finite), axis=1).tolist()
        tried: NDArray[np.int64] = np.cumprod(np.array(self.proposal.usable), axis=1, dtype=np.int64).sum(axis=1)
        proposed: NDArray[np.int64] = np.array(self.proposal.tokens)
        return Outcome(
            emitted=[new[: n + 1].tolist() for new, n in zip(emitted, accepted, strict=True)],
            proposed=[guess[:n].tolist() for guess, n in zip(proposed, tried.tolist(), strict=True)],
            finite=finite,
        )


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round emitted, by row. rows: in batch order, finished ones included. seconds: duration of the round."""

    rows: tuple[Request, ...]
    deltas: tuple[Delta, ...]
    rounds: tuple[Round, ...]
    seconds: float
