"""The one thread that owns every MLX object: it prefills, runs rounds, and changes drafts between them."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from service import core
from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    Delta,
    EngineStatus,
    Failed,
    FinishReason,
    GenerationSink,
    NotFound,
    Prompt,
    RedraftError,
    RequestStatus,
    RoundObserver,
    Selection,
    Sink,
    Staged,
    Unavailable,
    panics_as_errors,
)
from service.engine import device
from service.engine.adapters import Draft, load_steps
from service.engine.engine import Engine
from service.engine.prefill import Prefill
from service.engine.request import Request
from service.engine.scheduler import Scheduler
from service.engine.staging import Staging
from service.engine.ticket import Place, Ticket
from service.engine.unloading import IdleTimer, Unloaded
from service.engine.watchdog import Watchdog

log = logging.getLogger(__name__)

ABANDON_SECONDS = 0.1
"""How long a thread is waited for that was given up or still loads: in native code nothing can stop it."""
IDLE_SECONDS = 0.5
"""How long the thread sleeps at most while there is nothing to do."""
LOAN_SECONDS = 0.05
"""How long the thread sleeps at most while requests wait for memory that is lent, and nothing runs."""
SAVED_IDLE = 1024
"""Tokens that a text has in the prefix cache and in no file, at least, to be written while there is nothing to do."""
SAVE_SECONDS = 10.0
"""How long the prefix cache's files are written at the end, at most."""


@dataclass(frozen=True, slots=True)
class Command:
    """A change to be made on the thread, between two rounds."""

    run: Callable[[Engine], None]
    future: Future[Staged] | Future[None] | Future[int]


