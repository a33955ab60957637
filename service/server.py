"""The server: every part built once, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import uvicorn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api import Doors, Feed, Limits, ModelNames, Replies, build_api, build_startup_api
from service.app import PRACTICE, TARGETS, Folders, logged_outputs, resolve_models
from service.connections import web_config
from service.core import (
    Access,
    BadRequest,
    Forget,
    ModelError,
    PracticeState,
    Provenance,
    RedraftError,
    Unavailable,
    ending_signals,
)
from service.engine import device
from service.engine.adapters import served
from service.engine.decoder import Decoder
from service.engine.drafters.lookup import INDEX_TOKENS
from service.engine.engine import Engine
from service.engine.footprint import MemoryPlan, plan_memory, weight_bytes
from service.engine.kv.budget import Budget
from service.engine.kv.prefix import PrefixCache
from service.engine.prefill import Pace
from service.engine.preflight import check_rows
from service.engine.strategy import current
from service.engine.thread import EngineThread
from service.engine.unloading import Unloaded
from service.learning import practice_text
from service.learning.loading import training_outlook, training_shape
from service.learning.practice import practice_bytes
from service.learning.targets import remove_files
from service.learning_loop import TRAINING_LOG, LearningLoop, Place
from service.lifecycle.clock import Clock
from service.lifecycle.loans import Borrower, Loans, LoanSize
from service.lifecycle.recorder import Recorder
from service.lifecycle.request_monitor import IDLE_SECONDS, RequestMonitor
from service.lifecycle.supervisor import Supervisor
from service.metrics import Metrics
from service.models.generation_config import sampling_defaults
from service.models.machine import backend, machine_kind
from service.models.memory import assumed_bytes, device_free_bytes
from service.models.padding import padded
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder, bytes_per_token
from service.models.tokens import streaming_detokenizer
from service.models.training_memory import smallest_plan
from service.open_files import raise_open_files_limit
from service.settings import Settings
from service.store.access.key_ring import REFRESH_SECONDS, KeyRing
from service.store.access.local_token import make_token, read_token
from service.store.permissions import make_private, private_folder
from service.store.processes.members import Role
from service.store.registry.overview import PairOverview

log = logging.getLogger(__name__)

FATAL_EXIT = 70
"""Exit status after the engine died or hung (EX_SOFTWARE): whoever supervises this process starts it again."""
FATAL_SECONDS = 5.0
FORGET_SECONDS = 120.0
"""Longest wait for the engine to forget between two rounds."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known of the models that the engine's thread loaded. Holds none of their weights, which may be unloaded."""

    folders: Folders
    provenance: Provenance
    tokenizer: TokenizerWrapper
    vocabulary: int
    eos: frozenset[int]
    context: int


