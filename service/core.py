"""The nouns every room shares, the protocols by which rooms meet, and the errors that cross rooms.

Imports nothing but the standard library: whoever wants to know what flows through the house reads this file.
Token ids are the target tokenizer's. Times are UTC. Log-probabilities are natural logarithms.
An adapter id of 0 means the bare draft, without any adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeAlias

BARE_DRAFT = 0
TOP_TARGETS = 32


# ---------------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Filters act on the distribution at T = 1 in mlx-lm's order (top-p, min-p, top-k), then the
    temperature is applied.

    temperature 0 is greedy. top_p 1.0, min_p 0.0 and top_k 0 switch a filter off. A seed makes the output a function of
    (target, prompt, sampling, seed) alone, whatever the draft does.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def rule(self) -> AcceptRule:
        """Greedy and seeded rows compare tokens; unseeded sampling uses rejection."""
        return AcceptRule.MATCH if self.greedy or self.seed is not None else AcceptRule.REJECTION


class AcceptRule(StrEnum):
    """MATCH: shared-Gumbel coupling, of which greedy is the noiseless case. REJECTION: Leviathan et al. 2211.17192."""

    MATCH = "match"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks, after templating: token ids and the tags it came with."""

    tokens: tuple[int, ...]
    sampling: Sampling
    domain: str | None = None
    client: str | None = None
    store: bool = True
    """False: nothing of this request may be written anywhere."""
    first_user: str = ""
    """The first user message, which decides the train / held-out split (hashed, see store.generations)."""


# --------------------------------------------------------------------------------------------------- what happened


@dataclass(frozen=True, slots=True)
class Round:
    """One row's share of one round: `drafted` tokens proposed by `adapter`, the first `accepted` of them kept, and one
    token of the target after them. `start` is the output position of the round's first token. The tokens emitted are
    accepted + 1, or fewer when the request ended inside the round (`emitted`)."""

    adapter: int
    start: int
    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True, slots=True)
class FailureCase:
    """The first rejection of one round: the draft proposed `drafted`, the target emitted `target`.

    position: index into the output tokens. p, q: probability of `drafted` under target and draft at T = 1. margin: gap
    between the target's two best log-probabilities at T = 1; below the tie threshold the case is numerical noise and `tie`
    is set (kept, not counted)."""

    position: int
    drafted: int
    target: int
    p: float
    q: float
    margin: float
    tie: bool


@dataclass(frozen=True, slots=True)
class Targets:
    """The target's distribution at T = 1 for every output position: the `top` most likely tokens and the rest's mass.

    Little-endian row-major bytes: `ids` uint32 (positions, top); `logprobs` float16 (positions, top), descending;
    `tail` float16 (positions,), log of the mass outside the top (-inf where there is none).
    """

    top: int
    ids: bytes
    logprobs: bytes
    tail: bytes

    @property
    def positions(self) -> int:
        return len(self.tail) // 2


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Fingerprints (hex sha256) of what produced a generation. Rows of another target or tokenizer never mix."""

    target: str
    tokenizer: str
    draft: str
    """The bare draft's fingerprint, which an adapter is bound to."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request, as the recorder gets it.

    logprobs: target log-probability of each output token at T = 1. sampled_logprobs: the same after the sampling transform
    (0.0 when greedy). Both have one entry per output token. targets: None when not collected.
    """

    id: str
    prompt: Prompt
    output: tuple[int, ...]
    finish: FinishReason
    rounds: tuple[Round, ...]
    cases: tuple[FailureCase, ...]
    logprobs: tuple[float, ...]
    sampled_logprobs: tuple[float, ...]
    targets: Targets | None
    provenance: Provenance
    created_at: datetime


# ------------------------------------------------------------------------------------------------ what is learnt from it


class AdapterState(StrEnum):
    CANDIDATE = "candidate"
    ACTIVE = "active"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    BROKEN = "broken"


ADAPTER_MOVES: Mapping[AdapterState, frozenset[AdapterState]] = {
    AdapterState.CANDIDATE: frozenset({AdapterState.ACTIVE, AdapterState.REJECTED, AdapterState.BROKEN}),
    AdapterState.ACTIVE: frozenset({AdapterState.RETIRED, AdapterState.ROLLED_BACK, AdapterState.BROKEN}),
    AdapterState.RETIRED: frozenset({AdapterState.ACTIVE, AdapterState.BROKEN}),
    AdapterState.ROLLED_BACK: frozenset({AdapterState.ACTIVE, AdapterState.BROKEN}),
    AdapterState.REJECTED: frozenset(),
    AdapterState.BROKEN: frozenset(),
}
"""What an adapter may become. A rolled-back adapter returns only by an operator's word."""


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


