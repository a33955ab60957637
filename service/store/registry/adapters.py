"""Adapter versions: which there are, which serves, and what was found out about them."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, exists, func, insert, or_, select, update

from service.core import (
    ADAPTER_MOVES,
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    IllegalMove,
    NotFound,
    StoreError,
    Verdict,
)
from service.store.artifacts import publish
from service.store.database import Database
from service.store.log.generations import log_end
from service.store.log.run_texts import Role, quarantine, texts_of
from service.store.processes.fencing import held_run
from service.store.registry.verdicts import from_json, to_json
from service.store.tables import adapters, evaluations, generations, run_texts, training_runs
from service.store.times import time_of, utc

log = logging.getLogger(__name__)


class EvaluationKind(StrEnum):
    """Whose verdict on an adapter it is. GATE: the one that promoted or rejected it. INTERIM: a check of the watch that decided
    nothing. WATCH: the watch is over."""

    GATE = "gate"
    INTERIM = "interim"
    WATCH = "watch"


class Adapters:
    """The adapter versions of a database and their verdicts. root: where their folders are; rows hold names below it. Writes
    wait until they are committed."""

    def __init__(self, database: Database, root: Path) -> None:
        self._db = database
        self.root = root

    def add(
        self,
        *,
        run_id: int,
        fencing: int,
        folder: Path,
        sha256: str,
        rank: int,
        scale: float,
        keys: Sequence[str],
        draft: str,
        parent: int,
    ) -> AdapterRef:
        """Register a run's candidate. Raises NotFound, IllegalMove as `held_run`, also for a run of another draft; StoreError
        when the folder is not right below the root."""
        if folder.parent != self.root:
            raise StoreError(f"adapter folder {folder} is not in {self.root}")

        def work(connection: Connection) -> AdapterRef:
            run = held_run(connection, run_id, fencing)
            if run.draft != draft:
                raise IllegalMove(f"run {run_id} is for another draft")
            before = select(adapters.c.erased_texts).where(adapters.c.id == parent)
            made = connection.execute(
                insert(adapters).values(
                    folder=folder.name,
                    sha256=sha256,
                    rank=rank,
                    scale=scale,
                    keys=json.dumps(list(keys)),
                    draft=draft,
                    parent=parent,
                    run=run_id,
                    state=AdapterState.CANDIDATE.value,
                    created_at=time_of(connection),
                    erased_texts=connection.execute(before).scalar(),
                    target=run.target,
                )
            ).inserted_primary_key
            assert made is not None
            connection.execute(update(training_runs).where(training_runs.c.id == run_id).values(adapter=made[0]))
            return self._ref(_row(connection, made[0]))

        return self._db.write(work).result()

    def get(self, adapter_id: int) -> AdapterRef:
        """The adapter with this id. Raises NotFound."""
        with self._db.read() as connection:
            return self._ref(_row(connection, adapter_id))

    def all(self) -> list[AdapterRef]:
        """Newest first."""
        with self._db.read() as connection:
            return [self._ref(row) for row in connection.execute(_known().order_by(adapters.c.id.desc()))]

    def active(self, target: str, draft: str) -> AdapterRef | None:
        """The adapter that serves this pair; None when its draft serves bare."""
        with self._db.read() as connection:
            row = _active(connection, target, draft)
        return None if row is None else self._ref(row)

    def serves_since(self, target: str, draft: str) -> int:
        """The newest generation (seq) when what serves this pair, an adapter or none, began to. 0: that is not known."""
        ended = adapters.c.state.not_in([AdapterState.CANDIDATE.value, AdapterState.REJECTED.value])
        with self._db.read() as connection:
            row = _active(connection, target, draft)
            if row is not None:
                return row.log_end or 0
            query = select(func.max(adapters.c.log_end)).where(*trained_for(target, draft), ended)
            return connection.execute(query).scalar() or 0

    def adopt(self) -> None:
        """Rows of older releases hold absolute paths: from now on they hold names below the root, where folders that lie
        elsewhere are copied to first. Those that are not there any more stay as they are."""
        with self._db.read() as connection:
            query = select(adapters.c.id, adapters.c.folder).where(adapters.c.folder.like("%/%"))
            rows = connection.execute(query).all()
        for row in rows:
            old, new = Path(row.folder), self.root / Path(row.folder).name
            if old.parent.resolve() != self.root.resolve():
                if not old.is_dir():
                    log.warning("adapter %d: %s is not there", row.id, old)
                    continue
                scratch = new.with_name(f".{new.name}.part")
                shutil.rmtree(scratch, ignore_errors=True)
                shutil.copytree(old, scratch)
                publish(scratch, new)
            named = update(adapters).where(adapters.c.id == row.id).values(folder=new.name)
            self._db.write(lambda connection, named=named: connection.execute(named)).result()

    def activate(self, adapter_id: int, target: str, draft: str) -> AdapterRef | None:
        """Make this adapter (0: none) the active one of its pair, as an operator asks. Raises NotFound, IllegalMove."""

        def work(connection: Connection) -> AdapterRef | None:
            if adapter_id == BARE_DRAFT:
                retire_active(connection, target, draft)
                return None
            row = _row(connection, adapter_id)
            if row.draft != draft:
                raise IllegalMove(f"adapter {adapter_id} belongs to another draft")
            if row.target != target:
                raise IllegalMove(f"adapter {adapter_id} was trained and proven with another target")
            if AdapterState(row.state) is not AdapterState.ACTIVE:
                retire_active(connection, target, draft)
                move_adapter(connection, adapter_id, AdapterState.ACTIVE)
            return self._ref(_row(connection, adapter_id))

        return self._db.write(work).result()

    def roll_back(self, adapter_id: int, to: int, verdict: Verdict, *, checks: int | None = None) -> AdapterRef | None:
        """Roll back the active adapter, for the watch or an operator, in one transaction: `to` (0: the bare draft), or its
        nearest ancestor that may serve, becomes active; the verdict is stored as the watch's, and the texts it learnt from are
        quarantined, out of the replay buffer too: those that were new to it, and of the others those that no good adapter
        (ACTIVE or RETIRED) has learnt. checks: as `record_evaluation` has it. Raises NotFound, IllegalMove."""

        def work(connection: Connection) -> AdapterRef | None:
            if checks is not None and _checked(connection, adapter_id) != checks:
                raise IllegalMove(f"adapter {adapter_id} has been checked by another process meanwhile")
            move_adapter(connection, adapter_id, AdapterState.ROLLED_BACK)
            back = reinstate(connection, to, _row(connection, adapter_id).target)
            record_evaluation(connection, adapter_id, EvaluationKind.WATCH, verdict)
            if (run := _row(connection, adapter_id).run) is not None:
                free = generations.c.quarantined_run.is_(None)
                quarantine(
                    connection, run, free, texts_of(run), or_(texts_of(run, Role.NEW), ~_learnt_by_usable_adapter())
                )
            return self._ref(_row(connection, back)) if back != BARE_DRAFT else None

        return self._db.write(work).result()

    def mark_broken(self, adapter_id: int, reason: str, *, candidate: bool = False) -> None:
        """Record that an adapter cannot be loaded, and why; its nearest ancestor that may serve takes the place of an active
        one. candidate: only while it is one."""

        def work(connection: Connection) -> None:
            row = _row(connection, adapter_id)
            if candidate and AdapterState(row.state) is not AdapterState.CANDIDATE:
                return
            move_adapter(connection, adapter_id, AdapterState.BROKEN)
            connection.execute(update(adapters).where(adapters.c.id == adapter_id).values(note=reason))
            if AdapterState(row.state) is AdapterState.ACTIVE:
                reinstate(connection, row.parent, row.target)

        self._db.write(work).result()

    def remove(self, adapter_id: int) -> AdapterRef:
        """Record that an adapter that might have served again serves no more, because its files are about to be deleted. Raises
        NotFound, IllegalMove."""

        def work(connection: Connection) -> AdapterRef:
            move_adapter(connection, adapter_id, AdapterState.REMOVED)
            return self._ref(_row(connection, adapter_id))

        return self._db.write(work).result()

    def record_evaluation(
        self, adapter_id: int, kind: EvaluationKind, verdict: Verdict, *, checks: int | None = None
    ) -> bool:
        """Store a verdict on an adapter. checks: how many interim checks came before it; False, and nothing stored, where there
        have been others meanwhile or the watch is over."""

        def work(connection: Connection) -> bool:
            if checks is not None and _checked(connection, adapter_id) != checks:
                return False
            record_evaluation(connection, adapter_id, kind, verdict)
            return True

        return self._db.write(work).result()

    def evaluations(self, adapter_id: int, kind: EvaluationKind) -> list[tuple[datetime, Verdict]]:
        """Verdicts of one kind, oldest first."""
        query = select(evaluations).where(evaluations.c.adapter == adapter_id, evaluations.c.kind == kind.value)
        with self._db.read() as connection:
            return [
                (utc(row.created_at), from_json(row.verdict))
                for row in connection.execute(query.order_by(evaluations.c.id))
            ]

    def gates(self, target: str, draft: str) -> list[Verdict]:
        """Verdicts of the gate on candidates of one pair, oldest first. `promoted` is False for an adapter that was rolled back
        since: it was no discovery."""
        query = (
            select(evaluations.c.verdict, adapters.c.state)
            .join_from(evaluations, adapters, adapters.c.id == evaluations.c.adapter)
            .where(*trained_for(target, draft), evaluations.c.kind == EvaluationKind.GATE.value)
            .order_by(evaluations.c.id)
        )
        with self._db.read() as connection:
            found = [(from_json(row.verdict), AdapterState(row.state)) for row in connection.execute(query)]
        return [
            replace(verdict, promoted=verdict.promoted and state is not AdapterState.ROLLED_BACK)
            for verdict, state in found
        ]

    def watched(self, target: str, draft: str, limit: int) -> list[tuple[datetime, Verdict]]:
        """The newest verdicts of the watch on adapters of one pair, newest first."""
        query = (
            select(evaluations.c.created_at, evaluations.c.verdict)
            .join_from(evaluations, adapters, adapters.c.id == evaluations.c.adapter)
            .where(*trained_for(target, draft), evaluations.c.kind == EvaluationKind.WATCH.value)
            .order_by(evaluations.c.id.desc())
            .limit(limit)
        )
        with self._db.read() as connection:
            return [(utc(row.created_at), from_json(row.verdict)) for row in connection.execute(query)]

    def _ref(self, row: Row[Any]) -> AdapterRef:
        return AdapterRef(
            id=row.id,
            folder=self.root / row.folder,
            sha256=row.sha256,
            rank=row.rank,
            scale=row.scale,
            keys=tuple(json.loads(row.keys)),
            draft=row.draft,
            parent=row.parent,
            run=row.run,
            state=AdapterState(row.state),
            created_at=utc(row.created_at),
            erased_texts=row.erased_texts,
            learnt_from=row.learnt_from,
            measured_on=() if row.gate is None else from_json(row.gate).measured_on,
            target=row.target,
        )


def move_adapter(connection: Connection, adapter_id: int, state: AdapterState) -> None:
    """Raises IllegalMove unless ADAPTER_MOVES allows it."""
    row = _row(connection, adapter_id)
    if state not in ADAPTER_MOVES[AdapterState(row.state)]:
        raise IllegalMove(f"adapter {adapter_id} cannot go from {row.state} to {state.value}")
    where = {"log_end": log_end(connection)} if AdapterState.ACTIVE in {state, row.state} else {}
    connection.execute(update(adapters).where(adapters.c.id == adapter_id).values(state=state.value, **where))


def reinstate(connection: Connection, ancestor: int, target: str | None) -> int:
    """Make an adapter, or its nearest ancestor that may serve with this target, the active one of its pair. Returns its id;
    BARE_DRAFT: the bare draft serves."""
    while ancestor != BARE_DRAFT:
        row = _row(connection, ancestor)
        if AdapterState(row.state) is AdapterState.RETIRED and row.target == target:
            move_adapter(connection, ancestor, AdapterState.ACTIVE)
            return ancestor
        ancestor = row.parent
    return BARE_DRAFT


def judge_candidate(
    connection: Connection, run_id: int, adapter_id: int, state: AdapterState, verdict: Verdict
) -> None:
    """Give a run's own adapter the state its verdict means. Raises IllegalMove."""
    if _row(connection, adapter_id).run != run_id:
        raise IllegalMove(f"adapter {adapter_id} is not of run {run_id}")
    move_adapter(connection, adapter_id, state)
    record_evaluation(connection, adapter_id, EvaluationKind.GATE, verdict)