class Application:
    """The server's parts, from the database to the ASGI application that it is. Until `start` is through, it answers that it
    is starting, and at what `stage`: fetching (finding, downloading, converting models), loading, checking (models' results
    in a batch), timing (rounds)."""

    def __init__(self, settings: Settings, on_fatal: Callable[[str], None]) -> None:
        self.settings = settings
        self.stage = "fetching"
        private_folder(settings.home)
        make_private(
            settings.adapters_dir, settings.home / TARGETS, settings.home / PRACTICE, settings.home / TRAINING_LOG
        )
        self.learning = LearningLoop(settings, Role.SERVER, on_fatal)
        self.stores = self.learning.stores
        most = max(settings.engine.num_draft_tokens, settings.engine.num_lookup_tokens)
        self.metrics = Metrics(most, settings.models.target)
        self.recorder = Recorder(self.stores.generations, on_drop=self.metrics.recorder_dropped)
        self.engine_thread = EngineThread(
            self._build,
            max_rows=settings.engine.max_rows,
            max_waiting=settings.engine.max_waiting,
            recorder=self.recorder,
            observer=self.metrics,
            hang_seconds=settings.engine.hang_seconds,
            idle_unload_seconds=_seconds(settings.engine.idle_unload_minutes),
            on_fatal=on_fatal,
            on_submit=self._notify_submit,
            on_wait=self._notify_wait,
        )
        self.metrics.watch_engine(self.engine_thread.status)
        self._keys = self._key_ring()
        self._key_clock = Clock(self._keys.refresh, REFRESH_SECONDS)
        self._key_clock.start()
        self._doors = Doors(
            self._keys,
            allowed_hosts=[*settings.server.allowed_hosts, settings.server.host],
            cors_origins=settings.server.cors_origins,
            rate_limit=settings.server.rate_limit,
            share_across_keys=settings.server.share_across_keys,
            draft_counts=settings.server.draft_counts,
        )
        recorded = settings.store.record
        self.replies = Replies(settings.store.replies_mb * 2**20 if recorded else 0, recorded=recorded)
        self._api: ASGIApp = build_startup_api(stage=lambda: self.stage, metrics=self.metrics, doors=self._doors)
        self._serving: Serving | None = None
        self._loan_sizes: dict[Borrower, LoanSize] = {}
        self._supervisor: Supervisor | None = None
        self._queue: RequestMonitor | None = None
        self._requests: RequestMonitor | None = None
        self._feed: Feed | None = None

    @property
    def token(self) -> str | None:
        """The token of the home folder, where it opens what was recorded: while there is no API key."""
        return read_token(self.settings.home) if self._keys.accepts_token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._api(scope, receive, send)

    def start(self) -> None:
        """Load the models, serve the adapter that the database says is active, start the clock, open the routes. Blocks;
        raises what makes serving impossible."""
        settings = self.settings
        self.engine_thread.start()
        serving = self._serving
        assert serving is not None
        machine = machine_kind()
        self.metrics.built(backend(), machine)
        tokenizer = serving.tokenizer
        encoder = TextEncoder(tokenizer, serving.vocabulary, serving.eos)
        queue = RequestMonitor(lambda: self.engine_thread.status().waiting, self._pause_training)
        requests = RequestMonitor(self._count_requests, self._pause_training, IDLE_SECONDS)
        supervisor = self._supervisor = self.learning.start(
            Place(serving.folders, serving.provenance, machine),
            self.engine_thread,
            self.metrics,
            # Where requests have to wait for a row, serving needs all there is.
            busy=lambda: queue.busy,
            # Practice takes nothing from any request.
            idle_seconds=lambda: requests.quiet_for,
            forget=self.places(encoder),
            # Pages take all of their memory at once: there what a child takes is set aside.
            loans=None if current().paged else Loans(self.engine_thread, self._loan_sizes),
        )
        for monitor in (queue, requests):
            monitor.start()
        self._load_look_ups(serving.provenance)
        self._queue, self._requests = queue, requests
        token_bytes = bytes_per_token(tokenizer)
        overview = PairOverview(self.stores.database, serving.provenance)
        self._feed = Feed(
            settings.models.target,
            self.engine_thread.status,
            self.metrics,
            newest_run=overview.newest_run,
            practice=supervisor.practice,
        )
        self._api = build_api(
            service=self.engine_thread,
            encoder=encoder,
            operator=supervisor,
            metrics=self.metrics,
            limits=Limits(
                max_answers=settings.engine.max_rows + settings.engine.max_waiting,
                max_body_bytes=settings.server.max_body_bytes,
                request_timeout=settings.server.request_timeout,
                arrival_seconds=settings.server.arrival_seconds,
                keepalive_seconds=settings.server.keepalive_seconds,
                max_tokens=serving.context,
                max_context=serving.context,
                max_prompt_bytes=token_bytes * serving.context if token_bytes is not None else None,
            ),
            models=ModelNames.of_target(settings.models.target, settings.server.model_aliases),
            doors=self._doors,
            overview=overview,
            feed=self._feed,
            defaults=sampling_defaults(serving.folders.target),
            strict=settings.server.strict_requests,
            replies=self.replies,
        )

    def _load_look_ups(self, who: Provenance) -> None:
        """Let look-ups find the newest answers of the log. Called once this process is a member of the database and
        carries out erasures. Raises Unavailable."""
        try:
            outputs = logged_outputs(self.stores, self.settings, who, INDEX_TOKENS)
            self.engine_thread.load_look_ups(outputs).result()
        except Unavailable:
            raise
        except (RedraftError, ValueError, LookupError) as error:
            log.warning("look-ups find no answers of the log: %s", error)

    def _key_ring(self) -> KeyRing:
        """Raises BadRequest where others could reach the server without a key, StoreError where the token cannot be written."""
        server = self.settings.server
        given = {Access.CLIENT: server.api_key, Access.OPERATOR: server.operator_key}
        own = {access: key.get_secret_value() for access, key in given.items() if key is not None}
        try:
            ring = KeyRing(self.stores.keys, own, closed=not server.loopback)
            if not server.loopback and not ring.any:
                raise BadRequest(
                    f"server.host is {server.host}, which other machines reach, and there is no API key: make one with "
                    "`redraft keys create NAME`, or set server.api_key",
                    field="server.host",
                )
            if not ring.asks:
                ring.accept_token(make_token(self.settings.home))
        except BaseException:
            self.learning.close()
            raise
        return ring

    def places(self, encoder: TextEncoder) -> dict[str, Forget]:
        """Every place outside the rows that keeps texts when their requests have ended, by its name in docs/privacy.md, and how
        it forgets. In this order: the engine hands nothing more to the recorder when that one forgets."""
        return {
            "engine": lambda selection: self.engine_thread.forget(selection).result(FORGET_SECONDS),
            "recorder": self.recorder.forget,
            "replies": self.replies.forget,
            "encoder": lambda selection: encoder.forget(),
            "targets": lambda selection: remove_files(self.settings.home / TARGETS),
            "practice": lambda selection: practice_text.remove(self.settings.home / PRACTICE),
        }

    def choose_practice(self, on: bool) -> PracticeState:
        """See core.Operator. Once `start` is through."""
        assert self._supervisor is not None
        return self._supervisor.choose_practice(on)

    def drain(self) -> None:
        """Refuse new requests, let running ones finish within the drain time, end the rest with an error."""
        if self._feed is not None:
            self._feed.end()
        self.engine_thread.drain(self.settings.server.drain_seconds)
        self.engine_thread.stop()

    def stop(self) -> None:
        """In the order in which things depend on each other; whatever was recorded is written."""
        if self._queue is not None:
            self._queue.stop()
        self._key_clock.stop(wait=False)
        self.learning.stop()
        self.engine_thread.stop()
        self.recorder.close(timeout=10.0)
        self.learning.close()

    def _pause_training(self) -> None:
        if self._supervisor is not None:
            self._supervisor.pause_child()

    def _count_requests(self) -> int:
        status = self.engine_thread.status()
        return status.waiting + status.rows

    def _notify_submit(self) -> None:
        if self._requests is not None:
            self._requests.notify()

    def _notify_wait(self) -> None:
        if self._queue is not None:
            self._queue.notify()

    def _build(self, before: Unloaded | None = None) -> Engine:
        """On the engine's thread: models are found, converted, loaded and checked there. before: what is known of them where
        they were unloaded, which is not found out again. Raises ModelError, also where they have become others since."""
        settings = self.settings
        device.limit_cache()
        device.wire_memory()
        with self._during("fetching"):
            folders = resolve_models(settings) if self._serving is None else self._serving.folders
        if before is None:
            folders, pair = self._checked_pair(folders)
        else:
            with self._during("loading"):
                pair = load_pair(folders.target, folders.draft)
            if pair.provenance != before.provenance:
                raise ModelError("the files of the models have changed; start the server again")
        base = served(pair.draft) if pair.draft is not None else None
        free = max(device_free_bytes() + device.memory().cache, 0)
        total = int(settings.engine.memory_gb * 2**30)
        if total and not current().paged:
            free = min(free, max(assumed_bytes(total) - _weights(pair), 0))
        plan = self._memory_plan(folders, pair, free, device.cache_limit(total or None))
        device.limit_cache(plan.cache)
        decoder = Decoder(
            pair.target.model,
            base,
            vocabulary=pair.vocabulary,
            k=settings.engine.num_draft_tokens if base is not None else 0,
            prefill_chunk=settings.engine.prefill_chunk,
            tie_margin=settings.engine.tie_margin,
            collect=settings.store.record,
            adaptive=settings.engine.adaptive,
            lookup=settings.engine.num_lookup_tokens,
            prefix=PrefixCache(plan.prefix),
        )
        decoder.memory.limit(plan.budget, plan.spare)
        context = _context(settings.engine.max_context, pair.target.context, plan.budget)
        with self._during("timing"):
            decoder.profile(settings.engine.max_rows, context, before and before.timed)
        if before is not None:
            decoder.lookup = before.lookup
        if settings.engine.max_gap_ms is not None:
            decoder.pace = Pace(settings.engine.max_gap_ms / 1e3)
        if (folder := settings.engine.prefix_cache_dir) is not None:
            who = pair.provenance
            try:
                decoder.prefixes.keep(folder, settings.engine.prefix_cache_disk_mb << 20, who.target, who.draft)
            except OSError as error:
                raise ModelError(f"engine.prefix_cache_dir cannot be used: {error}") from error
        if before is None:
            tokenizer = pair.target.tokenizer
            self._serving = Serving(folders, pair.provenance, tokenizer, pair.vocabulary, pair.eos, context)
        return Engine(
            decoder=decoder,
            base=base,
            eos=pair.eos,
            context=context,
            provenance=pair.provenance,
            detokenizer=lambda: streaming_detokenizer(pair.target.tokenizer),
            weights=_weights(pair),
        )

    def _checked_pair(self, folders: Folders) -> tuple[Folders, Pair]:
        """The models of these folders, and the folders that are in use: a draft that nobody named is left out, with a warning,
        where its files cannot be used. Raises ModelError."""
        try:
            return folders, self._checked_models(folders.target, folders.draft)
        except ModelError as error:
            if folders.draft is None or self.settings.models.draft is not None:
                raise
            # Where the target is at fault this raises again.
            pair = self._checked_models(folders.target, None)
            log.warning("the draft %s is left out: %s", folders.draft, error)
            return replace(folders, draft=None), pair

    def _checked_models(self, target: Path, draft: Path | None) -> Pair:
        with self._during("loading"):
            pair = load_pair(target, draft)
        with self._during("checking"):
            check_rows(pair.target.model, "target")
            if pair.draft is not None:
                check_rows(pair.draft.model, "draft")
        return pair

    def _memory_plan(self, folders: Folders, pair: Pair, free: int, cache: int) -> MemoryPlan:
        """Divides the bytes that are free once everything is loaded. cache: freed memory that MLX may hold. A run takes what is
        free when it starts; only in pages, which take all of their memory at once, some is set aside for it. Raises ModelError
        where nothing is left for keys and values."""
        engine, runs = self.settings.engine, self.settings.training

        def training(idle: int) -> int:
            sizes = self._sizes(folders, pair, idle) if runs.run_here else {}
            self._loan_sizes.update(sizes)
            borrowers = (Borrower.RUN, Borrower.PRACTICE) if self.learning.practice.on else (Borrower.RUN,)
            return max((sizes[each].wanted for each in borrowers if each in sizes and runs.enabled), default=0)

        plan = plan_memory(
            pair.target.model,
            pair.draft.model if pair.draft is not None else None,
            free,
            cache=cache,
            kv_mb=engine.kv_budget_mb,
            prefix_mb=engine.prefix_cache_mb,
            chunk=engine.prefill_chunk,
            proposed=max(engine.num_draft_tokens, engine.num_lookup_tokens),
            rank=runs.rank if runs.enabled and runs.run_here else None,
            training=training,
        )
        if plan.problem is not None:
            raise ModelError(plan.problem)
        return plan

    def _sizes(self, folders: Folders, pair: Pair, idle: int) -> dict[Borrower, LoanSize]:
        """What children take. idle: bytes that they may take while nothing is asked."""
        runs = self.settings.training
        if folders.draft is None:
            return {}
        shape = training_shape(folders.target, folders.draft, rank=runs.rank)
        outlook = training_outlook(shape, runs, idle)
        if not outlook.fits:
            log.warning("memory is too short for training: %s, and %.1f GiB can be lent", outlook, idle / 2**30)
        least = smallest_plan(shape, batch=runs.batch_size, length=padded(runs.max_length)).peak_bytes
        both, rank = (folders.target, folders.draft), runs.practice_rank
        practice = practice_bytes(pair.target.model, both, pair.vocabulary, rank)
        return {
            Borrower.RUN: LoanSize(outlook.peak_bytes, least),
            # With less memory it writes fewer texts at a time.
            Borrower.PRACTICE: LoanSize(practice, min(practice, idle)),
            # It loads the draft, and reads a few texts at a time.
            Borrower.COMPARISON: LoanSize(least, min(least, idle)),
        }

    @contextmanager
    def _during(self, stage: str) -> Generator[None]:
        self.stage, started_at = stage, time.perf_counter()
        yield
        log.info("%s took %.1f s", stage, time.perf_counter() - started_at)


