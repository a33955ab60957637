"""What is learnt from it: adapters, runs, scores and verdicts. An adapter id of 0 means the bare draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

BARE_DRAFT = 0


class AdapterState(StrEnum):
    """What became of an adapter. BROKEN: it cannot be loaded. REVOKED: it learnt texts that were erased, and an operator wants
    it never to serve again. REMOVED: it might have served again, and its files were deleted. Which may follow which:
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
        """Whether it serves now or may serve later. The files of all others are deleted."""
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
"""What an adapter may become. A rolled-back adapter serves again only when an operator activates it."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One immutable adapter version: a folder in mlx-lm's own format, its hash, and what it was trained on top of."""

    id: int
    folder: Path
    sha256: str
    rank: int
    scale: float
    keys: tuple[str, ...]
    draft: str
    """Fingerprint of the bare draft it belongs to."""
    parent: int
    run: int | None
    state: AdapterState
    created_at: datetime
    erased_texts: int | None = None
    """Texts that it, or an adapter that it was trained on top of, learnt from and that were erased since; None: none."""
    learnt_from: int = field(default=0, compare=False)
    """Texts of the log that its run learnt from: new ones, those of the window and replayed ones; erased ones not counted."""
    measured_on: tuple[str, ...] = field(default=(), compare=False)
    """Kinds of machines whose measured costs had a say in the gate's verdict; empty: none was measured, or there is none."""
    target: str | None = None
    """Fingerprint of the target whose answers it learnt from: it serves with no other. None: of a run that is not known."""


class RunState(StrEnum):
    """How far a training run is, or how it ended. Which may follow which: RUN_MOVES.

    PROMOTED and REJECTED are verdicts of the gate: the run has used its texts. A run that ends in any other way gives them
    back. FAILED: it says why it cannot go on (too few examples, NaN). OUT_OF_MEMORY: it does not fit, was killed for memory, or
    gave memory back that the machine was short of. TIMED_OUT: it worked for longer than its limit. ENDED: from outside, by an
    operator, a stop of the server, an erasure, or a pause that lasted too long. LOST: its server ended without stopping it, or
    did not answer any more. CRASHED: its child ended unexpectedly."""

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
        """The state as people read it."""
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
"""Which state may follow which."""


class Trigger(StrEnum):
    """CASES: enough failure cases. MANUAL: asked for. PRACTICE: nothing is asked, and the run learns from text that the
    target writes for it; or practice was asked for."""

    CASES = "cases"
    MANUAL = "manual"
    PRACTICE = "practice"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is. Loss is nats per response position, rates are training tokens per second of wall time. paused: why it
    is paused; None: it is not. writing: the target writes practice text, which steps and rate are about."""

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
    """One training run. parent: the adapter it is trained on top of. cases, generations: how many it was given. adapter: the
    candidate it made; verdict: the gate's, where there was one; error: why it ended without one."""

    id: int
    state: RunState
    trigger: Trigger
    fencing: int
    """Grows with every claim; a child whose token is not the row's current one may not publish."""
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
    """The process that does it (store.processes.members); None: a claimed run waits for one."""

    @property
    def texts_given_back(self) -> bool:
        """Whether its texts count as untrained again; see RunState."""
        return self.state.gives_texts_back


@dataclass(frozen=True, slots=True)
class PracticeState:
    """Whether practice starts by itself. fixed: why that cannot be changed while the server runs; None: an operator may. waits:
    why none started when that was last looked at; None: nothing was against it, a run is under way, or it is off."""

    on: bool
    fixed: str | None = None
    waits: str | None = None


@dataclass(frozen=True, slots=True)
class LearningState:
    """Whether a run on logged texts starts by itself, and what its gate would ask of it.

    waits: why none started when that was last looked at; None: nothing was against it, or a run is under way. refused: runs
    that the gate has refused since the last promotion. level: of the next gate's test; level_after_promotion: what it would be
    after a promotion. held_out, held_out_needed: prompts that the next gate could measure on now, and how many it takes.
    minutes: of runs in the last 24 hours; minutes_per_day: how many there may be. expected_gain: relative gain in speed that
    the next run is expected to bring, by the last verdicts. against_base: by set, what the gate of the active adapter found of
    it against the base draft: gain and its two-sided 90 % interval; empty where the base draft serves."""

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
    """What rounds of one request cost on a kind of machine. seconds: of rounds that draft 1, 2, ... tokens. more: what each
    takes beyond that for a draft whose steps cost once more."""

    seconds: tuple[float, ...]
    more: tuple[float, ...]

    def scaled(self, step: float) -> tuple[float, ...]:
        """With a draft whose steps cost `step` times as much as those that were measured."""
        return tuple(cost + (step - 1.0) * more for cost, more in zip(self.seconds, self.more, strict=True))


@dataclass(frozen=True, slots=True)
class Score:
    """How one adapter would have done on one logged generation, from a teacher-forced pass of the draft alone.

    calls: expected target calls to emit `tokens` output tokens, by draft length: calls[K - 1] with K drafted a round, up to the
    longest that is served. Without drafts every token is a call, whoever rests. Exact for greedy and seeded rows, but for the
    one round in which a prompt of a single token joins: nobody in the batch drafts then.
    agreed: positions where the draft's argmax is the emitted token. domain: the request's tag, empty without one. conversation:
    equal for turns of one conversation, which are resampled together; empty: one of its own.
    rounds: logged rounds that this adapter drafted, where the pass says exactly what is accepted. accepted: draft tokens that
    were accepted in them; predicted: what the pass says of them, from the same starts at the same draft lengths.
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
    """What the gate, or a watch, said. gain: relative change of predicted tokens per second while drafting, candidate over
    active (watched over what it is compared with), with its two-sided 90 % bootstrap interval over prompts. domains: the same
    per domain. measured_on: kinds of machines whose measured costs had a say.

    Of a gate that tested the candidate: p_value of the hypothesis that it is no better; level: the largest p-value that is
    promoted; loss_bounded: whether the loss against the base draft is proven to be within the tolerance on the golden set and
    on every domain that has enough texts, None where there is neither. All None where nothing was tested."""

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
