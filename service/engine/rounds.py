"""A round in its stages: planned, launched, read, reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    evidence_read: Sequence[NDArray[Any]] = ()
    """The arrays of `evidence`, once the round was read."""
    _launched: device.Readback | None = None

    def _results(self) -> list[mx.array]:
        """What the host reads: tokens, then evidence."""
        proposed = () if self.proposal is None else (self.accepted, self.proposal.tokens, self.proposal.usable)
        finite = () if self.finite is None else (self.finite,)
        return [self.emitted, *proposed, *finite, *(() if self.evidence is None else self.evidence.arrays())]

    def launch(self) -> None:
        """Hand it to the device without waiting."""
        self._launched = device.Readback(self._results())
        device.launch(self._launched.packed, self.others)
        # A cache that is still referred to would be copied by the next write.
        self.others = ()

    def read(self) -> Outcome:
        """Wait for it, once. Raises what went wrong in computing it."""
        if self._launched is None:
            results = self._results()
            device.wait(results, self.others)
            emitted, *rest = (np.array(each) for each in results)
        else:
            emitted, *rest = self._launched.read()
        rows, several = len(emitted), (0 if self.proposal is None else 3) + (self.finite is not None)
        self.evidence_read = rest[several:]
        if self.proposal is None:
            return Outcome(emitted.tolist(), [[]] * rows, [True] * rows)
        accepted, proposed, usable = rest[:3]
        finite = [True] * rows if self.finite is None else np.all(rest[3], axis=1).tolist()
        tried: list[int] = np.cumprod(usable, axis=1, dtype=np.int64).sum(axis=1).tolist()
        return Outcome(
            emitted=[new[: n + 1].tolist() for new, n in zip(emitted, accepted.tolist(), strict=True)],
            proposed=[guess[:n].tolist() for guess, n in zip(proposed, tried, strict=True)],
            finite=finite,
        )


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round emitted, by row. rows: in batch order, finished ones included. seconds: duration of the round."""

    rows: tuple[Request, ...]
    deltas: tuple[Delta, ...]
    rounds: tuple[Round, ...]
    seconds: float