def _seconds(minutes: float) -> float | None:
    """Of a setting in which 0 is never. Raises ModelError on CUDA, where pages take all of the memory whether a run has it or
    not."""
    if minutes and current().paged:
        raise ModelError("engine.idle_unload_minutes is not available on CUDA: set it to 0")
    return minutes * 60 or None


def _weights(pair: Pair) -> int:
    return weight_bytes(pair.target.model, pair.draft.model if pair.draft is not None else None)


def _context(asked: int, own: int | None, budget: Budget) -> int:
    """Tokens of a prompt and its answer, at most. asked: by the settings; 0: as many as the model allows. own: the model's
    limit; None where it says none."""
    fits = budget.longest()
    wanted = min((limit for limit in (asked, own) if limit), default=fits)
    if fits < wanted:
        log.warning("requests are limited to %d tokens by memory; the model allows %d", fits, wanted)
    return min(wanted, fits)


class Server(uvicorn.Server):
    """Uvicorn that says when it listens, and lets running answers finish before it cuts connections."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None], drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's own; then `on_listening` is called, which must return at once."""
        await super().startup(sockets)
        self._on_listening()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Nothing: `run_server` handles signals, until all is closed and not only while requests are served."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close connections as uvicorn does."""
        await asyncio.to_thread(self._drain)
        await super().shutdown(sockets)


