"""The engine thread. It owns every MLX object, prefills prompts, runs rounds, and switches drafts between rounds."""

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
"""Time to wait for a thread that the watchdog abandoned or that is still loading. Native code cannot be interrupted."""
IDLE_SECONDS = 0.5
"""Longest sleep of the thread when it has no work."""
LOAN_SECONDS = 0.05
"""Longest sleep of the thread when nothing runs and waiting requests need memory that is on loan."""
SAVED_IDLE = 1024
"""While idle, a text is written to disk when at least this many of its tokens are in the prefix cache but in no file."""
SAVE_SECONDS = 10.0
"""Time limit for writing the prefix cache's files at shutdown."""


@dataclass(frozen=True, slots=True)
class Command:
    """A change that the engine thread makes between two rounds."""

    run: Callable[[Engine], None]
    future: Future[Staged] | Future[None] | Future[int]


class EngineThread:
    """Implements core.GenerationService, core.DraftSwitch and core.MemoryLender over one Engine.

    `build` makes the Engine. It runs on this thread, because MLX objects belong to the thread that made them. After
    `idle_unload_seconds` without a request or a change (None: never), the engine is dropped with its weights and caches. The
    next request rebuilds it: `build` then receives what was kept of the previous engine.

    The watchdog calls `on_fatal` when the thread dies, or makes no progress for `hang_seconds` while work is waiting. `submit`
    calls `on_submit` for every request, and `on_wait` when a request has to wait for a row. Both must return at once.
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
        """What is kept of the engine while its weights are unloaded."""
        self._idle = IdleTimer(idle_unload_seconds)
        self._scheduler = Scheduler(max_rows, max_waiting)
        self._flushes: list[Callable[[], None]] = []
        self._commands: deque[Command] = deque()
        self._staging = Staging()
        self._condition = threading.Condition()
        """Guards the scheduler's queues and the commands. Notified when there is work."""
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
        """Load the models and start serving. Raises what loading raises, and Unavailable if `stop` was called meanwhile."""
        loaded: Future[None] = Future()
        self._command(lambda engine: loaded.set_result(None), loaded)
        if loaded.done():
            loaded.result()
        self._thread.start()
        self._watchdog.start()
        loaded.result(timeout)

    def reserve(self) -> Place:
        """See core.GenerationService. Does not wait for a round."""
        with self._condition:
            self._serving()
            self._scheduler.reserve()
        return Place(self._release)

    def submit(self, prompt: Prompt, sink: Sink, place: core.Place | None = None, *, route: str = "") -> Ticket:
        """See core.GenerationService. `sink` is called on the engine thread."""
        self._serving().check(prompt)
        ticket = Ticket(prompt, sink, route)
        with self._condition:
            self._serving()
            # A reservation that was released meanwhile no longer counts.
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
        """The engine, or what is kept of it while unloaded; None until the first load. Safe from any thread: one attribute is
        set before the other is cleared."""
        return self._engine or self._unloaded or self._engine

    def status(self) -> EngineStatus:
        """See core.GenerationService. Not ready while loading or draining, after the thread died, or after half of
        `hang_seconds` without progress. Ready while unloaded."""
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
        """See core.DraftSwitch. BARE_DRAFT while the models load. While they are unloaded: the adapter that will be loaded with
        them."""
        known = self._known
        if known is None:
            return BARE_DRAFT
        return known.adapter if isinstance(known, Unloaded) else known.decoder.adapter

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """See core.DraftSwitch. The future fails with Unavailable when there is no draft model, or the thread died or is
        stopping."""
        future: Future[Staged] = Future()
        self._command(lambda engine: self._staging.start(engine.base, ref, engine.provenance.draft, future), future)
        return future

    def switch(self, staged: Staged) -> Future[None]:
        """See core.DraftSwitch. The future fails with TypeError for anything that `stage` did not return, and with Unavailable
        when the thread died or is stopping."""
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
        """Drop everything stored about ended requests (`Decoder.forget`). Selected requests that wait or run continue as if
        they had been sent with `store: false`. The future fails with Unavailable when the thread died or is stopping, and with
        OSError when a file cannot be removed."""
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
        """Make logged outputs available to prompt lookup: (salt, tokens) pairs, newest last. They are read on the engine
        thread, so a concurrent `forget` runs either before or after. The future fails with what reading raises, and with
        Unavailable when the thread died or is stopping."""
        future: Future[None] = Future()

        def apply(engine: Engine) -> None:
            try:
                if (lookup := engine.decoder.lookup) is not None:
                    for salt, output in outputs:
                        lookup.add_output(output, salt)
            except (RedraftError, ValueError, LookupError) as error:
                # Unreadable rows only cost speed.
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
        """See core.MemoryLender. The future fails with Unavailable when the thread died or is stopping."""
        future: Future[int] = Future()

        def apply(engine: Engine) -> None:
            # Waiting requests take precedence.
            future.set_result(0 if self._scheduler.waiting else engine.decoder.memory.lend(wanted, least))

        self._command(apply, future)
        return future

    def take_back(self) -> None:
        """See core.MemoryLender."""
        # Notify only if there was a loan. Otherwise the thread would never be idle and never write prefix cache files.
        if self._engine is not None and self._engine.decoder.memory.take_back():
            with self._condition:
                self._condition.notify()

    @property
    def loan_needed(self) -> bool:
        """See core.MemoryLender."""
        return self._engine is not None and self._engine.decoder.memory.loan_needed

    def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones. Returns False if some are still running after `seconds`."""
        self._draining = True
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._scheduler.unfinished and not self._watchdog.dead:
            time.sleep(0.02)
        return not self._scheduler.unfinished

    def stop(self) -> None:
        """End the thread. Unfinished requests fail with Unavailable."""
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
        """Whether the thread is finding, loading or timing models."""
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
                # The caller of start() gets the error and shuts the process down in order.
                self._watchdog.stop()
            if self._watchdog.dead is not None:
                # The watchdog abandoned this thread, failed every request and emptied the queues.
                return
            # Our own errors, such as a missing model, explain themselves and need no traceback.
            log.error("the engine stopped: %s", error, exc_info=not isinstance(error, RedraftError))
            # `dead` is public. While requests run, the message of a library's error may contain text of a prompt.
            says = self._known is None or isinstance(error, RedraftError)
            self._watchdog.dead = f"the engine stopped: {type(error).__name__}" + (f": {error}" if says else "")
            self._fail_everyone(error if isinstance(error, RedraftError) else Unavailable(self._watchdog.dead))

    def _load(self) -> None:
        """Build the engine. Raises what `build` raises."""
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
                # The supervisor notices that the served adapter differs from the active one, and handles it.
                log.warning("the models were reloaded without the adapter; serving with the base draft: %s", error)
        self._engine, self._unloaded = engine, None
        self._idle.used()

    def _unload_when_idle(self) -> None:
        """Drop the engine with its weights and caches once it has been idle long enough."""
        engine = self._engine
        if engine is None or not self._idle.due or engine.decoder.memory.lent:
            return
        self._save_prefixes(engine)
        with self._condition:
            if self._scheduler.unfinished or self._commands or self._stopping:
                return
            self._unloaded, self._engine = Unloaded.of(engine), None
        del engine
        # Modules and their hooks form reference cycles.
        gc.collect()
        device.release_cache()
        log.info("unloaded the models after %.0f minutes without a request", self._idle.minutes)

    def _wait_unloaded(self) -> None:
        """Wait for work, then load the engine again. If loading fails, waiting requests get the error and the next request
        tries again."""
        # Loading has no time limit.
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
            log.error("could not reload the models: %s", error, exc_info=not isinstance(error, RedraftError))
            says = str(error) if isinstance(error, RedraftError) else type(error).__name__
            self._fail_everyone(Unavailable(f"the models could not be reloaded: {says}"))
            gc.collect()
            device.release_cache()
            return
        log.info("reloaded the models in %.1f s", time.perf_counter() - started_at)
        self._refuse_too_long()

    def _refuse_too_long(self) -> None:
        """Fail requests that were accepted while the engine was unloaded but do not fit into the memory available now."""
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
            # Report first, then cancel: a request of that round may already have ended.
            self._round(engine, 0)
        self._schedule(engine)
        gather, chunk = engine.decoder.strategy.gather_seconds, engine.decoder.prefill_chunk
        due = self._scheduler.prefill_is_due(time.perf_counter(), gather, chunk)
        # Preempt before rows join, because old and new buffers are held at once then, and again with the rows that joined.
        self._preempt(engine)
        if due:
            self._prefill_chunk(engine)
            self._preempt(engine)
        self._round(engine, len(self._scheduler.prefilling) if due else 0)
        self._flush()
        self._wait_for_work(engine)

    def _run_commands(self, engine: Engine) -> None:
        """Run the queued commands and one step of loading an adapter."""
        while self._commands:
            self._idle.used()
            command = self._commands.popleft()
            try:
                command.run(engine)
            except Exception as error:
                # The thread ends, and this command is no longer in the queue that gets failed.
                if not command.future.done():
                    command.future.set_exception(Unavailable(f"the engine stopped: {type(error).__name__}"))
                raise
        self._staging.step()

    def _schedule(self, engine: Engine) -> None:
        """End cancelled requests, then admit waiting requests to free rows."""
        with self._condition:
            unstarted = self._scheduler.drop_cancelled()
        for ticket in unstarted:
            row = self._row(ticket, engine)
            row.finish = FinishReason.CANCELLED
            self._finish(ticket, row, engine)
        self._end_cancelled(engine)
        while (ticket := self._next_ticket(engine)) is not None:
            # The ticket stays queued until it has its row, so that `drain` sees it and errors reach it.
            ticket.row = self._row(ticket, engine)
            prefill = engine.decoder.start_prefill(ticket.row)
            with self._condition:
                self._scheduler.admit(ticket, prefill)

    @staticmethod
    def _row(ticket: Ticket, engine: Engine) -> Request:
        """The ticket's row if it was preempted, otherwise a new one."""
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
        """Return the newest requests to the queue when running and prefilling requests do not fit in memory together."""
        gone = {id(row) for row in engine.decoder.preempt(self._prefilling(engine))}
        back = [ticket for ticket in self._scheduler.running if id(ticket.row) in gone]
        # Requeue the newest first, so that the oldest ends up at the front.
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
            # Before they leave the batch: the pending round must not emit tokens for them.
            row.finish = FinishReason.CANCELLED
        if any(ticket in self._scheduler.running for ticket in gone):
            engine.decoder.leave(rows)
        for ticket, row in zip(gone, rows, strict=True):
            self._finish(ticket, row, engine)
        self._scheduler.remove(gone)

    def _prefill_chunk(self, engine: Engine) -> None:
        """Prefill the next chunk of the scheduled prompt, together with whole prompts that fit into the same token budget. The
        budget is what suits the device, limited by how long running requests may wait."""
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
                # Count a prompt once, even if it is prefilled again after preemption.
                if not row.decode_started_at:
                    self._observer.prompt_read(len(row.prompt.tokens), row.cached_tokens)
        if more := engine.decoder.prefixes.tokens_read - self._reported_read:
            self._reported_read += more
            self._observer.prefix_read(more)
        if ready:
            engine.decoder.join(ready)
            self._send_prompt_logprobs(ready, engine)

    def _send_prompt_logprobs(self, ready: Sequence[Prefill], engine: Engine) -> None:
        """Send the requested log-probabilities of prompts that finished prefill, and end the requests that end with their
        prompts."""
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
        """Run one decode round and deliver its tokens. joining: the number of requests about to join."""
        if not engine.decoder.unfinished:
            return
        report = engine.decoder.round(joining)
        self._observer.observe(report.rounds, report.seconds)
        for _ in range(engine.decoder.draft_failures - self._reported_failures):
            self._observer.draft_failed(engine.decoder.adapter)
        self._reported_failures = engine.decoder.draft_failures
        # Requests that were preempted while this round was pending still get their tokens from it.
        scheduler = self._scheduler
        with self._condition:
            tickets = [*scheduler.running, *scheduler.prefilling, *scheduler.waiting]
        by_row = {id(ticket.row): ticket for ticket in tickets if ticket.row is not None}
        for row, delta in zip(report.rows, report.deltas, strict=True):
            if (ticket := by_row.get(id(row))) is None:
                # Cancelled while the round was pending.
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
            # A request waits for memory that is on loan.
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
            # Save one file at a time, so that a new request waits for at most one write.
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
