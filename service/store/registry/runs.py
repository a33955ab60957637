"""Training runs: claimed once, moved only along RUN_MOVES, and only by the process that holds the row's fencing token and is
still a member."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, and_, func, insert, or_, select, update

from service.core import (
    RUN_MOVES,
    AdapterState,
    IllegalMove,
    NotFound,
    ParentChanged,
    Progress,
    Provenance,
    RunState,
    TrainingRun,
    Trigger,
    Verdict,
)
from service.store.database import Database
from service.store.log.generations import log_end
from service.store.log.run_texts import PAGE, Role, insert_run_texts, quarantine
from service.store.log.training_texts import untrained_among, untrained_generations
from service.store.processes.fencing import held_run
from service.store.registry.adapters import active_id, judge_candidate, retire_active
from service.store.registry.crash_search import Search
from service.store.registry.run_history import crash_search, of_pair, sizes
from service.store.registry.verdicts import from_json, to_json
from service.store.tables import failure_cases, generations, members, run_texts, training_runs
from service.store.times import time_of, utc

CURVE_POINTS = 2000
OWN_TEXTS = "own_texts_only"
"""In a run's configuration: whether it learns from the texts that it was claimed for and from no others."""


class Runs:
    """The training runs of a database: claim, progress and end. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def claim(
        self,
        *,
        trigger: Trigger,
        who: Provenance,
        parent: int,
        limit: int,
        owner: str | None = None,
        idempotency_key: str | None = None,
        config: Mapping[str, object] | None = None,
        seeds: Sequence[str] | None = None,
    ) -> TrainingRun | None:
        """Open a run on the newest `limit` untrained generations of this draft, with failure cases or undrafted. While a crash
        is unexplained, on those among them that `crash_search` wants to try, and on no others. Its `cases` counts near-ties
        too. owner: the token of the process that does it; None: it waits for one that takes it.
        seeds: of practice, ids of the generations that it begins like, in place of new ones.

        None when a run of this pair is not over yet or nothing is left to train on. A known idempotency key returns its run.
        """

        def work(connection: Connection) -> TrainingRun | None:
            if idempotency_key is not None:
                query = select(training_runs).where(training_runs.c.idempotency_key == idempotency_key)
                if (row := connection.execute(query).one_or_none()) is not None:
                    return _run(row)
            if _open(connection, who) is not None:
                return None
            settings = dict(config or {})
            if seeds is None:
                crashes = crash_search(connection, who)
                claimed = _to_learn(connection, who, crashes, limit)
                settings |= {OWN_TEXTS: True} if crashes.open else {}
            else:
                claimed = {Role.SEED: _seqs(connection, seeds)}
            if not any(claimed.values()):
                return None
            made = connection.execute(
                insert(training_runs).values(
                    state=RunState.CLAIMED.value,
                    trigger=trigger.value,
                    fencing=_next_fencing(connection),
                    owner=owner,
                    log_end=log_end(connection),
                    idempotency_key=idempotency_key,
                    target=who.target,
                    tokenizer=who.tokenizer,
                    draft=who.draft,
                    parent=parent,
                    cases=0,
                    generations=sum(map(len, claimed.values())),
                    config=json.dumps(settings),
                    progress=json.dumps(asdict(Progress())),
                    loss_curve="[]",
                    created_at=time_of(connection),
                )
            ).inserted_primary_key
            assert made is not None
            for role, seqs in claimed.items():
                insert_run_texts(connection, made[0], role, seqs)
            new = select(run_texts.c.seq).where(run_texts.c.run == made[0], run_texts.c.role == Role.NEW)
            cases = select(func.count()).select_from(failure_cases).where(failure_cases.c.seq.in_(new))
            this = update(training_runs).where(training_runs.c.id == made[0])
            connection.execute(this.values(cases=cases.scalar_subquery()))
            return _get(connection, made[0])

        return self._db.write(work).result()

    def take(self, run_id: int, owner: str) -> TrainingRun | None:
        """Become the owner of a claimed run that waits for one, under a new fencing token. None when another was faster."""

        def work(connection: Connection) -> TrainingRun | None:
            this = update(training_runs).where(training_runs.c.id == run_id, _WAITING)
            taken = connection.execute(this.values(owner=owner, fencing=_next_fencing(connection))).rowcount
            return _get(connection, run_id) if taken else None

        return self._db.write(work).result()

    def give_up(self, run: TrainingRun, reason: str) -> TrainingRun | None:
        """The run becomes LOST, because its process was given up. None when it is over, or another's by now."""

        def work(connection: Connection) -> TrainingRun | None:
            same = (training_runs.c.id == run.id, training_runs.c.fencing == run.fencing)
            row = connection.execute(select(training_runs).where(*same, _UNFINISHED, _ORPHANED)).one_or_none()
            if row is None:
                return None
            _end(connection, row, RunState.LOST, reason)
            return _get(connection, run.id)

        return self._db.write(work).result()

    def move(self, run_id: int, fencing: int, state: RunState, *, error: str | None = None) -> TrainingRun:
        """Move a run on, or end it without a verdict, which gives its texts back. error: why it ended; with CRASHED the row
        also says how the search for the cause goes on, and a text that is found to be it is quarantined, out of the replay
        buffer too. Raises IllegalMove, also for PROMOTED and REJECTED: a verdict is given by `promote` or `reject`."""

        def work(connection: Connection) -> TrainingRun:
            if state in {RunState.PROMOTED, RunState.REJECTED}:
                raise IllegalMove(f"run {run_id} cannot be {state.value} without its verdict")
            row = held_run(connection, run_id, fencing)
            if state.over:
                _end(connection, row, state, error)
            else:
                _move(connection, row, state)
            return _get(connection, run_id)

        return self._db.write(work).result()

    def progress(self, run_id: int, fencing: int, progress: Progress) -> None:
        """Record where the run is; with a loss it becomes a point of the loss curve. Raises IllegalMove with a stale token."""

        def work(connection: Connection) -> None:
            row = held_run(connection, run_id, fencing)
            curve = json.loads(row.loss_curve)
            if progress.loss is not None and len(curve) < CURVE_POINTS:
                curve.append([progress.step, progress.loss])
            connection.execute(
                update(training_runs)
                .where(training_runs.c.id == run_id)
                .values(progress=json.dumps(asdict(progress)), loss_curve=json.dumps(curve))
            )

        self._db.write(work).result()

    def pause(self, run_id: int, fencing: int, reason: str | None) -> TrainingRun:
        """Record why the run is paused; None: it is not. Raises IllegalMove with a stale token."""

        def work(connection: Connection) -> TrainingRun:
            progress = json.loads(held_run(connection, run_id, fencing).progress) | {"paused": reason}
            connection.execute(
                update(training_runs).where(training_runs.c.id == run_id).values(progress=json.dumps(progress))
            )
            return _get(connection, run_id)

        return self._db.write(work).result()

    def record_texts(self, run_id: int, fencing: int, role: Role, names: Sequence[str]) -> None:
        """Record what else a run learns from, by generation id. Names that are not in the log (the general set's) are
        passed over; what the run was claimed for stays NEW. Raises IllegalMove with a stale token."""

        def work(connection: Connection) -> None:
            held_run(connection, run_id, fencing)
            insert_run_texts(connection, run_id, role, _seqs(connection, names))

        self._db.write(work).result()

    def reject(self, run_id: int, fencing: int, adapter_id: int | None, verdict: Verdict) -> TrainingRun:
        """The candidate is refused by the gate, or cannot be loaded: run and adapter become REJECTED, in one transaction."""

        def work(connection: Connection) -> TrainingRun:
            row = held_run(connection, run_id, fencing)
            _move(connection, row, RunState.REJECTED, adapter=adapter_id, verdict=to_json(verdict))
            if adapter_id is not None:
                judge_candidate(connection, run_id, adapter_id, AdapterState.REJECTED, verdict)
            return _get(connection, run_id)

        return self._db.write(work).result()

    def promote(self, run_id: int, fencing: int, adapter_id: int, verdict: Verdict) -> TrainingRun:
        """The candidate is better: run PROMOTED, adapter ACTIVE, the former one RETIRED, in one transaction. Raises
        ParentChanged, with nothing changed, when what it was compared with is not active any more."""

        def work(connection: Connection) -> TrainingRun:
            row = held_run(connection, run_id, fencing)
            _move(connection, row, RunState.PROMOTED, adapter=adapter_id, verdict=to_json(verdict))
            if active_id(connection, row.target, row.draft) != row.parent:
                raise ParentChanged(f"adapter {row.parent}, which it was compared with, no longer serves")
            retire_active(connection, row.target, row.draft)
            judge_candidate(connection, run_id, adapter_id, AdapterState.ACTIVE, verdict)
            return _get(connection, run_id)

        return self._db.write(work).result()

    def get(self, run_id: int) -> TrainingRun:
        """The run with this id. Raises NotFound."""
        with self._db.read() as connection:
            return _get(connection, run_id)

    def texts(self, run_id: int) -> int:
        """How many texts of the log a run learnt from; erased ones are not counted."""
        query = select(func.count()).select_from(run_texts).where(run_texts.c.run == run_id)
        with self._db.read() as connection:
            return connection.execute(query).scalar_one()

    def by_key(self, key: str) -> TrainingRun | None:
        """The run that was asked for with this idempotency key; None: there is none."""
        with self._db.read() as connection:
            row = connection.execute(select(training_runs).where(training_runs.c.idempotency_key == key)).one_or_none()
        return None if row is None else _run(row)

    def current(self, who: Provenance) -> TrainingRun | None:
        """The run of this pair that is not over."""
        with self._db.read() as connection:
            row = _open(connection, who)
        return None if row is None else _run(row)

    def unfinished(self) -> list[TrainingRun]:
        """The runs of any pair that are not over, newest first."""
        query = select(training_runs).where(_UNFINISHED).order_by(training_runs.c.id.desc())
        with self._db.read() as connection:
            return [_run(row) for row in connection.execute(query)]

    def orphaned(self) -> list[TrainingRun]:
        """Those of them whose process was given up."""
        query = select(training_runs).where(_UNFINISHED, _ORPHANED)
        with self._db.read() as connection:
            return [_run(row) for row in connection.execute(query)]

    def newest(self, who: Provenance, limit: int = 1) -> list[TrainingRun]:
        """The newest `limit` runs of this pair, over or not, newest first."""
        query = select(training_runs).where(*of_pair(who)).order_by(training_runs.c.id.desc()).limit(limit)
        with self._db.read() as connection:
            return [_run(row) for row in connection.execute(query)]

    def sizes(self, who: Provenance) -> list[tuple[RunState, int]]:
        """How the pair's newest runs on logged texts ended, and how many texts each had, replayed ones not counted; oldest
        first."""
        with self._db.read() as connection:
            return sizes(connection, who)

    def crash_search(self, who: Provenance) -> Search:
        """The search for a text that crashes the runs of this pair."""
        with self._db.read() as connection:
            return crash_search(connection, who)

    def latest(self, limit: int, before: int | None = None) -> list[TrainingRun]:
        """The newest `limit` runs of any pair, newest first. before: of those with smaller ids."""
        query = select(training_runs).order_by(training_runs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(training_runs.c.id < before)
        with self._db.read() as connection:
            return [_run(row) for row in connection.execute(query)]

    def recipe(self, run_id: int) -> tuple[Provenance, dict[str, Any]]:
        """The pair that a run trains for, and the settings (`training.*`) that it was claimed with. Raises NotFound."""
        columns = (training_runs.c.target, training_runs.c.tokenizer, training_runs.c.draft, training_runs.c.config)
        with self._db.read() as connection:
            row = connection.execute(select(*columns).where(training_runs.c.id == run_id)).one_or_none()
        if row is None:
            raise NotFound(f"no training run {run_id}")
        return Provenance(row.target, row.tokenizer, row.draft), json.loads(row.config)

    def loss_curve(self, run_id: int) -> list[tuple[int, float]]:
        """(step, nats per response position)."""
        with self._db.read() as connection:
            curve = connection.execute(
                select(training_runs.c.loss_curve).where(training_runs.c.id == run_id)
            ).scalar_one_or_none()
        if curve is None:
            raise NotFound(f"no training run {run_id}")
        return [(int(step), float(loss)) for step, loss in json.loads(curve)]


_of_a_member = select(members.c.id).where(members.c.token == training_runs.c.owner).exists()
_UNFINISHED = training_runs.c.state.not_in([state.value for state in RunState if state.over])
_WAITING = and_(training_runs.c.state == RunState.CLAIMED.value, training_runs.c.owner.is_(None))
_ORPHANED = and_(~_WAITING, or_(training_runs.c.owner.is_(None), ~_of_a_member))


def _open(connection: Connection, who: Provenance) -> Row[Any] | None:
    return connection.execute(select(training_runs).where(_UNFINISHED, *of_pair(who))).one_or_none()


def _to_learn(connection: Connection, who: Provenance, crashes: Search, limit: int) -> dict[Role, list[int]]:
    """Numbers of the texts that the next run is claimed for. Suspected texts that were trained on before are in its window."""
    if not crashes.probe:
        others = list(connection.execute(untrained_generations(who, limit, crashes.avoid)).scalars())
        return {Role.NEW: others or list(connection.execute(untrained_generations(who, limit)).scalars())}
    probe = sorted(crashes.probe, reverse=True)[:limit]
    new = untrained_among(connection, who, probe)
    return {Role.NEW: [seq for seq in probe if seq in new], Role.WINDOW: [seq for seq in probe if seq not in new]}


def _seqs(connection: Connection, names: Sequence[str]) -> list[int]:
    """Of these generation ids, those that are in the log."""
    pages = [names[start : start + PAGE] for start in range(0, len(names), PAGE)]
    found = (
        connection.execute(select(generations.c.seq).where(generations.c.id.in_(page))).scalars() for page in pages
    )
    return [seq for page in found for seq in page]


def _move(connection: Connection, row: Row[Any], state: RunState, **values: object) -> None:
    if state not in RUN_MOVES[RunState(row.state)]:
        raise IllegalMove(f"run {row.id} cannot go from {row.state} to {state.value}")
    finished = {"finished_at": time_of(connection)} if state.over else {}
    connection.execute(
        update(training_runs).where(training_runs.c.id == row.id).values(state=state.value, **finished, **values)
    )


def _end(connection: Connection, row: Row[Any], state: RunState, error: str | None) -> None:
    _move(connection, row, state, error=error)
    if state is not RunState.CRASHED:
        return
    found = crash_search(connection, Provenance(row.target, row.tokenizer, row.draft))
    if found.culprit is not None:
        quarantine(connection, row.id, generations.c.seq == found.culprit)
    reasons = [reason for reason in (error, _explain(found)) if reason]
    connection.execute(update(training_runs).where(training_runs.c.id == row.id).values(error="; ".join(reasons)))


def _explain(found: Search) -> str | None:
    """What a crash and those before it say about their cause; None: nothing."""
    if found.culprit is not None:
        return "a text is quarantined: runs crash on it, and not on others"
    if found.any_texts:
        return "runs crash whatever texts they learn from, so that none is to blame"
    if found.probe:
        return (
            f"the next run learns from {len(found.probe)} of {found.suspects} suspected texts alone, to find the cause"
        )
    return "the next run learns from other texts alone, to find the cause" if found.avoid else None


def _next_fencing(connection: Connection) -> int:
    return (connection.execute(select(func.max(training_runs.c.fencing))).scalar() or 0) + 1


def _get(connection: Connection, run_id: int) -> TrainingRun:
    row = connection.execute(select(training_runs).where(training_runs.c.id == run_id)).one_or_none()
    if row is None:
        raise NotFound(f"no training run {run_id}")
    return _run(row)


def _run(row: Row[Any]) -> TrainingRun:
    return TrainingRun(
        id=row.id,
        state=RunState(row.state),
        trigger=Trigger(row.trigger),
        fencing=row.fencing,
        parent=row.parent,
        cases=row.cases,
        generations=row.generations,
        progress=Progress(**json.loads(row.progress)),
        adapter=row.adapter,
        verdict=None if row.verdict is None else from_json(row.verdict),
        error=row.error,
        created_at=utc(row.created_at),
        finished_at=None if row.finished_at is None else utc(row.finished_at),
        owner=row.owner,
    )
