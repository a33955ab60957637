"""The lifecycle without a server: the real supervisor, store, gate, watch and training job, over answers that are given.

Decoding is lossless, so an answer does not depend on the draft. What a draft would have been worth on it, and the failure
cases it would have left, follow from one teacher-forced pass (learning/scoring/simulate.py). No time passes between requests:
there is no cool-down and no back-off, and a run takes no request's time.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import mlx.nn as nn

from service.app import TARGETS, Folders, lifecycle_rules
from service.core import BARE_DRAFT, AdapterRef, Generation, RunState, Staged, StoreError, TrainingRun, Verdict
from service.engine import profile
from service.engine.adapters import Draft, load, served
from service.engine.costs import USUALLY_HELD, Costs, Load
from service.evaluation.training_run import DRAFT_LENGTH
from service.learning import job
from service.learning.channel import Channel
from service.learning.scoring.simulate import Simulated, simulate_rounds
from service.lifecycle import gate
from service.lifecycle.clock import Clock
from service.lifecycle.context import LifecycleContext
from service.lifecycle.practice_choice import PracticeChoice
from service.lifecycle.supervisor import Supervisor
from service.lifecycle.switching import Switching
from service.metrics.registry import Metrics
from service.models.machine import machine_kind
from service.models.pair import Pair
from service.settings import Settings
from service.store.processes.members import RENEW_SECONDS, Members
from service.store.stores import open_stores

BLOCK = 32
"""Requests that are scored in one pass; after a switch the rest of a block is scored again, with the new draft."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One training run. at: requests answered when it started. seconds: of training and scoring. generations: texts that it
    claimed."""

    at: int
    promoted: bool
    reason: str
    seconds: float
    generations: int


@dataclass(slots=True)
class History:
    """What happened to an arm of an experiment.

    agreed, tokens, calls: by request, in order: output tokens that were the draft's argmax, output tokens, and target calls at
    DRAFT_LENGTH tokens a round. serving: the active adapter after each part of the traffic.
    """

    agreed: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    calls: list[int] = field(default_factory=list[int])
    runs: list[RunRecord] = field(default_factory=list[RunRecord])
    serving: list[int] = field(default_factory=list[int])

    def add(self, one: Simulated) -> None:
        """Append the counts of one request."""
        self.agreed.append(one.agreed)
        self.tokens.append(len(one.generation.output))
        self.calls.append(len(one.generation.rounds))

    @property
    def seconds(self) -> float:
        """Seconds of training and scoring, over all runs."""
        return sum(run.seconds for run in self.runs)


def promote_all(*scores: object, **rules: object) -> Verdict:
    """A gate that promotes every candidate."""
    return Verdict(True, "unguarded", 0, 0, 0.0, 0.0, 0.0)


class LocalDraftSwitch:
    """core.DraftSwitch without an engine: loads drafts as the engine does. costs: of rounds; None: not measured."""

    def __init__(self, pair: Pair, costs: Costs | None) -> None:
        assert pair.draft is not None
        self._fingerprint = pair.provenance.draft
        self._bare = self._draft = served(pair.draft)
        self._costs = costs

    @property
    def active(self) -> int:
        """Version of the active adapter, BARE_DRAFT for none."""
        return self._draft.adapter

    @property
    def model(self) -> nn.Module:
        """The active draft."""
        return self._draft.model

    def loaded(self, ref: AdapterRef | None) -> Draft:
        """The draft with an adapter, or the bare one. Raises AdapterRefused."""
        return self._bare if ref is None else load(self._bare.model, ref, self._fingerprint)

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """See core.DraftSwitch: loads the draft at once."""
        future: Future[Staged] = Future()
        try:
            future.set_result(self.loaded(ref))
        except Exception as error:  # noqa: BLE001  (passed on to the caller, as by the engine)
            future.set_exception(error)
        return future

    def switch(self, staged: Staged) -> Future[None]:
        """See core.DraftSwitch."""
        assert isinstance(staged, Draft)
        self._draft = staged
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        """See core.DraftSwitch."""
        return None if self._costs is None else round_seconds(self._costs, step)


def round_seconds(costs: Costs, step: float = 1.0) -> tuple[float, ...]:
    """Seconds of a round of one request that drafts 1 to DRAFT_LENGTH tokens. step: factor on the cost of draft steps."""
    scaled = costs.scaled(step)
    return tuple(scaled.round(Load(1, USUALLY_HELD), k) for k in range(1, DRAFT_LENGTH + 1))


def measured_costs(pair: Pair) -> Costs:
    """Costs of rounds of one request, measured on this machine with the bare draft."""
    assert pair.draft is not None
    return profile.measure(pair.target.model, served(pair.draft).model, rows=[1], most=DRAFT_LENGTH)


class _LocalChannel(Channel):
    """A channel without pipes: the messages of a job in a list."""

    def __init__(self) -> None:
        super().__init__(-1, io.StringIO())
        self.messages: list[Mapping[str, object]] = []

    def send(self, kind: str, message: Mapping[str, object] | None = None) -> None:
        """Append a message as it would come out of a pipe."""
        self.messages.append(json.loads(json.dumps({"type": kind, **(message or {})})))


class _LocalJob:
    """core.JobHandle of a job that is finished."""

    def __init__(self, messages: list[Mapping[str, object]]) -> None:
        self.pid = os.getpid()
        self._messages = messages

    def poll(self) -> list[Mapping[str, object]]:
        """The messages that have not been read. See core.JobHandle."""
        found, self._messages = self._messages, []
        return found

    def exit_code(self) -> int | None:
        """Always 0. See core.JobHandle."""
        return 0

    def pause(self, paused: bool) -> None:
        """Does nothing: the job is finished."""

    def stop(self, grace_seconds: float) -> None:
        """Does nothing: the job is finished."""


class LocalLauncher:
    """core.Launcher that does the job in this process before it returns: a child would import, load and compile anew."""

    def launch(self, spec: Mapping[str, object]) -> _LocalJob:
        """Do the job, and return its handle with all messages."""
        channel = _LocalChannel()
        job.perform(channel, json.dumps(dict(spec)))
        return _LocalJob(channel.messages)


class LocalLoop:
    """The lifecycle of one arm of an experiment.

    models: target and draft folders. general: the shipped replay set. folder: for its database and adapters. costs: of rounds,
    by which the gate weighs; None: by tokens alone. judge: decides about candidates; the server's gate by default.
    """

    def __init__(
        self,
        settings: Settings,
        pair: Pair,
        models: tuple[Path, Path],
        general: Path | None,
        folder: Path,
        *,
        costs: Costs | None = None,
        judge: Callable[..., Verdict] = gate.judge,
    ) -> None:
        self.pair = pair
        self.settings = _isolated(settings, folder)
        self.stores = open_stores(self.settings, create=True)
        self._members = Members(self.stores.database)
        # Runs take longer than a lease, and a process whose lease has ended leads no more.
        self._heartbeat = Clock(self._renew, RENEW_SECONDS)
        self._given_up = False
        self.drafts = LocalDraftSwitch(pair, costs)
        events = Metrics(DRAFT_LENGTH)
        common = lifecycle_rules(self.settings, Folders(*models, general), pair.provenance)
        spec = {**common.spec, "k": DRAFT_LENGTH, "cache": str(settings.home / TARGETS)}
        context = LifecycleContext(
            stores=self.stores,
            members=self._members,
            switching=Switching(self.drafts, self.stores.adapters, pair.provenance, events),
            launcher=LocalLauncher(),
            events=events,
            rules=replace(common, spec=spec),
            who=pair.provenance,
            machine=machine_kind(),
            judge=judge,
        )
        self.supervisor = Supervisor(
            context, practice=PracticeChoice(self.settings.training, folder), strain=lambda: None
        )
        try:
            self._members.join()
            self._heartbeat.start()
            self.supervisor.start()
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Stop the supervisor, leave and close the database."""
        try:
            self.supervisor.stop()
        finally:
            self._heartbeat.stop()
            with suppress(StoreError):
                self._members.leave()
            self.stores.close()

    def record(self, generations: Sequence[Generation]) -> None:
        """Add generations to the store as if they had just ended."""
        now = datetime.now(UTC)
        self.stores.generations.add([replace(g, created_at=now) for g in generations]).result()

    def tick_until_idle(self) -> None:
        """Tick until no child is under way: no run, no comparison of a watch. Raises StoreError when another process has taken
        over the database."""
        if self._given_up:
            raise StoreError("another process has taken over the database of this experiment")
        self.supervisor.tick()
        while self.supervisor.working:
            self.supervisor.tick()

    def train(self) -> TrainingRun:
        """Request a run and tick to its end. Raises Conflict or BadRequest when it cannot start."""
        run = self.supervisor.request_training(None)
        while not self.stores.runs.get(run.id).state.over:
            self.supervisor.tick()
        return self.stores.runs.get(run.id)

    def serve(
        self,
        requests: Sequence[Generation],
        history: History,
        *,
        watched: bool = True,
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        """Take these answers as one part of the traffic, in order, and add what happened to `history`.

        After each request the supervisor ticks until it is idle. watched: False ends every watch, as an operator can. on_run:
        called when a run has ended, while the files of its adapter are there.
        """
        at = 0
        while at < len(requests):
            active = self.drafts.active
            for one in self._drafted(requests[at : at + BLOCK]):
                history.add(one)
                at += 1
                self.record([one.generation])
                self.tick_until_idle()
                runs = len(history.runs)
                self._add_runs(history)
                if len(history.runs) > runs:
                    on_run()
                if self.drafts.active != active:
                    if not watched:
                        self.supervisor.activate(self.drafts.active)
                    # Another version drafts the rest of the block.
                    break
        history.serving.append(self.drafts.active)

    def model(self, adapter: int) -> nn.Module:
        """The draft as it would serve with an adapter. Raises NotFound, AdapterRefused."""
        return self.drafts.loaded(None if adapter == BARE_DRAFT else self.stores.adapters.get(adapter)).model

    def _renew(self) -> None:
        self._given_up = self._given_up or not self._members.renew()

    def _drafted(self, block: Sequence[Generation]) -> list[Simulated]:
        vocabulary = self.pair.vocabulary
        return simulate_rounds(
            self.drafts.model, block, k=DRAFT_LENGTH, adapter=self.drafts.active, vocabulary=vocabulary
        )

    def _add_runs(self, history: History) -> None:
        new = self.stores.runs.latest(len(history.runs) + 2)
        for run in reversed(new[: len(new) - len(history.runs)]):
            assert run.finished_at is not None
            reason = run.verdict.reason if run.verdict is not None else run.error or ""
            history.runs.append(
                RunRecord(
                    at=len(history.tokens),
                    promoted=run.state is RunState.PROMOTED,
                    reason=reason,
                    seconds=(run.finished_at - run.created_at).total_seconds(),
                    generations=run.generations,
                )
            )


def _isolated(settings: Settings, folder: Path) -> Settings:
    """These settings on a database and adapter folders of their own, for a loop in which nobody is served during a run."""
    training = {"cooldown_seconds": 0.0, "niceness": 0, "gpu_share": 1.0, "enabled": True, "run_here": True}
    training |= {"minutes_per_day": 1440.0}
    # Nobody asks anything here: it would practise for as long as a day allows.
    training |= {"practice": False}
    return settings.model_copy(
        update={
            "home": folder,
            "store": settings.store.model_copy(update={"url": None, "adapters": None}),
            "training": settings.training.model_copy(update=training),
            "gate": settings.gate.model_copy(update={"backoff_seconds": 0.0}),
        }
    )
