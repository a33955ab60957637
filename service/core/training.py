"""The learning side's data: adapters, runs, scores and verdicts. Adapter id 0 means the base draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

BARE_DRAFT = 0


class AdapterState(StrEnum):
    """The state of an adapter. BROKEN: it cannot be loaded. REVOKED: it learned from texts that were erased, and an operator
    has ruled that it never serves again. REMOVED: it could have served again, but its files were deleted. Allowed transitions:
    ADAPTER_MOVES."""

    CANDIDATE = "candidate"
    ACTIVE = "active"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    BROKEN = "broken"
    REVOKED = "revoked"
    REMOVED = "removed"

    @property
    def may_serve(self) -> bool:
        """Whether it serves now or may serve later. The files of all other adapters are deleted."""
        return self in {self.CANDIDATE, self.ACTIVE, self.RETIRED, self.ROLLED_BACK}


ADAPTER_MOVES: Mapping[AdapterState, frozenset[AdapterState]] = {
    AdapterState.CANDIDATE: frozenset({AdapterState.ACTIVE, AdapterState.REJECTED, AdapterState.BROKEN}),
    AdapterState.ACTIVE: frozenset(
        {AdapterState.RETIRED, AdapterState.ROLLED_BACK, AdapterState.BROKEN, AdapterState.REVOKED}
    ),
    AdapterState.RETIRED: frozenset(
        {AdapterState.ACTIVE, AdapterState.BROKEN, AdapterState.REVOKED, AdapterState.REMOVED}
    ),
    AdapterState.ROLLED_BACK: frozenset(
        {AdapterState.ACTIVE, AdapterState.BROKEN, AdapterState.REVOKED, AdapterState.REMOVED}
    ),
    AdapterState.REJECTED: frozenset(),
    AdapterState.BROKEN: frozenset(),
    AdapterState.REVOKED: frozenset(),
    AdapterState.REMOVED: frozenset(),
}
"""Allowed transitions of an adapter. A rolled-back adapter serves again only when an operator activates it."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable adapter version: a folder in mlx-lm's format, its hash, and its parent."""

    id: int
    folder: Path
    sha256: str
    rank: int
    scale: float
    keys: tuple[str, ...]
    draft: str
    """Fingerprint of its base draft."""
    parent: int
    run: int | None
    state: AdapterState
    created_at: datetime
    erased_texts: int | None = None
    """Number of texts that it or one of its ancestors learned from and that were erased since; None: none."""
    learnt_from: int = field(default=0, compare=False)
    """Number of logged texts that its run learned from: new, windowed and replayed ones, not counting erased ones."""
    measured_on: tuple[str, ...] = field(default=(), compare=False)
    """Kinds of machines whose measured costs entered the gate's verdict; empty: none was measured, or there is no verdict."""
    target: str | None = None
    """Fingerprint of the target whose answers it learned from. It serves with no other target. None: its run is not known."""


class RunState(StrEnum):
    """The progress or result of a training run. Allowed transitions: RUN_MOVES.

    PROMOTED and REJECTED are verdicts of the gate: the run has used its texts. A run that ends in any other way releases them.
    FAILED: it reports why it cannot continue (too few examples, NaN). OUT_OF_MEMORY: it does not fit, was killed for memory, or
    released memory that the machine was short of. TIMED_OUT: it exceeded its time limit. ENDED: ended from outside, by an
    operator, a server stop, an erasure, or a pause that lasted too long. LOST: its server ended without stopping it, or no
    longer responded. CRASHED: its child ended unexpectedly.
    """

    CLAIMED = "claimed"
    TRAINING = "training"
    SCORING = "scoring"
    STAGING = "staging"
    PROMOTED = "promoted"
    REJECTED = "rejected"
    FAILED = "failed"
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    ENDED = "ended"
    LOST = "lost"
    CRASHED = "crashed"

    @property
    def over(self) -> bool:
        """Whether the run has ended: no state follows this one."""
        return not RUN_MOVES[self]

    @property
    def words(self) -> str:
        """The state in readable form."""
        return self.value.replace("_", " ")

    @property
    def judged(self) -> bool:
        """Whether the run ended with a verdict of the gate."""
        return self in {RunState.PROMOTED, RunState.REJECTED}

    @property
    def gives_texts_back(self) -> bool:
        """Whether the run ended without a verdict: its texts count as untrained, and the next run may learn from them."""
        return self in _WITHOUT_VERDICT


_WITHOUT_VERDICT = frozenset(
    {
        RunState.FAILED,
        RunState.OUT_OF_MEMORY,
        RunState.TIMED_OUT,
        RunState.ENDED,
        RunState.LOST,
        RunState.CRASHED,
    }
)
RUN_MOVES: Mapping[RunState, frozenset[RunState]] = {
    RunState.CLAIMED: _WITHOUT_VERDICT | {RunState.TRAINING},
    RunState.TRAINING: _WITHOUT_VERDICT | {RunState.SCORING},
    RunState.SCORING: _WITHOUT_VERDICT | {RunState.STAGING, RunState.REJECTED},
    RunState.STAGING: _WITHOUT_VERDICT | {RunState.PROMOTED, RunState.REJECTED},
    RunState.PROMOTED: frozenset(),
    RunState.REJECTED: frozenset(),
    **{state: frozenset[RunState]() for state in RunState if state in _WITHOUT_VERDICT},
}
"""The allowed transitions of a run."""


