"""The protocols between the packages."""

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
    """A queue slot, held while a request is tokenized. As a context manager it is released at the end, unless `submit` has used
    it."""

    def release(self) -> bool:
        """Release the slot for another request. Returns False if it was already released or used."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


class Ticket(Protocol):
    """A submitted request."""

    @property
    def id(self) -> str:
        """The request's id, as in the Finished event and the log."""
        ...

    def cancel(self) -> None:
        """Release the row before the next round. Idempotent, and harmless after the end. The sink receives Finished with
        FinishReason.CANCELLED and the answer so far."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the models' back end, in bytes. active: in use. cache: freed but kept for reuse. peak: maximum ever in use.
    Parts of `active`: weights, of the models; kv, allocated for keys and values; prefix, of the prefix cache, part of `kv` if
    rows are paged."""

    active: int = 0
    cache: int = 0
    peak: int = 0
    weights: int = 0
    kv: int = 0
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's health. idle_seconds: since the engine last made progress while it had work (0 when idle). kv_cache_usage:
    share of the KV cache memory in use. prefix_disk_bytes: of the prefix cache's files. speedup: estimated speed-up of recent
    rounds over plain decoding; 0 before the first round and if costs are not measured. loaded: the models are in memory."""

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
    """WAITING: in the queue, also after preemption. PREFILLING: has a row, its prompt is being prefilled. RUNNING: in the
    batch."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """An unfinished request, without its text. route: the HTTP route. tokens: output tokens so far. waiting_seconds: from
    arrival until it joined the batch, or until now. running_seconds: since it joined the batch; None: not joined yet. adapter:
    the version that served in its last round; None: no round yet."""

    id: str
    state: RequestState
    route: str
    prompt_tokens: int
    tokens: int
    waiting_seconds: float
    running_seconds: float | None
    adapter: int | None


class GenerationService(Protocol):
    """The engine as the API sees it."""

    def reserve(self) -> Place:
        """Reserve a queue slot before tokenizing. Raises Overloaded if the queue is full, Unavailable if not serving."""
        ...

    def submit(self, prompt: Prompt, sink: Sink, place: Place | None = None, *, route: str = "") -> Ticket:
        """Queue a request, in its reserved slot if there is one. route: the HTTP route. Raises BadRequest if the prompt cannot
        fit, Unavailable if not serving, and without a slot Overloaded if the queue is full."""
        ...

    def requests(self) -> list[RequestStatus]:
        """The unfinished requests, in order of arrival. Does not wait for a round."""
        ...

    def cancel(self, request_id: str) -> RequestStatus:
        """Cancel an unfinished request, as its ticket does. Returns its status before that. Raises NotFound."""
        ...

    def on_delivered(self, flush: Callable[[], None]) -> None:
        """Register `flush`, which is called whenever sinks may have been called: on the same thread, once for all events of a
        round and for all requests that fail together. It must return at once and never raise."""
        ...

    def status(self) -> EngineStatus:
        """Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call written by a model. arguments: a JSON object, as text. id: the model's id, if it gives one."""

    name: str
    arguments: str
    id: str | None = None


class PieceKind(StrEnum):
    """The content type of a piece of an answer."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. call: for CALL pieces, which have no text."""

    kind: PieceKind
    text: str = ""
    call: ToolCall | None = None


class ChatEnd(Enum):
    """How the prompt of a chat ends. NEW_TURN: opens the assistant's turn. CONTINUED: the last message stays open and the
    answer continues it. CLOSED: the last message is ended and no turn is opened."""

    NEW_TURN = "new turn"
    CONTINUED = "continued"
    CLOSED = "closed"


