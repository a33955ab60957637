"""The stages of a round: planned, launched, read, reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import Delta, Round, Source
from service.engine import device
from service.engine.costs import Load
from service.engine.drafters.lookup import LookupProposal
from service.engine.drafters.proposal import Proposal, Unread
from service.engine.evidence import Evidence, gather_evidence, split_rows
from service.engine.planner import Choice, DraftSteps, Match
from service.engine.request import Request
from service.engine.sampling import SamplingBatch


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned round, by row. visible: tokens as the draft sees them. found, matches: lookups. irregular: the draft needs a
    catch-up call or rows have just changed, so the round's time is not representative. started_at: perf_counter when it was
    planned."""

    rows: Sequence[Request]
    visible: Sequence[Sequence[int]]
    load: Load
    choice: Choice
    found: Sequence[LookupProposal | None]
    matches: Sequence[Match | None]
    steps: DraftSteps
    irregular: bool
    started_at: float

    @property
    def requests(self) -> list[Request]:
        """The rows that are not padding."""
        return [row for row in self.rows if not row.padding]

    @property
    def sources(self) -> list[Source]:
        """The source of each row's proposal."""
        pairs = zip(self.choice.looked_up, self.found, strict=True)
        return [found.source if n and found else Source.DRAFT for n, found in pairs]

    def without_proposals(self) -> Plan:
        """The plan without drafting and lookups. Its time is not representative."""
        none = [None] * len(self.rows)
        choice = Choice(0, (0,) * len(self.rows))
        return replace(self, choice=choice, found=none, matches=none, steps=DraftSteps(0), irregular=True)

    def having(self, drafted: int) -> Plan:
        """The plan for a draft that stopped after `drafted` tokens."""
        return replace(self, choice=self.choice.with_drafted(drafted))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A round's tokens, by row.

    emitted: the accepted tokens and the bonus or corrected token. proposed: the proposal, without positions where the draft's
    logits were not finite. draft_finite: whether all of the draft's logits were finite. target_finite: whether the target's
    were at every emitted position. rejected_finite: whether they were at the later positions too.
    """

    emitted: list[list[int]]
    proposed: list[list[int]]
    draft_finite: list[bool]
    target_finite: list[bool]
    rejected_finite: list[bool]

    def failing(self, rows: Sequence[Request]) -> list[int]:
        """The rows that need a token but get none, because the target's logits for it are not finite."""
        return [i for i, row in enumerate(rows) if row.finish is None and not self.target_finite[i]]

    @property
    def clean(self) -> bool:
        """Whether all logits of the round were finite."""
        return all((*self.draft_finite, *self.target_finite, *self.rejected_finite))


