"""Who may write about a training run: the process that holds its fencing token, while others have not given it up."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from service.core import IllegalMove, NotFound, RunState
from service.store.processes.members import is_member
from service.store.tables import training_runs


def held_run(connection: Connection, run_id: int, fencing: int) -> Row[Any]:
    """The row of a run that this process holds. Raises NotFound, and IllegalMove when the token is stale, the run is over, or
    its process was given up."""
    row = connection.execute(select(training_runs).where(training_runs.c.id == run_id)).one_or_none()
    if row is None:
        raise NotFound(f"no training run {run_id}")
    if row.fencing != fencing:
        raise IllegalMove(f"run {run_id}: fencing token {fencing} is stale, the run's is {row.fencing}")
    if RunState(row.state).over:
        raise IllegalMove(f"run {run_id} is over ({row.state})")
    if row.owner is not None and not is_member(connection, row.owner):
        raise IllegalMove(f"run {run_id}: its process was given up")
    return row
