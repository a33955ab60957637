"""The one thread that owns every MLX object: it admits requests, runs rounds, and changes drafts between them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from service import core
from service.core import (
    BARE_DRAFT,
    AdapterRef,
    EngineStatus,
    Failed,
    FinishReason,
    GenerationSink,
    Overloaded,
    Prompt,
    RedraftError,
    RoundObserver,
    Sink,
    Staged,
    Unavailable,
)
from service.engine.adapters import Draft
from service.engine.engine import Engine
from service.engine.prefill import Prefill
from service.engine.request import Request
from service.engine.staging import Staging
from service.engine.ticket import Place, Ticket
from service.engine.watchdog import Watchdog

log = logging.getLogger(__name__)

RETRY_SECONDS = 5
ABANDON_SECONDS = 0.1
"""How long a thread is waited for that was given up or still loads: in native code nothing can stop it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A change to be made on the thread, between two rounds."""

    run: Callable[[Engine], None]
    future: Future[Staged] | Future[None]


class Worker:
    """core.GenerationService and core.DraftSwitch over one Engine.

    `build` makes the Engine and runs on the thread itself, for MLX objects belong to the thread that made them. `on_fatal`
    is called from the watchdog when the thread died or made no progress for `hang_seconds` while work was waiting. `on_wait`
    is called from `submit` when a request has to wait for a row, and must return at once.
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
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._recorder = recorder
        self._observer = observer
        self._on_wait = on_wait
        self._engine: Engine | None = None
        self._waiting: deque[Ticket] = deque()
        self._reserved = 0
        self._reading: list[tuple[Ticket, Prefill]] = []
        self._running: list[Ticket] = []
        self._commands: deque[Command] = deque()
        self._staging = Staging()
        self._gate = threading.Condition()
        self._stopping = False
        self._draining = False
        self._reported_failures = 0
        self._thread = threading.Thread(target=self._run, name="redraft-mlx", daemon=True)
        self._watchdog = Watchdog(
            self._thread,
            hang_seconds=hang_seconds,
            busy=self._busy,
            give_up=lambda reason: self._fail_everyone(Unavailable(reason)),
            on_fatal=on_fatal,
        )

    # ------------------------------------------------------------------------------------------- from any other thread

    def start(self, timeout: float | None = None) -> None:
        """Load the models and begin. Raises what loading raised, and Unavailable when `stop` was called meanwhile."""
        loaded: Future[None] = Future()
        self._command(lambda engine: loaded.set_result(None), loaded)
        if loaded.done():
            loaded.result()
        self._thread.start()
        self._watchdog.start()
        loaded.result(timeout)

    def reserve(self) -> Place:
        """See core.GenerationService. Never waits for a round."""
        with self._gate:
            self._check_room()
            self._reserved += 1
        return Place(self._release)

    def submit(self, prompt: Prompt, sink: Sink, place: core.Place | None = None) -> Ticket:
        """See core.GenerationService. `sink` is called on the engine's thread."""
        self._serving_engine().check(prompt)
        ticket = Ticket(prompt, sink)
        with self._gate:
            # A place that was released meanwhile is no place.
            if place is None or not place.release():
                self._check_room()
            else:
                self._serving_engine()
            self._waiting.append(ticket)
            must_wait = len(self._waiting) > max(0, self._max_rows - self._taken())
            self._gate.notify()
        if must_wait:
            self._on_wait()
        return ticket

    def _release(self) -> None:
        with self._gate:
            self._reserved -= 1

    def _check_room(self) -> None:
        """Under the gate. Raises Unavailable when not serving, Overloaded when the queue is full."""
        self._serving_engine()
        if len(self._waiting) + self._reserved >= self._max_waiting + max(0, self._max_rows - self._taken()):
            raise Overloaded("the queue is full", retry_after=RETRY_SECONDS)

    def _serving_engine(self) -> Engine:
        if self._engine is None:
            raise Unavailable(self._watchdog.dead or "the server is starting")
        if self._watchdog.dead or self._draining or self._stopping:
            raise Unavailable(self._watchdog.dead or "the server is shutting down")
        return self._engine

    def status(self) -> EngineStatus:
        """See core.GenerationService. Not ready while loading or draining, after the thread died, or without progress for
        half of `hang_seconds`."""
        engine = self._engine
        idle = self._watchdog.idle_seconds
        reason = self._watchdog.dead or ("" if engine is not None else "loading")
        if not reason and self._draining:
            reason = "draining"
        if not reason and idle > self._watchdog.hang_seconds / 2:
            reason = f"no progress for {idle:.0f} s"
        return EngineStatus(
            ready=not reason,
            reason=reason or "serving",
            rows=self._taken(),
            waiting=len(self._waiting),
            idle_seconds=idle,
            adapter=self.active,
            draft_failures=engine.decoder.draft_failures if engine else 0,
        )

    @property
    def active(self) -> int:
        """See core.DraftSwitch. BARE_DRAFT while the models are loading, too."""
        return self._engine.decoder.adapter if self._engine else BARE_DRAFT

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """See core.DraftSwitch. The future fails with Unavailable without a draft model, or once the thread died or is being
        stopped."""
        future: Future[Staged] = Future()
        self._command(lambda engine: self._staging.begin(engine.base, ref, engine.provenance.draft, future), future)
        return future

    def switch(self, staged: Staged) -> Future[None]:
        """See core.DraftSwitch. The future fails with TypeError for what `stage` did not return, with Unavailable once the
        thread died or is being stopped."""
        future: Future[None] = Future()

        def apply(engine: Engine) -> None:
            if not isinstance(staged, Draft):
                future.set_exception(TypeError("only what stage() returned can be switched to"))
                return
            engine.decoder.switch(staged)
            future.set_result(None)

        self._command(apply, future)
        return future

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        """See core.DraftSwitch."""
        planner = self._engine.decoder.planner if self._engine else None
        return planner.round_seconds(step) if planner is not None else None

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were still running."""
        self._draining = True
        end = time.monotonic() + seconds
        while time.monotonic() < end and (self._waiting or self._reading or self._running) and not self._watchdog.dead:
            time.sleep(0.02)
        return not (self._waiting or self._reading or self._running)

    def stop(self) -> None:
        """End the thread; whatever still runs fails with Unavailable."""
        self._watchdog.stop()
        with self._gate:
            self._stopping = True
            self._gate.notify()
        if self._thread.is_alive():
            given_up = self._watchdog.dead is not None or self.loading
            self._thread.join(timeout=ABANDON_SECONDS if given_up else self._watchdog.hang_seconds)
        self._fail_everyone(Unavailable("the server shut down"))

    @property
    def loading(self) -> bool:
        """The thread finds, loads or times models."""
        return self._engine is None and self._thread.is_alive()

    def _command(self, run: Callable[[Engine], None], future: Future[Staged] | Future[None]) -> None:
        with self._gate:
            if self._watchdog.dead or self._stopping:
                future.set_exception(Unavailable(self._watchdog.dead or "the server is shutting down"))
                return
            self._commands.append(Command(run, future))
            self._gate.notify()

    def _taken(self) -> int:
        return len(self._running) + len(self._reading)

    def _busy(self) -> bool:
        return bool(self._waiting or self._reading or self._running or self._staging)

    # ---------------------------------------------------------------------------------------------------- the MLX thread

    def _run(self) -> None:
        try:
            self._engine = self._build()
            while not self._stopping and self._watchdog.dead is None:
                self._turn(self._engine)
        except Exception as error:
            if self._engine is None:
                # Whoever called start() gets the error, and ends the process in order.
                self._watchdog.stop()
            if self._watchdog.dead is not None:
                # The watchdog gave it up, told everyone, and emptied the lists under it.
                return
            # What the error says is enough where it is one of ours, such as a model that is not there.
            log.error("the engine stopped: %s", error, exc_info=not isinstance(error, RedraftError))
            self._watchdog.dead = f"the engine stopped: {type(error).__name__}: {error}"
            self._fail_everyone(error if isinstance(error, RedraftError) else Unavailable(self._watchdog.dead))

    def _turn(self, engine: Engine) -> None:
        """Everything between two rounds, then one round: changes asked for, one loading step, one chunk of prompts."""
        self._watchdog.beat()
        while self._commands:
            self._commands.popleft().run(engine)
        self._staging.step()
        self._drop_cancelled(engine)
        self._admit(engine)
        self._read_chunk(engine)
        if engine.decoder.unfinished:
            self._decode(engine)
        elif not (self._reading or self._staging):
            with self._gate:
                if not self._waiting and not self._commands and not self._stopping:
                    self._gate.wait(timeout=0.5)

    def _drop_cancelled(self, engine: Engine) -> None:
        with self._gate:
            unstarted = [ticket for ticket in self._waiting if ticket.cancelled.is_set()]
            for ticket in unstarted:
                self._waiting.remove(ticket)
        for ticket in unstarted:
            ticket.tell(Failed(Unavailable("cancelled before it started")))
        unread = [ticket for ticket, _ in self._reading if ticket.cancelled.is_set()]
        gone = [ticket for ticket in self._running if ticket.cancelled.is_set()]
        ended = [(ticket, ticket.row) for ticket in [*unread, *gone] if ticket.row is not None]
        for _, row in ended:
            # Before they leave: a round that is under way gives them nothing any more.
            row.finish = FinishReason.CANCELLED
        if gone:
            engine.decoder.leave([ticket.row for ticket in gone if ticket.row is not None])
        for ticket, row in ended:
            self._finish(ticket, row, engine)
        self._reading = [(ticket, prefill) for ticket, prefill in self._reading if ticket not in unread]
        self._running = [ticket for ticket in self._running if ticket not in gone]

    def _admit(self, engine: Engine) -> None:
        while self._taken() < self._max_rows:
            with self._gate:
                if not self._waiting:
                    return
                ticket = self._waiting[0]
                ticket.row = engine.row(ticket.id, ticket.prompt)
                self._reading.append((ticket, engine.decoder.begin(ticket.row)))
                self._waiting.popleft()

    def _read_chunk(self, engine: Engine) -> None:
        """The next chunk of the oldest prompt, and whole ones that fit beside it (into two chunks where more wait than run)."""
        ready: list[Prefill] = []
        size = engine.decoder.prefill_chunk
        left = size * (2 if len(self._reading) > len(self._running) else 1)
        while self._reading:
            prefill = engine.decoder.gather([waiting for _, waiting in self._reading], left)
            left -= prefill.wanted(size)
            if left < 0 or not engine.decoder.read(prefill, len(self._reading)):
                break
            ready.append(prefill)
            done = [ticket for ticket, _ in self._reading if any(ticket.row is row for row in prefill.rows)]
            self._reading = [(ticket, waiting) for ticket, waiting in self._reading if ticket not in done]
            self._running += done
            for row in prefill.rows:
                self._observer.prompt_read(len(row.prompt.tokens), row.reused)
        if ready:
            engine.decoder.join(ready)

    def _decode(self, engine: Engine) -> None:
        report = engine.decoder.round(len(self._reading))
        self._observer.observe(report.rounds, report.seconds)
        for _ in range(engine.decoder.draft_failures - self._reported_failures):
            self._observer.draft_failed(engine.decoder.adapter)
        self._reported_failures = engine.decoder.draft_failures
        by_row = {id(ticket.row): ticket for ticket in self._running}
        for row, delta in zip(report.rows, report.deltas, strict=True):
            if (ticket := by_row.get(id(row))) is None:
                # Cancelled while the round was under way.
                continue
            ticket.tell(delta)
            if row.finish is not None:
                self._finish(ticket, row, engine)
                self._running.remove(ticket)

    def _finish(self, ticket: Ticket, row: Request, engine: Engine) -> None:
        if row.prompt.store and (generation := row.generation(engine.provenance)) is not None:
            self._recorder.record(generation)
        ticket.tell(row.finished())

    def _fail_everyone(self, error: RedraftError) -> None:
        with self._gate:
            tickets = [*self._waiting, *(ticket for ticket, _ in self._reading), *self._running]
            self._waiting.clear()
            self._reading, self._running = [], []
            promised = [*(command.future for command in self._commands), *self._staging.give_up()]
            self._commands.clear()
        for ticket in tickets:
            ticket.tell(Failed(error))
        for future in promised:
            if not future.done():
                future.set_exception(error)