@dataclass(frozen=True, slots=True)
class RoundArrays:
    """A round over B rows and K proposed tokens, on the device.

    emitted: (B, K+1), of which row b emits the first accepted[b] + 1. target_finite: (B, K+1), see `accept.finite_positions`.
    accepted: (B,), proposed: (B, K), usable: (B, K), see Proposal; None if nothing was proposed. draft_finite: (B, K), whether
    the draft's logits were finite; None if nothing was drafted. evidence: `RoundEvidence.arrays`. features: (B, K+1, width),
    the target's, if the draft reads them.

    Only if the next round may be launched ahead: packed, all that the host reads; newest (B, 2), ends (B,), see Unread.
    Otherwise: logits and distribution (B, K+1, V), before and after the sampling transform.
    """

    emitted: mx.array
    target_finite: mx.array
    accepted: mx.array | None = None
    proposed: mx.array | None = None
    usable: mx.array | None = None
    draft_finite: mx.array | None = None
    evidence: tuple[mx.array, ...] = ()
    features: mx.array | None = None
    packed: mx.array | None = None
    newest: mx.array | None = None
    ends: mx.array | None = None
    logits: mx.array | None = None
    distribution: mx.array | None = None

    def tree(self) -> dict[str, Any]:
        """The fields by name, as a traced call returns them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def read(self) -> list[mx.array]:
        """The arrays that the host reads: tokens, then evidence."""
        tokens = (self.emitted, self.target_finite, self.accepted, self.proposed, self.usable, self.draft_finite)
        return [*(each for each in tokens if each is not None), *self.evidence]


@dataclass(slots=True)
class Step:
    """A launched round that was not read yet. drafted: it includes a draft proposal. others: arrays to be computed with it.
    follows: it was launched before the previous round was read. second: and that previous round drafted, or was not itself
    launched ahead."""

    plan: Plan
    sampling: SamplingBatch
    drafted: bool
    arrays: RoundArrays
    proposal: Proposal | None
    others: Sequence[mx.array]
    follows: bool = False
    second: bool = False
    evidence_read: Sequence[NDArray[Any]] = ()
    """The arrays of the evidence, once the round was read."""

    def launch(self) -> None:
        """Hand the round to the device without waiting."""
        device.launch(self.arrays.packed, self.others)
        # The next write would copy a cache that is still referenced.
        self.others = ()

    def read(self) -> Outcome:
        """Wait for the round, once. Raises errors of its computation."""
        arrays = self.arrays
        if arrays.packed is not None:
            values = device.read_packed(arrays.packed, arrays.read)
        else:
            device.wait(arrays.read, self.others)
            values = [np.array(each) for each in arrays.read]
        emitted, target_finite, *rest = values
        rows, several = len(emitted), (0 if arrays.accepted is None else 3) + (arrays.draft_finite is not None)
        self.evidence_read = rest[several:]
        if arrays.accepted is None:
            sound = [True] * rows
            return Outcome(emitted.tolist(), [[]] * rows, sound, target_finite[:, 0].tolist(), sound)
        accepted, proposed, usable = rest[:3]
        tried: list[int] = np.cumprod(usable, axis=1, dtype=np.int64).sum(axis=1).tolist()
        behind = np.arange(emitted.shape[1]) > accepted[:, None]
        return Outcome(
            emitted=[new[: n + 1].tolist() for new, n in zip(emitted, accepted.tolist(), strict=True)],
            proposed=[guess[:n].tolist() for guess, n in zip(proposed, tried, strict=True)],
            draft_finite=[True] * rows if arrays.draft_finite is None else np.all(rest[3], axis=1).tolist(),
            target_finite=(target_finite | behind).all(axis=1).tolist(),
            rejected_finite=(target_finite | ~behind).all(axis=1).tolist(),
        )

    def evidence(self, outcome: Outcome) -> list[Evidence]:
        """The evidence of the round's rows: read together with the round, or computed now with one more wait. Call after
        `read`."""
        pairs = zip(outcome.proposed, self.plan.sources, strict=True)
        drafted = [tokens if source is Source.DRAFT else [] for tokens, source in pairs]
        if self.arrays.evidence:
            return split_rows(self.evidence_read, outcome.emitted, drafted)
        logits, distribution = self.arrays.logits, self.arrays.distribution
        assert logits is not None and distribution is not None
        draft_logits = () if self.proposal is None else self.proposal.logits
        return gather_evidence(logits, distribution, self.sampling, outcome.emitted, drafted, draft_logits)

    def unread(self) -> Unread:
        """The ends of its rows. Lengths on the host are those of the previous round."""
        newest, ends = self.arrays.newest, self.arrays.ends
        assert newest is not None and ends is not None
        most = [len(row.tokens) - 1 + self.arrays.emitted.shape[1] for row in self.plan.rows]
        if any(row.finish is not None and not row.padding for row in self.plan.rows):
            # For a row that ended in the previous round, the device accepted more tokens than the row kept.
            ends = mx.minimum(ends, mx.array(most, dtype=mx.int32))
        return Unread(newest, ends, most)


@dataclass(frozen=True, slots=True)
class Called:
    """A round whose target call was launched but which is not completed yet (`Runner.decide`), because the rows' grammars
    depend on tokens that are not read. arguments: for `Runner._decided`. logits: (B, K+1, V), the target's. starts: (B,), the
    position of each row's first token. drafted: (B, K), the draft's proposal, for the host. before: the previous round."""

    plan: Plan
    sampling: SamplingBatch
    arguments: Sequence[Any]
    logits: mx.array
    starts: mx.array | None
    drafted: mx.array | None
    proposal: Proposal | None
    before: Step | None


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What a round emitted, by row. rows: in batch order, including finished ones. seconds: duration of the round. failed: the
    requests that ended without a token, because the target's logits for them were not finite (`Request.error`)."""

    rows: tuple[Request, ...]
    deltas: tuple[Delta, ...]
    rounds: tuple[Round, ...]
    seconds: float
    failed: tuple[Request, ...] = ()
