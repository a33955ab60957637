"""The one thread that owns every MLX object: it admits requests, runs rounds, and changes drafts between them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    BadRequest,
    EngineStatus,
    Failed,
    FinishReason,
    GenerationSink,
    Overloaded,
    Prompt,
    Provenance,
    RedraftError,
    RoundObserver,
    Sink,
    Staged,
    Unavailable,
)
from service.engine.decoder import Decoder, Prefill
from service.engine.draft import Draft, load_steps
from service.engine.row import Detokenizer, Row, TextStream
from service.engine.ticket import Ticket

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Staging:
    """An adapter being loaded a step at a time between rounds."""

    steps: Iterator[Draft | None]
    future: Future[Staged]


@dataclass(frozen=True, slots=True)
class Command:
    """A change to be made on the thread, between two rounds."""

    run: Callable[[Engine], None]
    future: Future[Staged] | Future[None]


@dataclass(frozen=True, slots=True)
class Engine:
    """What the thread runs, built on that thread."""

    decoder: Decoder
    base: Draft | None
    eos: frozenset[int]
    context: int
    provenance: Provenance
    detokenizer: Callable[[], Detokenizer]


class Worker:
    """core.GenerationService and core.DraftSwitch over one Engine.

    `build` makes the Engine and runs on the thread itself, for MLX objects belong to the thread that made them. `on_fatal`
    is called from the watchdog when the thread died or made no progress for `hang_seconds` while work was waiting.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        max_rows: int,
        max_waiting: int,
        recorder: GenerationSink,
        observer: RoundObserver,
        hang_seconds: float = 120.0,
        on_fatal: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._build = build
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._recorder = recorder
        self._observer = observer
        self._hang_seconds = hang_seconds
        self._on_fatal = on_fatal
        self._engine: Engine | None = None
        self._waiting: deque[Ticket] = deque()
        self._reading: list[tuple[Ticket, Prefill]] = []
        self._running: list[Ticket] = []
        self._commands: deque[Command] = deque()
        self._staging: deque[Staging] = deque()
        self._gate = threading.Condition()
        self._stopping = False
        self._draining = False
        self._dead: str | None = None
        self._beat = time.monotonic()
        self._reported_failures = 0
        self._thread = threading.Thread(target=self._run, name="redraft-mlx", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="redraft-watchdog", daemon=True)

    # ------------------------------------------------------------------------------------------- from any other thread

    def start(self, timeout: float | None = None) -> None:
        """Load the models and begin. Raises what loading raised."""
        loaded: Future[None] = Future()
        self._commands.append(Command(lambda engine: loaded.set_result(None), loaded))
        self._thread.start()
        self._watchdog.start()
        loaded.result(timeout)

    def submit(self, prompt: Prompt, sink: Sink) -> Ticket:
        engine = self._engine
        if engine is None:
            raise Unavailable(self._dead or "the server is starting")
        room = engine.context - len(prompt.tokens)
        if not prompt.tokens:
            raise BadRequest("the prompt is empty", field="prompt")
        if room < prompt.sampling.max_tokens:
            raise BadRequest(
                f"prompt ({len(prompt.tokens)} tokens) and max_tokens ({prompt.sampling.max_tokens}) exceed the context "
                f"of {engine.context} tokens",
                field="max_tokens" if room > 0 else "prompt",
            )
        ticket = Ticket(prompt, sink)
        with self._gate:
            if self._dead or self._draining or self._stopping:
                raise Unavailable(self._dead or "the server is shutting down")
            if len(self._waiting) >= self._max_waiting + max(0, self._max_rows - self._taken()):
                raise Overloaded("the queue is full", retry_after=5)
            self._waiting.append(ticket)
            self._gate.notify()
        return ticket

    def status(self) -> EngineStatus:
        engine = self._engine
        busy = bool(self._waiting or self._reading or self._running or self._staging)
        idle = time.monotonic() - self._beat if busy else 0.0
        reason = self._dead or ("" if engine is not None else "loading")
        if not reason and self._draining:
            reason = "draining"
        if not reason and idle > self._hang_seconds / 2:
            reason = f"no progress for {idle:.0f} s"
        return EngineStatus(
            ready=not reason,
            reason=reason or "serving",
            rows=len(self._running) + len(self._reading),
            waiting=len(self._waiting),
            idle_seconds=idle,
            adapter=self.active,
            draft_failures=engine.decoder.draft_failures if engine else 0,
        )

    @property
    def active(self) -> int:
        return self._engine.decoder.adapter if self._engine else BARE_DRAFT

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        future: Future[Staged] = Future()

        def begin(engine: Engine) -> None:
            if engine.base is None:
                future.set_exception(Unavailable("this server runs without a draft model"))
            elif ref is None:
                future.set_result(engine.base)
            else:
                steps = load_steps(engine.base.model, ref, engine.provenance.draft)
                self._staging.append(Staging(steps, future))

        self._command(begin, future)
        return future

    def switch(self, staged: Staged) -> Future[None]:
        future: Future[None] = Future()

        def apply(engine: Engine) -> None:
            if not isinstance(staged, Draft):
                future.set_exception(TypeError("only what stage() returned can be switched to"))
                return
            engine.decoder.switch(staged)
            future.set_result(None)

        self._command(apply, future)
        return future

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were still running."""
        self._draining = True
        end = time.monotonic() + seconds
        while time.monotonic() < end and (self._waiting or self._reading or self._running) and not self._dead:
            time.sleep(0.02)
        return not (self._waiting or self._reading or self._running)

    def stop(self) -> None:
        """End the thread; whatever still runs fails with Unavailable."""
        with self._gate:
            self._stopping = True
            self._gate.notify()
        if self._thread.is_alive():
            # A thread that was given up will not come back.
            self._thread.join(timeout=self._hang_seconds if self._dead is None else 0.1)
        self._fail_everyone(Unavailable("the server shut down"))

    def _command(self, run: Callable[[Engine], None], future: Future[Staged] | Future[None]) -> None:
        with self._gate:
            if self._dead or self._stopping:
                future.set_exception(Unavailable(self._dead or "the server is shutting down"))
                return
            self._commands.append(Command(run, future))
            self._gate.notify()

    def _taken(self) -> int:
        return len(self._running) + len(self._reading)

    # ---------------------------------------------------------------------------------------------------- the MLX thread

    def _run(self) -> None:
        try:
            self._engine = self._build()
            while not self._stopping and self._dead is None:
                self._turn(self._engine)
        except Exception as error:
            if self._dead is not None:
                # The watchdog gave it up, told everyone, and emptied the lists under it.
                return
            # What the error says is enough where it is one of ours, such as a model that is not there.
            log.error("the engine stopped: %s", error, exc_info=not isinstance(error, RedraftError))
            self._dead = f"the engine stopped: {type(error).__name__}: {error}"
            self._fail_everyone(error if isinstance(error, RedraftError) else Unavailable(self._dead))

    def _turn(self, engine: Engine) -> None:
        """Everything between two rounds, then one round: changes asked for, one loading step, one chunk of prompts."""
        self._beat = time.monotonic()
        while self._commands:
            self._commands.popleft().run(engine)
        self._step_staging()
        self._drop_cancelled(engine)
        self._admit(engine)
        self._read_chunk(engine)
        if engine.decoder.rows:
            self._decode(engine)
        elif not (self._reading or self._staging):
            with self._gate:
                if not self._waiting and not self._commands and not self._stopping:
                    self._gate.wait(timeout=0.5)

    def _step_staging(self) -> None:
        if not self._staging:
            return
        staging = self._staging[0]
        try:
            draft = next(staging.steps)
        except Exception as error:
            self._staging.popleft()
            refused = error if isinstance(error, RedraftError) else Unavailable(f"loading the adapter failed: {error}")
            staging.future.set_exception(refused)
            return
        if draft is not None:
            self._staging.popleft()
            staging.future.set_result(draft)

    def _drop_cancelled(self, engine: Engine) -> None:
        with self._gate:
            unstarted = [ticket for ticket in self._waiting if ticket.cancelled.is_set()]
            for ticket in unstarted:
                self._waiting.remove(ticket)
        for ticket in unstarted:
            ticket.tell(Failed(Unavailable("cancelled before it started")))
        unread = [ticket for ticket, _ in self._reading if ticket.cancelled.is_set()]
        gone = [ticket for ticket in self._running if ticket.cancelled.is_set()]
        if gone:
            engine.decoder.leave([ticket.row for ticket in gone if ticket.row is not None])
        for ticket in [*unread, *gone]:
            if ticket.row is not None:
                ticket.row.finish = FinishReason.CANCELLED
                self._finish(ticket, ticket.row, engine)
        self._reading = [(ticket, prefill) for ticket, prefill in self._reading if ticket not in unread]
        self._running = [ticket for ticket in self._running if ticket not in gone]

    def _admit(self, engine: Engine) -> None:
        while self._taken() < self._max_rows:
            with self._gate:
                if not self._waiting:
                    return
                ticket = self._waiting[0]
                text = TextStream(engine.detokenizer(), ticket.prompt.sampling.stop)
                ticket.row = Row(ticket.id, ticket.prompt, engine.eos, text)
                self._reading.append((ticket, engine.decoder.begin(ticket.row)))
                self._waiting.popleft()

    def _read_chunk(self, engine: Engine) -> None:
        """The next chunk of the prompt that has waited longest, and whole prompts behind it that fit into one chunk with it."""
        ready: list[Prefill] = []
        left = engine.decoder.prefill_chunk
        while self._reading:
            ticket, prefill = self._reading[0]
            wanted = min(prefill.left, engine.decoder.prefill_chunk)
            if wanted > left:
                break
            left -= wanted
            if not engine.decoder.read(prefill):
                break
            ready.append(prefill)
            self._observer.prompt_read(len(ticket.prompt.tokens), prefill.row.reused)
            self._running.append(ticket)
            self._reading.pop(0)
        if ready:
            engine.decoder.join(ready)

    def _decode(self, engine: Engine) -> None:
        report = engine.decoder.round()
        self._observer.observe(report.rounds, report.seconds)
        for _ in range(engine.decoder.draft_failures - self._reported_failures):
            self._observer.draft_failed(engine.decoder.adapter)
        self._reported_failures = engine.decoder.draft_failures
        by_row = {id(ticket.row): ticket for ticket in self._running}
        for row, delta in zip(report.rows, report.deltas, strict=True):
            ticket = by_row[id(row)]
            ticket.tell(delta)
            if row.finish is not None:
                self._finish(ticket, row, engine)
                self._running.remove(ticket)

    def _finish(self, ticket: Ticket, row: Row, engine: Engine) -> None:
        if row.prompt.store and (generation := row.generation(engine.provenance)) is not None:
            self._recorder.record(generation)
        ticket.tell(row.finished())

    def _fail_everyone(self, error: RedraftError) -> None:
        with self._gate:
            tickets = [*self._waiting, *(ticket for ticket, _ in self._reading), *self._running]
            self._waiting.clear()
            self._reading, self._running = [], []
            pending = [*self._commands, *self._staging]
            self._commands.clear()
            self._staging.clear()
        for ticket in tickets:
            ticket.tell(Failed(error))
        for item in pending:
            if not item.future.done():
                item.future.set_exception(error)

    def _watch(self) -> None:
        """Native code can block or die where no exception is seen; someone outside must notice."""
        while not self._stopping:
            time.sleep(min(1.0, self._hang_seconds / 4))
            if self._dead is None and self._engine is not None and not self._thread.is_alive() and not self._stopping:
                self._dead = "the engine's thread is gone"
            if self._dead is None and self._engine is not None and self.status().idle_seconds > self._hang_seconds:
                self._dead = f"the engine made no progress for {self._hang_seconds:.0f} s"
                self._fail_everyone(Unavailable(self._dead))
            if self._dead is not None:
                self._on_fatal(self._dead)
                return