class Trigger(StrEnum):
    """CASES: enough failure cases. MANUAL: requested. PRACTICE: the run learns from text that the target writes for it, because
    the server is idle or on request."""

    CASES = "cases"
    MANUAL = "manual"
    PRACTICE = "practice"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run. Loss is nats per response position, rates are training tokens per second of wall time. paused: why
    it is paused; None: it is not. writing: the target is writing practice text, to which steps and rate refer."""

    step: int = 0
    steps: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    paused: str | None = None
    writing: bool = False


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run. parent: the adapter it starts from. cases, generations: the numbers it was given. adapter: the
    candidate it made; verdict: the gate's, if any; error: why it ended without one."""

    id: int
    state: RunState
    trigger: Trigger
    fencing: int
    """Increases with every claim. A child whose token is not the row's current one may not publish."""
    parent: int
    cases: int
    generations: int
    progress: Progress
    adapter: int | None
    verdict: Verdict | None
    error: str | None
    created_at: datetime
    finished_at: datetime | None
    owner: str | None = None
    """The process that runs it (store.processes.members); None: a claimed run waits for one."""

    @property
    def texts_given_back(self) -> bool:
        """Whether its texts count as untrained again; see RunState."""
        return self.state.gives_texts_back


@dataclass(frozen=True, slots=True)
class PracticeState:
    """Whether practice starts automatically. fixed: why that cannot be changed while the server runs; None: an operator may
    change it. waits: why none started at the last check; None: nothing prevented it, a run is in progress, or practice is off.
    """

    on: bool
    fixed: str | None = None
    waits: str | None = None


@dataclass(frozen=True, slots=True)
class LearningState:
    """Whether runs on logged texts start automatically, and what the gate would require of the next one.

    waits: why none started at the last check; None: nothing prevented it, or a run is in progress. refused: runs rejected by
    the gate since the last promotion. level: significance level of the next gate's test; level_after_promotion: what it would
    be after a promotion. held_out, held_out_needed: prompts that the next gate could measure on now, and the number it needs.
    minutes: of runs in the last 24 hours; minutes_per_day: the limit. expected_gain: relative gain in speed expected of the
    next run, from the last verdicts. against_base: by set, what the gate of the active adapter measured against the base draft:
    gain and its two-sided 90 % interval; empty if the base draft serves.
    """

    waits: str | None
    refused: int
    level: float
    level_after_promotion: float
    held_out: int
    held_out_needed: int
    minutes: float
    minutes_per_day: float
    expected_gain: float
    against_base: Mapping[str, tuple[float, float, float]] = field(
        default_factory=dict[str, tuple[float, float, float]]
    )


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """Costs of rounds of one request on a kind of machine. seconds: of rounds that draft 1, 2, ... tokens. more: the additional
    seconds of each if draft steps cost twice as much."""

    seconds: tuple[float, ...]
    more: tuple[float, ...]

    def scaled(self, step: float) -> tuple[float, ...]:
        """The costs with a draft whose steps cost `step` times as much as the measured ones."""
        return tuple(cost + (step - 1.0) * more for cost, more in zip(self.seconds, self.more, strict=True))


@dataclass(frozen=True, slots=True)
class Score:
    """The estimated result of one adapter on one logged generation, from a teacher-forced pass of the draft alone.

    calls: expected target calls to emit `tokens` output tokens, by draft length: calls[K - 1] with K drafted per round, up to
    the longest that is served. Without drafts, every token takes one call. Exact for greedy and seeded rows, except for the one
    round in which a prompt of a single token joins, where no row of the batch drafts. agreed: positions where the draft's
    argmax is the emitted token. domain: the request's tag, empty without one. conversation: equal for turns of one
    conversation, which are resampled together; empty: a separate conversation. rounds: logged rounds that this adapter drafted
    and for which the pass determines exactly what is accepted. accepted: draft tokens that were accepted in them; predicted:
    the pass's prediction of them, from the same starts at the same draft lengths.
    """

    generation: str
    domain: str
    tokens: int
    agreed: int
    calls: tuple[float, ...]
    conversation: str = ""
    rounds: int = 0
    accepted: int = 0
    predicted: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of the gate or of a watch.

    gain: relative change of predicted tokens per second while drafting, candidate over active (for a watch: the watched adapter
    over its baseline), with its two-sided 90 % bootstrap interval over prompts. domains: the same per domain. measured_on:
    kinds of machines whose measured costs entered the verdict.

    Only if a gate tested the candidate, otherwise None: p_value, of the hypothesis that it is no better; level, the largest
    p-value that is promoted; loss_bounded, whether the loss against the base draft is proven to be within the tolerance on the
    golden set and on every domain with enough texts (None if there is neither).
    """

    promoted: bool
    reason: str
    prompts: int
    tokens: int
    gain: float
    low90: float
    high90: float
    domains: Mapping[str, tuple[float, float, float]] = field(default_factory=dict[str, tuple[float, float, float]])
    measured_on: tuple[str, ...] = ()
    p_value: float | None = None
    level: float | None = None
    loss_bounded: bool | None = None
