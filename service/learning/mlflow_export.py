"""Training runs as MLflow runs, one for every training run that is over. Numbers, ids, fingerprints and clients' domain tags
are exported, no text of the log."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterState,
    Conflict,
    RedraftError,
    RunState,
    TrainingRun,
)
from service.models.fingerprint import is_unaltered
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY = "redraft.key"
"""Tag by which a run is found again in MLflow."""
GAIN = ("gain", "low90", "high90")
LONGEST = 5000
"""Characters of a tag's value that every version of MLflow accepts."""
BATCH = 500
"""Metrics sent in one call; MLflow accepts 1000."""
STATUS = {
    RunState.PROMOTED: "FINISHED",
    RunState.REJECTED: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.OUT_OF_MEMORY: "FAILED",
    RunState.TIMED_OUT: "FAILED",
    RunState.ENDED: "KILLED",
    RunState.LOST: "KILLED",
    RunState.CRASHED: "FAILED",
}
RUNNING = "RUNNING"
"""MLflow's status of a run whose export was interrupted: the final status is sent last."""


@dataclass(frozen=True, slots=True)
class Exported:
    """new: ids of the runs that were exported now. known: ids of those that had been exported before. without_files: ids of
    adapters whose files were asked for and not sent: they are gone or altered, or the adapter is revoked."""

    new: tuple[int, ...]
    known: tuple[int, ...]
    without_files: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Record:
    """What is exported of a run. metrics: name, value, step. files: the adapter's folder."""

    run: TrainingRun
    params: Mapping[str, str]
    metrics: list[tuple[str, float, int]]
    tags: Mapping[str, str]
    files: Path | None


def export_runs(
    runs: Runs,
    adapters: Adapters,
    ids: Collection[int] = (),
    *,
    uri: str | None,
    experiment: str,
    with_files: bool = False,
) -> Exported:
    """Export the runs with these ids, by default all that are over, to an experiment, which is created where there is none.
    Runs that were exported before are left as they are; one whose export was interrupted is deleted in MLflow and sent again.

    uri: MLflow's tracking URI; None: MLFLOW_TRACKING_URI, or MLflow's own default. with_files: send the adapters' folders as
    artifacts. Raises RedraftError where MLflow is not installed or refuses, NotFound for an unknown id, Conflict for a run that
    is not over.
    """
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise RedraftError(
            f"MLflow is not installed ({error}): pip install mlflow-skinny, which is its client alone, or mlflow"
        ) from error

    chosen = [_over(runs.get(one)) for one in sorted(set(ids))] if ids else runs.ended()
    known_adapters = {ref.id: ref for ref in adapters.all()}
    with _mlflow_errors():
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found is not None else client.create_experiment(experiment)
        exported = _exported(client, experiment_id)
    new: list[int] = []
    known: list[int] = []
    without_files: list[int] = []
    for run in chosen:
        status, interrupted = exported.get(_key(run), (None, ""))
        if status not in {None, RUNNING}:
            known.append(run.id)
            continue
        record = _record(runs, run, known_adapters, with_files=with_files)
        with _mlflow_errors():
            if interrupted:
                client.delete_run(interrupted)
            _send(client, experiment_id, record)
        new.append(run.id)
        if with_files and run.adapter is not None and record.files is None:
            without_files.append(run.adapter)
    return Exported(tuple(new), tuple(known), tuple(without_files))


def _over(run: TrainingRun) -> TrainingRun:
    if not run.state.over:
        raise Conflict(f"run {run.id} is not over yet ({run.state.value})")
    return run


@contextmanager
def _mlflow_errors() -> Generator[None]:
    """Whatever MLflow's client raises (its stores raise what their databases and HTTP libraries do) becomes a RedraftError."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RedraftError(f"MLflow did not take it: {reason}") from error


def _exported(client: MlflowClient, experiment: str) -> dict[str, tuple[str, str]]:
    """Status and MLflow's id of each run that was exported to an experiment, by KEY."""
    found: dict[str, tuple[str, str]] = {}
    token: str | None = None
    while True:
        page = client.search_runs([experiment], f"tags.`{KEY}` LIKE '%'", max_results=1000, page_token=token)
        found |= {one.data.tags[KEY]: (one.info.status, one.info.run_id) for one in page}
        if not (token := page.token):
            return found