class RunState(StrEnum):
    CLAIMED = "claimed"
    TRAINING = "training"
    SCORING = "scoring"
    STAGING = "staging"
    PROMOTED = "promoted"
    REJECTED = "rejected"
    FAILED = "failed"
    CRASHED = "crashed"

    @property
    def over(self) -> bool:
        return not RUN_MOVES[self]


RUN_MOVES: Mapping[RunState, frozenset[RunState]] = {
    RunState.CLAIMED: frozenset({RunState.TRAINING, RunState.FAILED, RunState.CRASHED}),
    RunState.TRAINING: frozenset({RunState.SCORING, RunState.FAILED, RunState.CRASHED}),
    RunState.SCORING: frozenset({RunState.STAGING, RunState.REJECTED, RunState.FAILED, RunState.CRASHED}),
    RunState.STAGING: frozenset({RunState.PROMOTED, RunState.REJECTED, RunState.FAILED, RunState.CRASHED}),
    RunState.PROMOTED: frozenset(),
    RunState.REJECTED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.CRASHED: frozenset(),
}
"""FAILED: the run itself said why (too few examples, NaN). CRASHED: the child or the server went away under it."""


class Trigger(StrEnum):
    CASES = "cases"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is. Loss is nats per response position, rates are training tokens per second of wall time."""

    step: int = 0
    steps: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun:
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


@dataclass(frozen=True, slots=True)
class Score:
    """How one adapter would have done on one logged generation, from a teacher-forced pass of the draft alone.

    calls: expected target calls to emit `tokens` output tokens at draft length `k` (exact for greedy and seeded rows).
    agreed: positions where the draft's argmax is the emitted token.
    """

    generation: str
    domain: str
    tokens: int
    agreed: int
    calls: float
    k: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate said. gain: relative change of predicted tokens per second, candidate over active, with its
    two-sided 90 % bootstrap interval over held-out prompts. domains: the same per domain."""

    promoted: bool
    reason: str
    prompts: int
    tokens: int
    gain: float
    low90: float
    high90: float
    domains: Mapping[str, tuple[float, float, float]] = field(default_factory=dict[str, tuple[float, float, float]])


# ------------------------------------------------------------------------------- events of one request, engine → whoever


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, complete in UTF-8, and how it came about: `tokens` emitted, `drafted[i]` true where the draft proposed it."""

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """llama.cpp's names. draft_n: tokens drafted; draft_n_accepted: of those kept (never more than were emitted).
    adapters: every adapter version that drafted for this answer, in order of first use. seconds are wall time."""

    prompt_n: int
    prompt_seconds: float
    predicted_n: int
    predicted_seconds: float
    draft_n: int
    draft_n_accepted: int
    rounds: int
    adapters: tuple[int, ...]

    @property
    def predicted_per_second(self) -> float:
        return self.predicted_n / self.predicted_seconds if self.predicted_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    id: str
    finish: FinishReason
    output: tuple[int, ...]
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer. error: one of this module's error classes."""

    error: RedraftError


Event: TypeAlias = Delta | Finished | Failed
Sink: TypeAlias = Callable[[Event], None]
"""Called on the engine's thread; must return at once and never raise. The last event is always Finished or Failed."""


# ------------------------------------------------------------------------------------------- protocols between rooms


class Ticket(Protocol):
    """A request under way."""

    @property
    def id(self) -> str: ...

    def cancel(self) -> None:
        """Give the row back before the next round. Idempotent; harmless after the end. The sink gets Finished with
        FinishReason.CANCELLED (or Failed when the request never started)."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What health is judged by. `idle_seconds`: since the engine last made progress while it had work (0 when idle)."""

    ready: bool
    reason: str
    rows: int
    waiting: int
    idle_seconds: float
    adapter: int
    draft_failures: int


