"""The protocols by which rooms meet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol, Self

from service.core.access import Caller
from service.core.erasure import Erased, Selection
from service.core.gains import GainsState
from service.core.generation import Constraint, Generation, Grammar, HiddenTokens, Prompt, Round, Sink
from service.core.overview import Disagreement, History
from service.core.training import AdapterRef, LearningState, PracticeState, TrainingRun


class Place(Protocol):
    """A place in the queue, held while a request is tokenised. As a context manager it is released at the end, unless
    `submit` has used it."""

    def release(self) -> bool:
        """Free the place for another request. False when it was released or used before."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


class Ticket(Protocol):
    """A request under way."""

    @property
    def id(self) -> str:
        """The request's id, which the Finished event and the log carry too."""
        ...

    def cancel(self) -> None:
        """Give the row back before the next round. Idempotent; harmless after the end. The sink gets Finished with
        FinishReason.CANCELLED and what there is of the answer."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the models' back end. active: in use. cache: freed but held for reuse. peak: the most that was ever in use. Of
    those in use, weights: the models'; kv: allocated for keys and values; prefix: the prefix cache's, among `kv` where rows are
    in pages."""

    active: int = 0
    cache: int = 0
    peak: int = 0
    weights: int = 0
    kv: int = 0
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What health is judged by. `idle_seconds`: since the engine last made progress while it had work (0 when idle).
    kv_cache_usage: share of the memory for keys and values that is in use. prefix_disk_bytes: of the prefix cache's files.
    speedup: estimated, of recent rounds over plain decoding; 0 before the first, and where costs are not measured. loaded: the
    models are in memory."""

    ready: bool
    reason: str
    rows: int
    waiting: int
    idle_seconds: float
    adapter: int
    draft_failures: int
    memory: Memory = Memory()
    kv_cache_usage: float = 0.0
    prefix_disk_bytes: int = 0
    speedup: float = 0.0
    loaded: bool = True


class RequestState(StrEnum):
    """WAITING: in the queue, also after it was preempted. PREFILLING: it has a row, its prompt is being read. RUNNING: it is
    decoded."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request under way, without its text. route: that it came by. tokens: output tokens so far. waiting_seconds: from its
    arrival until it joined the batch, or until now. running_seconds: since it joined the batch; None: it has not. adapter: the
    version that served in its last round; None: there was none yet."""

    id: str
    state: RequestState
    route: str
    prompt_tokens: int
    tokens: int
    waiting_seconds: float
    running_seconds: float | None
    adapter: int | None


class GenerationService(Protocol):
    """What the API sees of the engine."""

    def reserve(self) -> Place:
        """Ask for a place in the queue, before the work of tokenising. Raises Overloaded when the queue is full, Unavailable
        when not serving."""
        ...

    def submit(self, prompt: Prompt, sink: Sink, place: Place | None = None, *, route: str = "") -> Ticket:
        """Queue a request, in the place that was reserved for it if there is one. route: that it came by. Raises BadRequest
        when the prompt cannot fit, Unavailable when not serving, and without a place Overloaded when the queue is full."""
        ...

    def requests(self) -> list[RequestStatus]:
        """The requests under way, in the order in which they arrived. Waits for no round."""
        ...

    def cancel(self, request_id: str) -> RequestStatus:
        """Cancel a request under way, as its ticket does. Returns what it was until now. Raises NotFound."""
        ...

    def on_delivered(self, flush: Callable[[], None]) -> None:
        """Call `flush` from now on whenever sinks may have been called: on the same thread, once for all events of a round
        and for all requests that fail together. It must return at once and never raise."""
        ...

    def status(self) -> EngineStatus:
        """Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that a model has written. arguments: a JSON object, as text. id: the model's own, where it gives one."""

    name: str
    arguments: str
    id: str | None = None


class PieceKind(StrEnum):
    """What a piece of an answer holds."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. call: of a CALL, which has no text."""

    kind: PieceKind
    text: str = ""
    call: ToolCall | None = None


class ChatEnd(Enum):
    """How the prompt of a chat ends. NEW_TURN: the assistant's turn is opened. CONTINUED: the last message is left open, and
    the answer goes on with it. CLOSED: the last message is ended, and no turn is opened."""

    NEW_TURN = "new turn"
    CONTINUED = "continued"
    CLOSED = "closed"


