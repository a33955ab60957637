"""The server's own loop without a server: supervisor, store, gate, watch and training job over answers that are there.

Decoding is lossless, so what a request would have been answered with does not depend on the draft. What a draft would have been
worth there, and the cases it would have left, one teacher-forced pass tells (learning/rounds.py). No time passes between
requests: there is no cool-down and no back-off, and a run takes no request's time.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import mlx.nn as nn

from service.app import TARGETS, Folders, lifecycle_rules, open_stores
from service.core import BARE_DRAFT, AdapterRef, Generation, RunState, Staged, TrainingRun, Verdict
from service.engine import profile
from service.engine.adapters import Draft, load, served
from service.engine.costs import USUALLY_HELD, Costs, Load
from service.evaluation.target_outputs import greedy_generations
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import DRAFTED, Step
from service.learning import job
from service.learning.channel import Channel
from service.learning.rounds import Drafted, logged
from service.lifecycle import gate
from service.lifecycle.supervisor import Supervisor
from service.lifecycle.switching import Switching
from service.metrics.registry import Metrics
from service.models.machine import machine_kind
from service.models.pair import Pair
from service.settings import Settings
from service.store.members import Members

BLOCK = 32
"""Requests that are drafted together; those behind a switch are drafted anew."""


@dataclass(frozen=True, slots=True)
class Run:
    """at: requests answered when it started. seconds: of training and scoring."""

    at: int
    promoted: bool
    reason: str
    seconds: float
    generations: int


@dataclass(slots=True)
class Course:
    """What happened to an arm. agreed, tokens, calls: by request, in order, at DRAFTED tokens a round. serving: the adapter
    after each part of the traffic."""

    agreed: list[int] = field(default_factory=list[int])
    tokens: list[int] = field(default_factory=list[int])
    calls: list[int] = field(default_factory=list[int])
    runs: list[Run] = field(default_factory=list[Run])
    serving: list[int] = field(default_factory=list[int])

    def add(self, one: Drafted) -> None:
        """Append one request's counts of agreed tokens, output tokens and target calls."""
        self.agreed.append(one.agreed)
        self.tokens.append(len(one.generation.output))
        self.calls.append(len(one.generation.rounds))

    @property
    def seconds(self) -> float:
        """Seconds of training and scoring, over all runs."""
        return sum(run.seconds for run in self.runs)


def promote_all(*scores: object, **rules: object) -> Verdict:
    """A gate that asks nobody."""
    return Verdict(True, "unguarded", 0, 0, 0.0, 0.0, 0.0)


class Drafts:
    """core.DraftSwitch without an engine: loads drafts as it does. costs: what rounds cost; None: not measured."""

    def __init__(self, pair: Pair, costs: Costs | None) -> None:
        assert pair.draft is not None
        self._fingerprint = pair.provenance.draft
        self._bare = self._draft = served(pair.draft)
        self._costs = costs

    @property
    def active(self) -> int:
        """The adapter that drafts."""
        return self._draft.adapter

    @property
    def model(self) -> nn.Module:
        """The draft that serves."""
        return self._draft.model

    def loaded(self, ref: AdapterRef | None) -> Draft:
        """The draft with an adapter, or the bare one. Raises AdapterRefused."""
        return self._bare if ref is None else load(self._bare.model, ref, self._fingerprint)

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """See core.DraftSwitch."""
        future: Future[Staged] = Future()
        try:
            future.set_result(self.loaded(ref))
        except Exception as error:  # noqa: BLE001  (who waits gets it, as from the engine)
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
    """Seconds of a round of one request that drafts 1 to DRAFTED tokens, as the engine says them."""
    scaled = costs.scaled(step)
    return tuple(scaled.round(Load(1, USUALLY_HELD), k) for k in range(1, DRAFTED + 1))


def measured_costs(pair: Pair) -> Costs:
    """What rounds of one request cost on this machine."""
    assert pair.draft is not None
    return profile.measure(pair.target.model, served(pair.draft).model, rows=[1], most=DRAFTED)


class _LocalChannel(Channel):
    """A channel without streams: one job in, its messages in a list."""

    def __init__(self, spec: Mapping[str, object]) -> None:
        super().__init__(-1, io.StringIO())
        self._job = json.dumps(dict(spec))
        self.messages: list[Mapping[str, object]] = []

    def first_line(self) -> str:
        """The job."""
        return self._job

    def send(self, kind: str, message: Mapping[str, object] | None = None) -> None:
        """Keep a message as it would come out of a pipe."""
        self.messages.append(json.loads(json.dumps({"type": kind, **(message or {})})))


class _LocalJob:
    """core.JobHandle of a job that has been done."""

    def __init__(self, messages: list[Mapping[str, object]]) -> None:
        self.pid = os.getpid()
        self._messages = messages

    def poll(self) -> list[Mapping[str, object]]:
        """See core.JobHandle."""
        found, self._messages = self._messages, []
        return found

    def exit_code(self) -> int | None:
        """See core.JobHandle."""
        return 0

    def pause(self, paused: bool) -> None:
        """Nothing is left to pause."""

    def stop(self, grace_seconds: float) -> None:
        """Nothing is left to stop."""