@contextmanager
def _signals(server: Server) -> Generator[None]:
    """The ending signals (see ending_signals) end the server in order. A second one ends the process at once, with status 128
    plus its number, as in shells: running answers are cut, and what the recorder holds is lost, as after a crash."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = server.should_exit = True

    before = {number: signal.signal(number, handle) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, before anything is loaded: a port in use is said at once. Raises Unavailable."""
    # The protocol by name: only where it reads TCP does asyncio switch Nagle's algorithm off, which costs 40 ms a piece.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    return listener


def _check_certificate(certfile: Path | None, keyfile: Path | None) -> None:
    """Before anything is loaded. Raises Unavailable."""
    if certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
        except (OSError, ssl.SSLError) as error:
            raise Unavailable(f"server.ssl_certfile {certfile} and server.ssl_keyfile {keyfile}: {error}") from error


OnReady = Callable[[str, str | None, Callable[[bool], object]], None]
"""Called with the server's URL, the token of the home folder where it opens what was recorded, and
core.Operator.choose_practice, which turns practice on or off."""


def run_server(settings: Settings, on_ready: OnReady) -> int:
    """Serve until a signal comes. Returns the exit status: FATAL_EXIT after the engine died. A second signal ends the process
    at once, with status 128 and its number.

    HTTP answers at once, with 503 while the models load; on_ready is called on another thread when they have been loaded.
    Raises what made serving impossible.
    """
    # The database, its log, adapters and logs hold what clients wrote: nothing of it is for other users of this machine.
    os.umask(0o077)
    raise_open_files_limit()
    server: Server | None = None
    fatal: list[str] = []
    unable: list[BaseException] = []

    def failed(reason: str) -> None:
        fatal.append(reason)
        log.critical("%s: ending, so that whoever supervises this process starts it again", reason)
        if server is not None:
            server.should_exit = True
        # A thread that hangs in native code cannot be joined: give the answers a moment to go out, then leave for good.
        threading.Timer(FATAL_SECONDS, os._exit, (FATAL_EXIT,)).start()

    def started(start: Future[None]) -> None:
        assert server is not None
        if server.should_exit:
            return  # A signal came meanwhile: whatever start-up ran into is its consequence.
        if (error := start.exception()) is not None:
            unable.append(error)
            server.should_exit = True
            return
        host, port = listener.getsockname()[:2]
        scheme = "http" if settings.server.ssl_certfile is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        on_ready(url, application.token, application.choose_practice)

    _check_certificate(settings.server.ssl_certfile, settings.server.ssl_keyfile)
    listener = _listen(settings.server.host, settings.server.port)
    application = Application(settings, failed)
    config = web_config(
        application,
        idle_seconds=settings.server.idle_seconds,
        arrival_seconds=settings.server.arrival_seconds,
        host=settings.server.host,
        port=settings.server.port,
        ssl_certfile=settings.server.ssl_certfile,
        ssl_keyfile=settings.server.ssl_keyfile,
    )
    with ThreadPoolExecutor(1, thread_name_prefix="redraft-start") as starter:
        server = Server(
            config,
            on_listening=lambda: starter.submit(application.start).add_done_callback(started),
            drain=application.drain,
        )
        with _signals(server):
            try:
                server.run(sockets=[listener])
            finally:
                application.engine_thread.stop()
                starter.shutdown()
                application.stop()
    if unable:
        raise unable[0]
    if application.engine_thread.loading:
        # The signal came while models were loading, in native code that cannot be stopped and must not run while the
        # interpreter is taken down. All that was recorded is written, and half-made model folders are known for what they are.
        logging.shutdown()
        os._exit(0)
    return FATAL_EXIT if fatal else 0