def _send(client: MlflowClient, experiment: str, record: _Record) -> None:
    from mlflow.entities import Metric, Param

    run = record.run
    start, end = _milliseconds(run.created_at), _milliseconds(run.finished_at or run.created_at)
    made = client.create_run(experiment, start_time=start, tags=dict(record.tags), run_name=f"run {run.id}")
    name = made.info.run_id
    client.log_batch(name, params=[Param(key, value) for key, value in record.params.items()])
    metrics = [Metric(key, value, end, step) for key, value, step in record.metrics]
    for first in range(0, len(metrics), BATCH):
        client.log_batch(name, metrics=metrics[first : first + BATCH])
    if record.files is not None:
        client.log_artifacts(name, str(record.files), "adapter")
    client.set_terminated(name, STATUS[run.state], end)


def _record(runs: Runs, run: TrainingRun, adapters: Mapping[int, AdapterRef], *, with_files: bool) -> _Record:
    who, config = runs.recipe(run.id)
    made = None if run.adapter is None else adapters[run.adapter]
    tags = {
        KEY: _key(run),
        "mlflow.source.name": "redraft",
        "redraft.run": run.id,
        "redraft.state": run.state.value,
        "redraft.trigger": run.trigger.value,
        "redraft.target": who.target,
        "redraft.tokenizer": who.tokenizer,
        "redraft.draft": who.draft,
        "redraft.parent": run.parent,
        "redraft.parent_run": None if run.parent == BARE_DRAFT else adapters[run.parent].run,
        "redraft.adapter": run.adapter,
        "redraft.adapter_sha256": None if made is None else made.sha256,
        "redraft.reason": run.error if run.verdict is None else run.verdict.reason,
        "redraft.measured_on": None if run.verdict is None else ", ".join(run.verdict.measured_on) or None,
    }
    return _Record(
        run=run,
        params={name: str(value) for name, value in config.items()},
        metrics=_metrics(run, runs.loss_curve(run.id)),
        tags={name: str(value)[:LONGEST] for name, value in tags.items() if value is not None},
        files=made.folder if with_files and made is not None and _sendable(made) else None,
    )


def _key(run: TrainingRun) -> str:
    """A run's id and the time at which it was opened: no run of another database has both."""
    return f"{run.id} of {run.created_at.isoformat()}"


def _metrics(run: TrainingRun, curve: Sequence[tuple[int, float]]) -> list[tuple[str, float, int]]:
    found = [("loss", loss, step) for step, loss in curve]
    last = run.progress
    rates = {"grad_norm": last.grad_norm, "tokens_per_second": last.tokens_per_second}
    found += [(name, value, last.step) for name, value in rates.items() if value is not None]
    found += [("generations", run.generations, 0), ("cases", run.cases, 0)]
    if (verdict := run.verdict) is not None:
        found += [("gate/prompts", verdict.prompts, 0), ("gate/tokens", verdict.tokens, 0)]
        intervals = {"gate": (verdict.gain, verdict.low90, verdict.high90)}
        intervals |= {_domain(name): interval for name, interval in verdict.domains.items()}
        for prefix, interval in intervals.items():
            found += [(f"{prefix}/{name}", value, 0) for name, value in zip(GAIN, interval, strict=True)]
    return found


def _domain(tag: str) -> str:
    """Prefix of a domain's metrics. Characters that MLflow allows in no name become "_", with a hash that tells such tags
    apart."""
    if not tag:
        return "gate/no_domain"
    name = re.sub(r"[^\w .-]", "_", tag)
    if name != tag or not name.strip("."):
        name = f"{name}-{hashlib.sha256(tag.encode()).hexdigest()[:8]}"
    return f"gate/domains/{name}"


def _sendable(ref: AdapterRef) -> bool:
    """Whether an adapter's files exist unaltered and may be copied."""
    return ref.state is not AdapterState.REVOKED and is_unaltered(ref.folder, ref.sha256)


def _milliseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)