def retire_active(connection: Connection, target: str, draft: str) -> None:
    """Move the pair's active adapter to RETIRED; nothing where the bare draft serves."""
    if (row := _active(connection, target, draft)) is not None:
        move_adapter(connection, row.id, AdapterState.RETIRED)


def active_id(connection: Connection, target: str, draft: str) -> int:
    """The adapter that serves this pair; BARE_DRAFT for none."""
    row = _active(connection, target, draft)
    return BARE_DRAFT if row is None else row.id


def trained_for(target: str, draft: str) -> tuple[ColumnElement[bool], ...]:
    """Whether an adapter was trained for this pair."""
    return (adapters.c.target == target, adapters.c.draft == draft)


def record_evaluation(connection: Connection, adapter_id: int, kind: EvaluationKind, verdict: Verdict) -> None:
    """Insert a verdict on an adapter, dated now."""
    connection.execute(
        insert(evaluations).values(
            adapter=adapter_id, kind=kind.value, verdict=to_json(verdict), created_at=time_of(connection)
        )
    )


def _checked(connection: Connection, adapter_id: int) -> int | None:
    """Interim checks of an adapter so far; None: its watch is over."""
    query = select(evaluations.c.kind).where(evaluations.c.adapter == adapter_id)
    kinds = list(connection.execute(query).scalars())
    return None if EvaluationKind.WATCH in kinds else kinds.count(EvaluationKind.INTERIM)