class Reasoning(Enum):
    """The state of reasoning at the end of a chat prompt: started, left to the model, or ended (or the model has none)."""

    OPEN = "open"
    FREE = "free"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The prompt of a chat. reasoning: how its answer begins."""

    tokens: tuple[int, ...]
    reasoning: Reasoning = Reasoning.CLOSED


class AnswerReader(Protocol):
    """Splits the growing text of one answer into content, reasoning and tool calls. The result does not depend on how the text
    is divided into parts. Not thread-safe."""

    def add(self, text: str) -> list[Piece]:
        """The pieces completed by new text. Text that may belong to a marker is withheld, and a tool call until it is
        complete."""
        ...

    def finish(self, cut: bool) -> list[Piece]:
        """The rest, after the last text. cut: the answer was ended before the model ended it. An incomplete tool call then
        becomes text, like one that cannot be parsed."""
        ...


class Encoder(Protocol):
    """Converts text to token ids and back. Thread-safe, does not use MLX."""

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
        """The prompt for messages with `role`, `content` and whatever else the model's chat template reads. tools: descriptions
        as in OpenAI's chat route. options: further arguments of the template. Raises BadRequest."""
        ...

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text as a completion prompt, including the tokenizer's leading special tokens."""
        ...

    def encode_word(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of a text inside another, without and with a preceding space; empty if it has no token."""
        ...

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as part of an answer: without surrounding special tokens."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        ...

    def answer_reader(self, tools: Sequence[Mapping[str, object]], reasoning: Reasoning) -> AnswerReader:
        """A reader for the answer to a chat with these tools. reasoning: the state of reasoning at the end of its prompt."""
        ...

    def hidden_tokens(self, *, split: bool, tools: bool, stop: Sequence[str]) -> HiddenTokens:
        """The special tokens that the text of an answer omits: all except those of its stop strings and, if the answer is
        split, of the markers that a reader looks for (with tools: also of calls, inside which nothing is omitted)."""
        ...

    def constraint(self, grammar: Grammar, reasoning: Reasoning) -> Constraint:
        """Keeps an answer within a grammar, which begins after the model's reasoning. reasoning: see EncodedChat; CLOSED for
        plain text. Raises BadRequest naming the grammar's field if it cannot be compiled."""
        ...

    @property
    def binds_calls(self) -> bool:
        """Whether there is a grammar for the model's tool call format."""
        ...

    def call_grammar(
        self, tools: Sequence[Mapping[str, object]], *, several: bool, otherwise: Grammar | None = None
    ) -> Grammar:
        """The grammar of answers that call these tools, once or several times, or that satisfy `otherwise`. Raises BadRequest
        if there is no grammar for the model's tool call format."""
        ...

    def free_call_grammar(self, tools: Sequence[Mapping[str, object]], strict: Collection[str]) -> Grammar:
        """The grammar of answers with any text, in which tool calls use these tools, with valid arguments for the tools named
        by `strict`. Raises BadRequest as `call_grammar`."""
        ...


class DraftSwitch(Protocol):
    """The engine as the lifecycle sees it. Futures resolve on the engine thread, between rounds."""

    @property
    def active(self) -> int:
        """The id of the adapter that currently drafts; BARE_DRAFT (0): none."""
        ...

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """Load and check an adapter without serving it (None: the base draft). Raises AdapterRefused through the future."""
        ...

    def switch(self, staged: Staged) -> Future[None]:
        """Serve the staged draft from the next round on."""
        ...

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        """Measured seconds of a round of one request that drafts 1, 2, ... tokens; None if the draft length is fixed or nothing
        has been measured. step: the cost of a draft step as a multiple of the current draft's. May be called from any thread.
        """
        ...


class MemoryLender(Protocol):
    """Lends serving's memory to training, one loan at a time."""

    def lend(self, wanted: int, least: int) -> Future[int]:
        """Lend up to `wanted` bytes that no request uses; cached prefixes are evicted for it. Returns the bytes lent; 0 if
        fewer than `least` are available."""
        ...

    def take_back(self) -> None:
        """End the loan: serving uses that memory again. Idempotent. May be called from any thread."""
        ...

    @property
    def loan_needed(self) -> bool:
        """Whether requests wait for memory on loan. May be called from any thread."""
        ...


class Staged(Protocol):
    """A draft that is loaded and checked but not serving yet."""

    @property
    def adapter(self) -> int:
        """The id of the loaded adapter; BARE_DRAFT (0): none."""
        ...


class GenerationSink(Protocol):
    """Receives finished generations from the engine (lifecycle.recorder). Must return at once."""

    def record(self, generation: Generation) -> None:
        """Queue a finished generation for the log."""
        ...


class RoundObserver(Protocol):
    """Receives the engine's reports of prompts and rounds, for metrics. `rounds` has one entry per row; `seconds` is the
    round's wall time."""

    def prompt_read(self, tokens: int, reused: int) -> None:
        """A prompt of `tokens` tokens has been prefilled, `reused` of them from the prefix cache."""
        ...

    def prefix_read(self, tokens: int) -> None:
        """The keys and values of `tokens` tokens were loaded from the prefix cache's files."""
        ...

    def observe(self, rounds: Sequence[Round], seconds: float) -> None:
        """A round of the batch has ended."""
        ...

    def preempted(self) -> None:
        """A request was preempted because memory ran out."""
        ...

    def failure_cases(self, ties: int, others: int) -> None:
        """A generation was recorded with `ties` failure cases that are ties, and `others` that are not."""
        ...

    def draft_failed(self, adapter: int) -> None:
        """The draft failed in a round while `adapter` served: it raised an error, or its logits were not finite."""
        ...


class JobHandle(Protocol):
    """A running child process. Messages are the JSON objects it has written, oldest first."""

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
        """End it: politely, then by force. Returns when it has ended."""
        ...


class Launcher(Protocol):
    """Starts child processes: training runs and the other jobs of the lifecycle."""

    def launch(self, spec: Mapping[str, object]) -> JobHandle:
        """Start the child with a JSON-serialisable job description (see learning.spec.JobSpec)."""
        ...


class Doorkeeper(Protocol):
    """Authenticates callers by an API key or, if no key was ever created, by the token of the home folder. Every method except
    `log_in` and `log_out` returns at once."""

    @property
    def without_key(self) -> Caller:
        """The caller without a key."""
        ...

    @property
    def several(self) -> bool:
        """Whether more than one key exists or existed."""
        ...

    def by_key(self, secret: str) -> Caller | None:
        """The caller with this key or token; None if it is invalid."""
        ...

    def by_session(self, secret: str) -> Caller | None:
        """The caller of this page session; None if it is invalid."""
        ...

    def log_in(self, key: str) -> str | None:
        """Open a page session with a key. Returns its secret, or None if the key is invalid. Raises StoreError."""
        ...

    def log_out(self, session: str) -> None:
        """End a page session. Idempotent. Raises StoreError."""
        ...


class Operator(Protocol):
    """The operator's commands to the lifecycle, implemented by the supervisor for API and CLI."""

    def request_training(self, idempotency_key: str | None, practice_minutes: float | None = None) -> TrainingRun:
        """Force a run. practice_minutes: for how long, on text that the target writes; None: on logged texts. The same key
        returns the same run. Raises Conflict if a run is in progress, BadRequest if nothing has been recorded yet."""
        ...

    def run(self, run_id: int) -> TrainingRun:
        """Raises NotFound."""
        ...

    def runs(self, limit: int, before: int | None = None) -> list[TrainingRun]:
        """The newest `limit` runs, newest first. before: only those with smaller ids."""
        ...

    def end_run(self, run_id: int) -> TrainingRun:
        """End an unfinished run, in whichever process of the database it runs: its child is stopped, the run becomes ENDED, and
        its texts are available to the next run. Raises NotFound, and Conflict if the run is over or after shutdown."""
        ...

    def learning(self) -> LearningState:
        """Whether runs on logged texts start automatically, and what the gate would require of the next one. Raises Conflict
        without a draft, StoreError."""
        ...

    def gains(self) -> GainsState:
        """The measured gain of the serving adapter over the base draft, or why there is none. Raises StoreError."""
        ...

    def practice(self) -> PracticeState:
        """Whether practice starts automatically. Returns at once."""
        ...

    def choose_practice(self, on: bool) -> PracticeState:
        """Let practice start automatically or not, from now on and after a restart. Turning it off ends an automatic practice
        run, but not a requested one. Raises Conflict if the setting is fixed or after shutdown, Unavailable if the choice
        cannot be stored, StoreError."""
        ...

    def adapters(self) -> list[AdapterRef]:
        """Every adapter version, newest first."""
        ...

    def activate(self, adapter_id: int) -> AdapterRef | None:
        """Serve this adapter (0: the base draft, returns None). Raises NotFound, Conflict, AdapterRefused."""
        ...

    def remove_adapter(self, adapter_id: int) -> AdapterRef:
        """Delete the files of an adapter that does not serve. One that could have served again becomes REMOVED. Raises
        NotFound, Conflict."""
        ...

    def rollback(self, expected: int | None = None) -> AdapterRef | None:
        """Return to the active adapter's parent; None is the base draft. expected: the version to roll back. Counts as a lost
        watch: the texts that the adapter learned from are quarantined and the next run is delayed. Raises Conflict if the base
        draft or an unexpected version serves."""
        ...

    def erase(self, selection: Selection, *, retire_adapters: bool = False) -> Erased:
        """Delete generations, and drop their texts everywhere, including texts not yet written. A child that may have read one
        is ended, together with its run. Adapters that learned from one are marked; with retire_adapters, all marked adapters
        never serve again. Raises Conflict after shutdown, Unavailable, TimeoutError, StoreError."""
        ...


class Overview(Protocol):
    """What the server's page reads of its pair's rows. Each call reads a bounded number of rows. Raises StoreError."""

    def history(self, hours: int) -> History:
        """The last `hours` hours, or as many as are recorded."""
        ...

    def disagreements(self, limit: int) -> list[Disagreement]:
        """Of the newest failure cases, those where the draft was most confident and the target least, one per pair of
        tokens."""
        ...

    def newest_cases(self, limit: int, before: int | None = None) -> list[Disagreement]:
        """The newest failure cases, including near-ties, newest first. before: only those recorded before the case with this
        id. Cases of other pairs are skipped, within the bound on rows read."""
        ...

    def newest_run(self) -> TrainingRun | None:
        """The newest training run, over or not; None if there was none."""
        ...