class LocalLauncher:
    """core.Launcher that does the job in this process before it returns: each child would import, load and compile anew."""

    def launch(self, spec: Mapping[str, object]) -> _LocalJob:
        """Do the job."""
        channel = _LocalChannel(spec)
        job.perform(channel)
        return _LocalJob(channel.messages)


class Loop:
    """The loop of one arm, in a folder of its own, which keeps its database and adapters. general: the shipped
    replay set. judge: decides about candidates, as the gate does unless said."""

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
        # Nobody is served meanwhile.
        alone = {"cooldown_seconds": 0.0, "niceness": 0, "gpu_share": 1.0}
        training = settings.training.model_copy(update=alone)
        rules = settings.gate.model_copy(update={"backoff_seconds": 0.0})
        self.settings = settings.model_copy(update={"home": folder, "training": training, "gate": rules})
        self.stores = open_stores(self.settings, create=True)
        self._members = Members(self.stores.database)
        self._members.join()
        self.drafts = Drafts(pair, costs)
        events = Metrics(DRAFTED)
        common = lifecycle_rules(self.settings, Folders(*models, general), pair.provenance)
        spec = {**common.spec, "k": DRAFTED, "cache": str(settings.home / TARGETS)}
        self.supervisor = Supervisor(
            members=self._members,
            runs=self.stores.runs,
            adapters=self.stores.adapters,
            lineage=self.stores.lineage,
            generations=self.stores.generations,
            replay=self.stores.replay,
            costs=self.stores.costs,
            erasures=self.stores.erasures,
            switching=Switching(self.drafts, self.stores.adapters, pair.provenance.draft, events),
            launcher=LocalLauncher(),
            events=events,
            rules=replace(common, spec=spec),
            who=pair.provenance,
            strain=lambda: None,
            judge=judge,
            machine=machine_kind(),
        )
        self.supervisor.start()

    def close(self) -> None:
        """End a child under way and close the database."""
        self.supervisor.stop()
        self.stores.close()

    def log(self, generations: Sequence[Generation]) -> None:
        """Record generations as if they had just ended."""
        now = datetime.now(UTC)
        self.stores.generations.add([replace(g, created_at=now) for g in generations]).result()

    def settle(self) -> None:
        """Let the loop do what is due, until nothing is."""
        self.supervisor.tick()
        while self.supervisor.working:
            self.supervisor.tick()

    def train(self) -> TrainingRun:
        """A run that somebody asked for, from its claim to its verdict. Raises Conflict, BadRequest."""
        run = self.supervisor.request_training(None)
        while not self.stores.runs.get(run.id).state.over:
            self.supervisor.tick()
        return self.stores.runs.get(run.id)

    def take(self, requests: Sequence[Generation], course: Course, *, watched: bool = True) -> None:
        """Answer requests in order. Between any two the loop does what is due. watched: False: an operator ends every watch."""
        at = 0
        while at < len(requests):
            active = self.drafts.active
            for one in self._drafted(requests[at : at + BLOCK]):
                course.add(one)
                at += 1
                self.log([one.generation])
                self.settle()
                self._note_runs(course)
                if self.drafts.active != active:
                    if not watched:
                        self.supervisor.activate(self.drafts.active)
                    # Those behind it in the block are drafted by another version.
                    break
        course.serving.append(self.drafts.active)

    def model(self, adapter: int) -> nn.Module:
        """A draft as it would serve with one of the adapters. Raises NotFound, AdapterRefused."""
        return self.drafts.loaded(None if adapter == BARE_DRAFT else self.stores.adapters.get(adapter)).model

    def _drafted(self, block: Sequence[Generation]) -> list[Drafted]:
        vocabulary = self.pair.vocabulary
        return logged(self.drafts.model, block, k=DRAFTED, adapter=self.drafts.active, vocabulary=vocabulary)

    def _note_runs(self, course: Course) -> None:
        new = self.stores.runs.latest(len(course.runs) + 2)
        for run in reversed(new[: len(new) - len(course.runs)]):
            assert run.finished_at is not None
            promoted = run.state is RunState.PROMOTED
            reason = run.verdict.reason if run.verdict is not None else run.error or ""
            seconds = (run.finished_at - run.created_at).total_seconds()
            course.runs.append(Run(len(course.tokens), promoted, reason, seconds, run.generations))


def answered(
    settings: Settings, pair: Pair, stage: str, lines: Sequence[PromptLine], max_tokens: int, rows: int, on_step: Step
) -> list[Generation]:
    """The target's greedy answers that are not empty."""
    home = settings.home
    found = greedy_generations(
        pair, lines, home, max_tokens=max_tokens, rows=rows, on_step=lambda done, of: on_step(stage, done, of)
    )
    return [generation for generation in found if generation.output]