def _learnt_by_usable_adapter() -> ColumnElement[bool]:
    """Whether an adapter that serves, or may serve again, has learnt a generation."""
    good = (AdapterState.ACTIVE.value, AdapterState.RETIRED.value)
    learnt = (run_texts.c.seq == generations.c.seq, adapters.c.run == run_texts.c.run, adapters.c.state.in_(good))
    return exists().where(*learnt).correlate(generations)


def _row(connection: Connection, adapter_id: int) -> Row[Any]:
    row = connection.execute(_known().where(adapters.c.id == adapter_id)).one_or_none()
    if row is None:
        raise NotFound(f"no adapter {adapter_id}")
    return row


def _active(connection: Connection, target: str, draft: str) -> Row[Any] | None:
    query = _known().where(*trained_for(target, draft), adapters.c.state == AdapterState.ACTIVE.value)
    return connection.execute(query).one_or_none()


def _known() -> Select[Any]:
    """Adapters with how many texts their runs learnt from, and the gate's verdict."""
    texts = select(func.count()).where(run_texts.c.run == adapters.c.run).correlate(adapters)
    gate = select(evaluations.c.verdict).where(
        evaluations.c.adapter == adapters.c.id, evaluations.c.kind == EvaluationKind.GATE.value
    )
    newest = gate.order_by(evaluations.c.id.desc()).limit(1).correlate(adapters)
    return select(adapters, texts.scalar_subquery().label("learnt_from"), newest.scalar_subquery().label("gate"))