class GenerationService(Protocol):
    """What the API sees of the engine."""

    def submit(self, prompt: Prompt, sink: Sink) -> Ticket:
        """Queue a request. Raises Overloaded when the queue is full, Unavailable when not serving, BadRequest when the
        prompt cannot fit."""
        ...

    def status(self) -> EngineStatus: ...


class Encoder(Protocol):
    """Text to token ids, thread-safe, no MLX."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Messages of `role` and `content`, through the model's chat template with the assistant's turn opened."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Plain text, as a completion prompt (with the tokenizer's own leading special tokens)."""
        ...


class DraftSwitch(Protocol):
    """What the lifecycle sees of the engine. Futures resolve on the engine's thread, between rounds."""

    @property
    def active(self) -> int: ...

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """Load and check an adapter aside (None: the bare draft). Raises AdapterRefused through the future."""
        ...

    def switch(self, staged: Staged) -> Future[None]:
        """Serve with it from the next round on."""
        ...


class Staged(Protocol):
    """A draft that is loaded and checked, not yet serving."""

    @property
    def adapter(self) -> int: ...


class GenerationSink(Protocol):
    """Where the engine hands finished generations: lifecycle.recorder. Must return at once."""

    def record(self, generation: Generation) -> None: ...


class RoundObserver(Protocol):
    """Where the engine reports rounds: metrics. `rounds` has one entry per row; seconds is the round's wall time."""

    def observe(self, rounds: Sequence[Round], seconds: float) -> None: ...

    def draft_failed(self, adapter: int) -> None: ...


class JobHandle(Protocol):
    """A child process at work. Messages are the JSON objects it wrote, oldest first."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> list[Mapping[str, object]]:
        """Messages since the last call."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...

    def pause(self, paused: bool) -> None:
        """Ask it to hold still between micro-steps while serving is busy."""
        ...

    def stop(self, grace_seconds: float) -> None:
        """End it: politely, then by force. Returns when it is gone."""
        ...


class Launcher(Protocol):
    def launch(self, spec: Mapping[str, object]) -> JobHandle:
        """Start the child with a JSON-serialisable job description (see learning.job.JobSpec)."""
        ...


class Operator(Protocol):
    """What an operator may ask of the lifecycle: the API and the CLI see the supervisor through this."""

    def request_training(self, idempotency_key: str | None) -> TrainingRun:
        """Force one run. The same key returns the same run. Raises Conflict when a run is under way, BadRequest when
        nothing has been recorded yet."""
        ...

    def run(self, run_id: int) -> TrainingRun:
        """Raises NotFound."""
        ...

    def adapters(self) -> list[AdapterRef]: ...

    def activate(self, adapter_id: int) -> AdapterRef | None:
        """Serve this adapter (0: the bare draft, returns None). Raises NotFound, Conflict, AdapterRefused."""
        ...

    def rollback(self) -> AdapterRef | None:
        """Back to the active adapter's parent; None is the bare draft. Raises Conflict when the bare draft serves."""
        ...


# ------------------------------------------------------------------------------------------------------------ errors


class RedraftError(Exception):
    """Base of every error a user may see. `code` is stable and machine-readable, the message is one sentence."""

    code = "internal_error"
    field: str | None = None


class BadRequest(RedraftError):
    """The request cannot be served as asked; `field` names what is wrong."""

    code = "bad_request"

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class NotFound(RedraftError):
    code = "not_found"


class Conflict(RedraftError):
    code = "conflict"


class Overloaded(RedraftError):
    """The queue is full; try again after `retry_after` seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(RedraftError):
    """Loading, draining, or the engine is dead."""

    code = "unavailable"


class ModelError(RedraftError):
    """A model cannot be found, read or used; the message says what to do."""

    code = "model_error"


class PairError(ModelError):
    """Target and draft do not belong together, or this engine cannot run one of them exactly."""

    code = "pair_refused"


class AdapterRefused(RedraftError):
    """An adapter folder is damaged, foreign, or of another shape. Nothing was changed."""

    code = "adapter_refused"


class TrainingFailed(RedraftError):
    """A run ended without a candidate; the message is the reason stored with it."""

    code = "training_failed"


class StoreError(RedraftError):
    """The database cannot be used as it is (wrong schema revision, damaged, not writable)."""

    code = "store_error"


class IllegalMove(StoreError):
    """A state change that RUN_MOVES or ADAPTER_MOVES does not allow, or with a stale fencing token."""

    code = "illegal_move"