class EngineThread:
    """core.GenerationService, core.DraftSwitch and core.MemoryLender over one Engine.

    `build` makes the Engine and runs on the thread itself, for MLX objects belong to the thread that made them. After
    `idle_unload_seconds` without a request or a change (None: never) the engine is dropped with its weights and caches; the
    next request has it made again, by `build` with what is known of the last one. `on_fatal` is called from the watchdog when
    the thread died or made no progress for `hang_seconds` while work was waiting. `on_submit` is called from `submit` with
    every request, `on_wait` when one has to wait for a row; both must return at once.
    """

    def __init__(
        self,
        build: Callable[[Unloaded | None], Engine],
        *,
        max_rows: int,
        max_waiting: int,
        recorder: GenerationSink,
        observer: RoundObserver,
        hang_seconds: float = 120.0,
        idle_unload_seconds: float | None = None,
        on_fatal: Callable[[str], None] = lambda reason: None,
        on_submit: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._recorder = recorder
        self._observer = observer
        self._on_submit = on_submit
        self._on_wait = on_wait
        self._engine: Engine | None = None
        self._unloaded: Unloaded | None = None
        """What is known of the engine while its weights are not in memory."""
        self._idle = IdleTimer(idle_unload_seconds)
        self._scheduler = Scheduler(max_rows, max_waiting)
        self._flushes: list[Callable[[], None]] = []
        self._commands: deque[Command] = deque()
        self._staging = Staging()
        self._condition = threading.Condition()
        """Guards the scheduler's queues and the commands; notified when there is something to do."""
        self._stopping = False
        self._draining = False
        self._reported_failures = 0
        self._reported_read = 0
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
        with self._condition:
            self._serving()
            self._scheduler.reserve()
        return Place(self._release)

    def submit(self, prompt: Prompt, sink: Sink, place: core.Place | None = None, *, route: str = "") -> Ticket:
        """See core.GenerationService. `sink` is called on the engine's thread."""
        self._serving().check(prompt)
        ticket = Ticket(prompt, sink, route)
        with self._condition:
            self._serving()
            # A place that was released meanwhile is no place.
            if place is None or not place.release():
                self._scheduler.check_capacity()
            must_wait = self._scheduler.add(ticket)
            self._condition.notify()
        self._on_submit()
        if must_wait:
            self._on_wait()
        return ticket

    def requests(self) -> list[RequestStatus]:
        """See core.GenerationService."""
        with self._condition:
            states = self._scheduler.states()
        return [ticket.status(state) for ticket, state in states]

    def cancel(self, request_id: str) -> RequestStatus:
        """See core.GenerationService."""
        with self._condition:
            states = self._scheduler.states()
        for ticket, state in states:
            if ticket.id == request_id:
                status = ticket.status(state)
                ticket.cancel()
                return status
        raise NotFound("no such request is under way")

    def on_delivered(self, flush: Callable[[], None]) -> None:
        """See core.GenerationService."""
        self._flushes.append(flush)

    def _release(self) -> None:
        with self._condition:
            self._scheduler.release()

    def _serving(self) -> Engine | Unloaded:
        known = self._known
        if known is None:
            raise Unavailable(self._watchdog.dead or "the server is starting")
        if self._watchdog.dead or self._draining or self._stopping:
            raise Unavailable(self._watchdog.dead or "the server is shutting down")
        return known

    @property
    def _known(self) -> Engine | Unloaded | None:
        """None until the engine has been loaded for the first time. From any thread: one of the two is set before the other
        goes."""
        return self._engine or self._unloaded or self._engine

    def status(self) -> EngineStatus:
        """See core.GenerationService. Not ready while loading or draining, after the thread died, or without progress for
        half of `hang_seconds`. Ready while unloaded."""
        engine, known = self._engine, self._known
        idle = self._watchdog.idle_seconds
        reason = self._watchdog.dead or ("" if known is not None else "loading")
        if not reason and self._draining:
            reason = "draining"
        if not reason and idle > self._watchdog.hang_seconds / 2:
            reason = f"no progress for {idle:.0f} s"
        return EngineStatus(
            ready=not reason,
            reason=reason or ("serving" if engine is not None else "unloaded"),
            rows=self._scheduler.rows,
            waiting=len(self._scheduler.waiting),
            idle_seconds=idle,
            adapter=self.active,
            draft_failures=engine.decoder.draft_failures if engine else 0,
            memory=engine.memory() if engine else device.memory(),
            kv_cache_usage=engine.decoder.memory.usage if engine else 0.0,
            prefix_disk_bytes=engine.decoder.prefixes.disk_bytes if engine else 0,
            speedup=engine.decoder.planner.speedup.value if engine and engine.decoder.planner else 0.0,
            loaded=engine is not None,
        )

    @property
    def active(self) -> int:
        """See core.DraftSwitch. BARE_DRAFT while the models are loading, too; while unloaded, what will draft again."""
        known = self._known
        if known is None:
            return BARE_DRAFT
        return known.adapter if isinstance(known, Unloaded) else known.decoder.adapter

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """See core.DraftSwitch. The future fails with Unavailable without a draft model, or once the thread died or is being
        stopped."""
        future: Future[Staged] = Future()
        self._command(lambda engine: self._staging.start(engine.base, ref, engine.provenance.draft, future), future)
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

    def forget(self, selection: Selection) -> Future[None]:
        """Drop all that is stored of ended requests (`Decoder.forget`). Selected requests that wait or run go on as if they had
        said `store: false`. The future fails with Unavailable once the thread died or is being stopped, with OSError where a
        file cannot be removed."""
        future: Future[None] = Future()

        def apply(engine: Engine) -> None:
            scheduler, now = self._scheduler, datetime.now(UTC)
            with self._condition:
                tickets = [*scheduler.waiting, *scheduler.prefilling, *scheduler.running]
            for ticket in tickets:
                if selection.covers(ticket.id, ticket.prompt, now):
                    ticket.prompt = replace(ticket.prompt, store=False)
                    if ticket.row is not None:
                        ticket.row.prompt = ticket.prompt
            try:
                engine.decoder.forget()
            except OSError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._command(apply, future)
        return future

    def load_look_ups(self, outputs: Iterable[tuple[str, Sequence[int]]]) -> Future[None]:
        """Let look-ups find logged outputs: (salt, tokens), the newest last. They are read on the thread, so before it forgets
        any or after. The future fails with what reading raises, with Unavailable once the thread died or is being stopped."""
        future: Future[None] = Future()

        def apply(engine: Engine) -> None:
            try:
                if (lookup := engine.decoder.lookup) is not None:
                    for salt, output in outputs:
                        lookup.add_output(output, salt)
            except (RedraftError, ValueError, LookupError) as error:
                # Of rows that cannot be read, which cost speed alone.
                future.set_exception(error)
            else:
                future.set_result(None)

        self._command(apply, future)
        return future

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        """See core.DraftSwitch."""
        known = self._known
        planner = known.decoder.planner if isinstance(known, Engine) else known and known.planner
        return planner.round_seconds(step) if planner is not None else None

    def lend(self, wanted: int, least: int) -> Future[int]:
        """See core.MemoryLender. The future fails with Unavailable once the thread died or is being stopped."""
        future: Future[int] = Future()

        def apply(engine: Engine) -> None:
            # What waits comes first.
            future.set_result(0 if self._scheduler.waiting else engine.decoder.memory.lend(wanted, least))

        self._command(apply, future)
        return future

    def take_back(self) -> None:
        """See core.MemoryLender."""
        # Woken for nothing it would never be idle, and write no files of the prefix cache.
        if self._engine is not None and self._engine.decoder.memory.take_back():
            with self._condition:
                self._condition.notify()

    @property
    def loan_needed(self) -> bool:
        """See core.MemoryLender."""
        return self._engine is not None and self._engine.decoder.memory.loan_needed

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were still running."""
        self._draining = True
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._scheduler.unfinished and not self._watchdog.dead:
            time.sleep(0.02)
        return not self._scheduler.unfinished

    def stop(self) -> None:
        """End the thread; whatever still runs fails with Unavailable."""
        self._watchdog.stop()
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            given_up = self._watchdog.dead is not None or self.loading
            self._thread.join(timeout=ABANDON_SECONDS if given_up else self._watchdog.hang_seconds)
        self._fail_everyone(Unavailable("the server shut down"))

    @property
    def loading(self) -> bool:
        """The thread finds, loads or times models."""
        return self._known is None and self._thread.is_alive()

    def _command(self, run: Callable[[Engine], None], future: Future[Staged] | Future[None] | Future[int]) -> None:
        with self._condition:
            if self._watchdog.dead or self._stopping:
                future.set_exception(Unavailable(self._watchdog.dead or "the server is shutting down"))
                return
            self._commands.append(Command(run, future))
            self._condition.notify()

    def _busy(self) -> bool:
        return self._scheduler.unfinished or bool(self._staging)

    # ---------------------------------------------------------------------------------------------------- the MLX thread

    def _run(self) -> None:
        try:
            self._load()
            while not self._stopping and self._watchdog.dead is None:
                with panics_as_errors():
                    if self._engine is None:
                        self._wait_unloaded()
                    else:
                        self._turn(self._engine)
                        self._unload_when_idle()
            if self._draining and self._watchdog.dead is None and self._engine is not None:
                self._save_prefixes(self._engine)
        except Exception as error:
            if self._known is None:
                # Whoever called start() gets the error, and ends the process in order.
                self._watchdog.stop()
            if self._watchdog.dead is not None:
                # The watchdog gave this thread up, failed every request, and emptied the queues under it.
                return
            # What the error says is enough where it is one of ours, such as a model that is not there.
            log.error("the engine stopped: %s", error, exc_info=not isinstance(error, RedraftError))
            # Everybody may read this. While requests run, what a library's error says may be of a prompt.
            says = self._known is None or isinstance(error, RedraftError)
            self._watchdog.dead = f"the engine stopped: {type(error).__name__}" + (f": {error}" if says else "")
            self._fail_everyone(error if isinstance(error, RedraftError) else Unavailable(self._watchdog.dead))

    def _load(self) -> None:
        """Make the engine. Raises what `build` raises."""
        before = self._unloaded
        engine = self._build(before)
        engine.decoder.runner.on_progress = self._watchdog.beat
        self._reported_failures = self._reported_read = 0
        if before is not None and before.ref is not None and engine.base is not None:
            try:
                for draft in load_steps(engine.base.model, before.ref, engine.provenance.draft):
                    if draft is not None:
                        engine.decoder.switch(draft)
            except AdapterRefused as error:
                # The supervisor sees that another one serves than the active one, and handles it.
                log.warning("after loading the models again, the bare draft serves: %s", error)
        self._engine, self._unloaded = engine, None
        self._idle.used()

    def _unload_when_idle(self) -> None:
        """Drop the engine, its weights and its caches, where nothing has been asked of it for long."""
        engine = self._engine
        if engine is None or not self._idle.due or engine.decoder.memory.lent:
            return
        self._save_prefixes(engine)
        with self._condition:
            if self._scheduler.unfinished or self._commands or self._stopping:
                return
            self._unloaded, self._engine = Unloaded.of(engine), None
        del engine
        # Modules and their hooks refer to each other.
        gc.collect()
        device.release_cache()
        log.info("the models were unloaded after %.0f minutes without a request", self._idle.minutes)

    def _wait_unloaded(self) -> None:
        """Wait until something is asked of the engine, then load it. Where that fails, what waits gets the error, and the next
        request tries again."""
        # Loading may take any time.
        self._watchdog.rest()
        with self._condition:
            while not (self._scheduler.waiting or self._commands or self._stopping):
                self._condition.wait()
            if self._stopping:
                return
        started_at = time.perf_counter()
        try:
            self._load()
        except (RedraftError, OSError, RuntimeError, ValueError) as error:
            log.error("the models could not be loaded again: %s", error, exc_info=not isinstance(error, RedraftError))
            says = str(error) if isinstance(error, RedraftError) else type(error).__name__
            self._fail_everyone(Unavailable(f"the models could not be loaded again: {says}"))
            gc.collect()
            device.release_cache()
            return
        log.info("the models were loaded again in %.1f s", time.perf_counter() - started_at)
        self._refuse_too_long()

    def _refuse_too_long(self) -> None:
        """End requests that were taken while the engine was unloaded, and do not fit into the memory that it has now."""
        assert self._engine is not None
        for ticket in list(self._scheduler.waiting):
            try:
                self._engine.check(ticket.prompt)
            except RedraftError as error:
                with self._condition:
                    self._scheduler.waiting.remove(ticket)
                ticket.send(Failed(error))
        self._flush()

    def _save_prefixes(self, engine: Engine) -> None:
        end = time.monotonic() + SAVE_SECONDS
        while engine.decoder.prefixes.save() and time.monotonic() < end:
            pass

    def _turn(self, engine: Engine) -> None:
        self._watchdog.beat()
        self._run_commands(engine)
        if engine.decoder.reports_pending:
            # Before a request of it is cancelled: it may have ended by itself.
            self._round(engine, 0)
        self._schedule(engine)
        gather, chunk = engine.decoder.strategy.gather_seconds, engine.decoder.prefill_chunk
        due = self._scheduler.prefill_is_due(time.perf_counter(), gather, chunk)
        # Before rows join, since old and new buffers are held then; and with those that have joined.
        self._preempt(engine)
        if due:
            self._prefill_chunk(engine)
            self._preempt(engine)
        self._round(engine, len(self._scheduler.prefilling) if due else 0)
        self._flush()
        self._wait_for_work(engine)

    def _run_commands(self, engine: Engine) -> None:
        """Make the changes that were asked for, and one step of loading an adapter."""
        while self._commands:
            self._idle.used()
            command = self._commands.popleft()
            try:
                command.run(engine)
            except Exception as error:
                # The thread ends, and knows of this one no more.
                if not command.future.done():
                    command.future.set_exception(Unavailable(f"the engine stopped: {type(error).__name__}"))
                raise
        self._staging.step()

    def _schedule(self, engine: Engine) -> None:
        """End cancelled requests, then admit waiting ones to the free rows."""
        with self._condition:
            unstarted = self._scheduler.drop_cancelled()
        for ticket in unstarted:
            row = self._row(ticket, engine)
            row.finish = FinishReason.CANCELLED
            self._finish(ticket, row, engine)
        self._end_cancelled(engine)
        while (ticket := self._next_ticket(engine)) is not None:
            # It waits until it has its row: `drain` must see it, and an error must reach it.
            ticket.row = self._row(ticket, engine)
            prefill = engine.decoder.start_prefill(ticket.row)
            with self._condition:
                self._scheduler.admit(ticket, prefill)

    @staticmethod
    def _row(ticket: Ticket, engine: Engine) -> Request:
        """Its row, where it had one before it was preempted; else a new one."""
        return ticket.row or engine.new_request(ticket.id, ticket.prompt, ticket.arrived_at)

    def _next_ticket(self, engine: Engine) -> Ticket | None:
        prefilling, scheduler = self._prefilling(engine), self._scheduler
        with self._condition:
            ticket = scheduler.next(
                engine.decoder.prefixes.cached_tokens,
                time.perf_counter(),
                lambda ticket: engine.decoder.memory.has_room([*prefilling, self._positions(ticket, engine)]),
            )
            lacks_memory = ticket is None and scheduler.free_rows > 0 and len(scheduler.waiting) > 0
        if lacks_memory:
            self._on_wait()
        return ticket

    @staticmethod
    def _positions(ticket: Ticket, engine: Engine) -> int:
        return engine.decoder.memory.reserved_for(len(ticket.tokens), ticket.prompt)

    def _prefilling(self, engine: Engine) -> list[int]:
        return [self._positions(ticket, engine) for ticket in self._scheduler.prefilling]

    def _preempt(self, engine: Engine) -> None:
        """Put the youngest requests back into the queue where memory does not do for all that run and prefill."""
        gone = {id(row) for row in engine.decoder.preempt(self._prefilling(engine))}
        back = [ticket for ticket in self._scheduler.running if id(ticket.row) in gone]
        # The oldest comes to the front.
        for ticket in sorted(back, key=lambda ticket: ticket.arrived_at, reverse=True):
            with self._condition:
                self._scheduler.requeue(ticket)
            self._observer.preempted()
        if back:
            self._on_wait()

    def _end_cancelled(self, engine: Engine) -> None:
        gone = self._scheduler.cancelled()
        rows = [ticket.row for ticket in gone if ticket.row is not None]
        for row in rows:
            # Before they leave: a round that is under way gives them nothing any more.
            row.finish = FinishReason.CANCELLED
        if any(ticket in self._scheduler.running for ticket in gone):
            engine.decoder.leave(rows)
        for ticket, row in zip(gone, rows, strict=True):
            self._finish(ticket, row, engine)
        self._scheduler.remove(gone)

    def _prefill_chunk(self, engine: Engine) -> None:
        """Prefill the next chunk of the prompt whose turn it is, and whole prompts that fit into the same number of tokens: as
        many as suit the device, but no more than the running requests may wait for."""
        ready: list[Prefill] = []
        scheduler, chunk = self._scheduler, engine.decoder.prefill_chunk
        left = scheduler.prefill_tokens(chunk)
        if scheduler.running:
            left = engine.decoder.pace.within(left)
            chunk = min(chunk, left)
        while scheduler.prefilling:
            prefill = engine.decoder.batch_prompts(scheduler.prefill_order(), left, chunk)
            left -= prefill.next_call_tokens(chunk)
            if left < 0 or not engine.decoder.prefill(prefill, len(scheduler.prefilling), chunk):
                break
            ready.append(prefill)
            scheduler.prefilled(prefill)
            for row in prefill.rows:
                # A prompt counts once, however often it is prefilled.
                if not row.decode_started_at:
                    self._observer.prompt_read(len(row.prompt.tokens), row.cached_tokens)
        if more := engine.decoder.prefixes.tokens_read - self._reported_read:
            self._reported_read += more
            self._observer.prefix_read(more)
        if ready:
            engine.decoder.join(ready)
            self._send_prompt_logprobs(ready, engine)

    def _send_prompt_logprobs(self, ready: Sequence[Prefill], engine: Engine) -> None:
        """Send what was asked about prompts that were prefilled, and end the requests that ended with them."""
        rows = {id(row) for prefill in ready for row in prefill.rows}
        for ticket in [ticket for ticket in self._scheduler.running if id(ticket.row) in rows]:
            assert ticket.row is not None
            if (logprobs := ticket.row.take_prompt_logprobs()) is not None:
                ticket.send(Delta("", (), (), prompt_logprobs=logprobs))
            if ticket.row.error is not None:
                ticket.send(Failed(ticket.row.error))
                self._scheduler.remove([ticket])
            elif ticket.row.finish is not None:
                self._finish(ticket, ticket.row, engine)
                self._scheduler.remove([ticket])

    def _round(self, engine: Engine, joining: int) -> None:
        """Decode one round and give every request its share of it. joining: requests that are about to join."""
        if not engine.decoder.unfinished:
            return
        report = engine.decoder.round(joining)
        self._observer.observe(report.rounds, report.seconds)
        for _ in range(engine.decoder.draft_failures - self._reported_failures):
            self._observer.draft_failed(engine.decoder.adapter)
        self._reported_failures = engine.decoder.draft_failures
        # Of a round that was under way, those that it made go back to the queue have their share too.
        scheduler = self._scheduler
        with self._condition:
            tickets = [*scheduler.running, *scheduler.prefilling, *scheduler.waiting]
        by_row = {id(ticket.row): ticket for ticket in tickets if ticket.row is not None}
        for row, delta in zip(report.rows, report.deltas, strict=True):
            if (ticket := by_row.get(id(row))) is None:
                # Cancelled while the round was under way.
                continue
            ticket.send(delta)
            if row.finish is not None:
                self._finish(ticket, row, engine)
                self._scheduler.remove([ticket])
        for row in report.failed:
            if row.error is not None and (ticket := by_row.get(id(row))) is not None:
                ticket.send(Failed(row.error))
                self._scheduler.remove([ticket])

    def _finish(self, ticket: Ticket, row: Request, engine: Engine) -> None:
        if row.prompt.store and (generation := row.generation(engine.provenance)) is not None:
            self._recorder.record(generation)
            ties = sum(case.tie for case in generation.cases)
            self._observer.failure_cases(ties, len(generation.cases) - ties)
        ticket.send(row.finished())

    def _flush(self) -> None:
        for flush in self._flushes:
            flush()

    def _wait_for_work(self, engine: Engine) -> None:
        if self.loan_needed and not self._scheduler.rows and not self._commands:
            # A request waits for what is lent.
            with self._condition:
                self._condition.wait(LOAN_SECONDS)
            return
        if self._busy() or self._commands or engine.decoder.unfinished:
            self._idle.used()
            return
        with self._condition:
            if self._scheduler.waiting or self._commands or self._stopping:
                return
            idle = not self._condition.wait(IDLE_SECONDS)
        if idle:
            # One file: a request that comes meanwhile waits for no more.
            engine.decoder.prefixes.save(SAVED_IDLE)

    def _fail_everyone(self, error: RedraftError) -> None:
        with self._condition:
            tickets = self._scheduler.clear()
            futures = [*(command.future for command in self._commands), *self._staging.abandon()]
            self._commands.clear()
        for ticket in tickets:
            ticket.send(Failed(error))
        self._flush()
        for future in futures:
            if not future.done():
                future.set_exception(error)