class Reasoning(Enum):
    """What the prompt of a chat has done about reasoning: started it, left it to the model, or ended it (or the model has
    none)."""

    OPEN = "open"
    FREE = "free"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The prompt of a chat. reasoning: how its answer begins."""

    tokens: tuple[int, ...]
    reasoning: Reasoning = Reasoning.CLOSED


class AnswerReader(Protocol):
    """Splits the text of one answer, as it grows, into content, reasoning and tool calls. However the text is cut into parts,
    the pieces together are the same. Not thread-safe."""

    def add(self, text: str) -> list[Piece]:
        """The pieces that new text completes. Text that may belong to a marker is withheld, a tool call until it is whole."""
        ...

    def finish(self, cut: bool) -> list[Piece]:
        """The rest, after the last text. cut: the answer was ended before the model ended it; a tool call that is not whole
        then becomes text, as one does that cannot be parsed."""
        ...


class Encoder(Protocol):
    """Text to token ids and back, thread-safe, no MLX."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: ChatEnd = ChatEnd.NEW_TURN,
    ) -> EncodedChat:
        """The prompt of messages of `role`, `content` and what else the model's chat template reads. tools: descriptions as
        OpenAI's chat route takes them. options: further arguments of the template. Raises BadRequest."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Plain text, as a completion prompt (with the tokenizer's own leading special tokens)."""
        ...

    def encode_word(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of a text inside another, without and with a space before it; none where it has no token."""
        ...

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as an answer has it: without special tokens around it."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        ...

    def answer_reader(self, tools: Sequence[Mapping[str, object]], reasoning: Reasoning) -> AnswerReader:
        """A reader of the answer to a chat with these tools, whose prompt has done this about reasoning."""
        ...

    def hidden_tokens(self, *, split: bool, tools: bool, stop: Sequence[str]) -> HiddenTokens:
        """The special tokens that the text of an answer leaves out: all but those of its stop strings, and of the markers that
        a reader looks for where the answer is split (with tools: of calls too, in which nothing is left out)."""
        ...

    def constraint(self, grammar: Grammar, reasoning: Reasoning) -> Constraint:
        """What keeps an answer within a grammar, which begins after the model's reasoning. reasoning: see EncodedChat; CLOSED
        for a plain text. Raises BadRequest naming the grammar's field where it cannot be compiled."""
        ...

    @property
    def binds_calls(self) -> bool:
        """Whether the model's format for calls has a grammar here."""
        ...

    def call_grammar(
        self, tools: Sequence[Mapping[str, object]], *, several: bool, otherwise: Grammar | None = None
    ) -> Grammar:
        """The grammar of answers that call these tools, once or several times, or are what `otherwise` says. Raises BadRequest
        where the model's format for calls has none here."""
        ...

    def free_call_grammar(self, tools: Sequence[Mapping[str, object]], strict: Collection[str]) -> Grammar:
        """The grammar of answers of any text, in which calls are of these tools, with arguments that are valid for those that
        `strict` names. Raises BadRequest as `call_grammar`."""
        ...


class DraftSwitch(Protocol):
    """What the lifecycle sees of the engine. Futures resolve on the engine's thread, between rounds."""

    @property
    def active(self) -> int:
        """The id of the adapter that drafts now; BARE_DRAFT (0): none."""
        ...

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """Load and check an adapter aside (None: the bare draft). Raises AdapterRefused through the future."""
        ...

    def switch(self, staged: Staged) -> Future[None]:
        """Serve with it from the next round on."""
        ...

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        """Seconds of a round of one request that drafts 1, 2, ... tokens, as measured; None where the draft length is fixed or
        nothing has been measured. step: how many times the serving draft's a draft step costs. Callable from any thread."""
        ...


class MemoryLender(Protocol):
    """Serving, as far as it lends memory to training: one loan at a time."""

    def lend(self, wanted: int, least: int) -> Future[int]:
        """Lend up to `wanted` bytes that no request uses; cached prefixes give way. Returns the bytes that are lent; 0 where
        fewer than `least` could be."""
        ...

    def take_back(self) -> None:
        """The loan is over: serving uses that memory again. Idempotent; from any thread."""
        ...

    @property
    def loan_needed(self) -> bool:
        """Whether requests wait for memory that is lent. From any thread."""
        ...


class Staged(Protocol):
    """A draft that is loaded and checked, not yet serving."""

    @property
    def adapter(self) -> int:
        """The id of the adapter that was loaded; BARE_DRAFT (0): none."""
        ...


class GenerationSink(Protocol):
    """Where the engine hands finished generations: lifecycle.recorder. Must return at once."""

    def record(self, generation: Generation) -> None:
        """Queue a finished generation for the log."""
        ...


class RoundObserver(Protocol):
    """Where the engine reports prompts and rounds: metrics. `rounds` has one entry per row; seconds is the round's wall
    time. Of a prompt's `tokens`, `reused` were held already."""

    def prompt_read(self, tokens: int, reused: int) -> None:
        """A prompt's prefill is over: it had `tokens`, of which `reused` came from the prefix cache."""
        ...

    def prefix_read(self, tokens: int) -> None:
        """So many tokens' keys and values were read from the prefix cache's files."""
        ...

    def observe(self, rounds: Sequence[Round], seconds: float) -> None:
        """A round of the batch is over."""
        ...

    def preempted(self) -> None:
        """A request went back to the queue because memory ran out."""
        ...

    def failure_cases(self, ties: int, others: int) -> None:
        """A generation is recorded with so many failure cases that are ties, and others."""
        ...

    def draft_failed(self, adapter: int) -> None:
        """The draft failed in a round while `adapter` served: it raised, or its logits were not finite."""
        ...


class JobHandle(Protocol):
    """A child process at work. Messages are the JSON objects it wrote, oldest first."""

    @property
    def pid(self) -> int:
        """The child's process id."""
        ...

    def poll(self) -> list[Mapping[str, object]]:
        """Messages since the last call."""
        ...

    def exit_code(self) -> int | None:
        """None while it runs."""
        ...

    def pause(self, paused: bool) -> None:
        """Ask it to pause between micro-steps while serving is busy."""
        ...

    def stop(self, grace_seconds: float) -> None:
        """End it: politely, then by force. Returns when it is gone."""
        ...


class Launcher(Protocol):
    """Starts child processes: training runs and the other jobs of the lifecycle."""

    def launch(self, spec: Mapping[str, object]) -> JobHandle:
        """Start the child with a JSON-serialisable job description (see learning.spec.JobSpec)."""
        ...


class Doorkeeper(Protocol):
    """Who calls, by what they send: an API key, or, where no key was ever made, the token of the home folder. Every method but
    `log_in` and `log_out` returns at once."""

    @property
    def without_key(self) -> Caller:
        """Who calls without a key."""
        ...

    @property
    def several(self) -> bool:
        """Whether there is, or was, more than one key."""
        ...

    def by_key(self, secret: str) -> Caller | None:
        """Who has this key, or token; None: nobody."""
        ...

    def by_session(self, secret: str) -> Caller | None:
        """Whose session of the page this is; None: nobody's."""
        ...

    def log_in(self, key: str) -> str | None:
        """Open a session of the page with a key; its secret. None where the key opens nothing. Raises StoreError."""
        ...

    def log_out(self, session: str) -> None:
        """End a session of the page. Idempotent. Raises StoreError."""
        ...


class Operator(Protocol):
    """What an operator may ask of the lifecycle: the API and the CLI see the supervisor through this."""

    def request_training(self, idempotency_key: str | None, practice_minutes: float | None = None) -> TrainingRun:
        """Force one run. practice_minutes: on text that the target writes, for so long; None: on what was logged. The same key
        returns the same run. Raises Conflict when a run is under way, BadRequest when nothing has been recorded yet."""
        ...

    def run(self, run_id: int) -> TrainingRun:
        """Raises NotFound."""
        ...

    def runs(self, limit: int, before: int | None = None) -> list[TrainingRun]:
        """The newest `limit` runs, newest first. before: only those with smaller ids."""
        ...

    def end_run(self, run_id: int) -> TrainingRun:
        """End a run under way, whichever process of the database does it: its child is stopped, the run ENDED, its texts are
        free for the next one. Raises NotFound, Conflict when it is over or after the end."""
        ...

    def learning(self) -> LearningState:
        """Whether a run on logged texts starts by itself, and what its gate would ask of it. Raises Conflict without a draft,
        StoreError."""
        ...

    def gains(self) -> GainsState:
        """What the adapter that serves was measured to gain against the base draft, or why there is no such figure. Raises
        StoreError."""
        ...

    def practice(self) -> PracticeState:
        """Whether practice starts by itself. Returns at once."""
        ...

    def choose_practice(self, on: bool) -> PracticeState:
        """Let practice start by itself from now on, after a restart too, or not. Off ends a practice run that started by
        itself, none that was asked for. Raises Conflict where that is fixed or after the end, Unavailable where the choice
        cannot be stored, StoreError."""
        ...

    def adapters(self) -> list[AdapterRef]:
        """Every adapter version, newest first."""
        ...

    def activate(self, adapter_id: int) -> AdapterRef | None:
        """Serve this adapter (0: the bare draft, returns None). Raises NotFound, Conflict, AdapterRefused."""
        ...

    def remove_adapter(self, adapter_id: int) -> AdapterRef:
        """Delete the files of an adapter that does not serve; one that might have served becomes REMOVED. Raises NotFound,
        Conflict."""
        ...

    def rollback(self, expected: int | None = None) -> AdapterRef | None:
        """Back to the active adapter's parent; None is the bare draft. expected: the version that is to be rolled back. Counts
        as a lost watch: what the adapter learnt from is quarantined and the next run waits. Raises Conflict when the bare draft
        serves, or another version than expected."""
        ...

    def erase(self, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        """Delete generations, and have every place forget their texts, before they are written too. A child that may have read
        one is ended, and its run too. Adapters that learnt one are marked; retire_adapters: all that are marked never serve
        again. Raises Conflict after the end, Unavailable, TimeoutError, StoreError."""
        ...


class Overview(Protocol):
    """What the server's page reads of the rows of its pair. Each call reads a bounded number of rows, however many there are.
    Raises StoreError."""

    def history(self, hours: int) -> History:
        """The last so many hours, or what there is of them."""
        ...

    def disagreements(self, limit: int) -> list[Disagreement]:
        """Of the newest failure cases those of which the draft was surest and the target least, one for each pair of tokens."""
        ...

    def newest_cases(self, limit: int, before: int | None = None) -> list[Disagreement]:
        """The newest failure cases, near-ties too, newest first; before: of those that were recorded before the one with this
        id. Cases of other pairs are passed over, as far as the read is bounded."""
        ...

    def newest_run(self) -> TrainingRun | None:
        """The newest training run, over or not; None: there was none."""
        ...
