"""Training runs in MLflow: what is exported, once, without a text; what is said where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner, Result

from service.cli.root import app
from service.core import (
    BARE_DRAFT,
    AdapterRef,
    Conflict,
    NotFound,
    Progress,
    RedraftError,
    RunState,
    TrainingRun,
    Trigger,
    Verdict,
)
from service.learning import mlflow_export
from service.models.fingerprint import folder_sha256
from service.settings import TrainingSettings, load_settings
from service.store.stores import Stores, open_stores
from tests.support.databases import run_sql
from tests.support.store_rows import LOST, WHO, generation, texts

if TYPE_CHECKING:  # importing MLflow takes seconds, and every worker imports every test
    from mlflow import MlflowClient
    from mlflow.entities import Run

pytestmark = pytest.mark.filterwarnings(
    "ignore:The ``noload`` loader strategy is deprecated"  # of MLflow's own mappers, by SQLAlchemy 2.1
)

DOMAINS = {
    "code": (0.1, 0.05, 0.15),
    "": (0.2, 0.1, 0.3),
    "a/b": (0.3, 0.2, 0.4),
    "a_b": (0.4, 0.3, 0.5),
    "..": (0.5, 0.4, 0.6),
}
BETTER = Verdict(True, "better: +10 %", 40, 4000, 0.1, 0.05, 0.15, DOMAINS, ("one GPU", "another"))
SECRETS = (texts("train", 1, "a question of mine")[0], "somebody by name", "a key of mine")
"""What the log holds of requests: a first message, a client, an idempotency key."""
CURVE = [(step, 1.0 / step) for step in range(1, 8)]


class Log:
    """A database in a folder, with settings that name it, and runs of every end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.config = folder / "settings.toml"
        self.config.write_text(f"home = {json.dumps(str(folder))}\n")
        self.stores: Stores = open_stores(load_settings(self.config), create=True)

    def claim(self, trigger: Trigger = Trigger.CASES) -> TrainingRun:
        """A run under way, on top of what serves."""
        self.stores.generations.add([generation(first_user=SECRETS[0], client=SECRETS[1])]).result()
        active = self.stores.adapters.active(WHO.target, WHO.draft)
        run = self.stores.runs.claim(
            trigger=trigger,
            who=WHO,
            parent=BARE_DRAFT if active is None else active.id,
            limit=9,
            idempotency_key=f"{SECRETS[2]} {self.stores.generations.stats().generations}",
            config=TrainingSettings(rank=4).model_dump(),
        )
        assert run is not None
        return self.stores.runs.move(run.id, run.fencing, RunState.TRAINING)

    def candidate(self, run: TrainingRun) -> AdapterRef:
        """The adapter of a run that has trained, with files."""
        for step, loss in CURVE:
            self.stores.runs.progress(run.id, run.fencing, Progress(step, len(CURVE), loss, 0.5 * step, 100.0 * step))
        made = self.folder / "adapters" / f"run-{run.id}"
        made.mkdir(parents=True)
        (made / "adapters.safetensors").write_bytes(b"weights %d" % run.id)
        ref = self.stores.adapters.add(
            run_id=run.id, fencing=run.fencing, folder=made, sha256=folder_sha256(made), rank=4, scale=2.0, keys=["a"],
            draft=WHO.draft, parent=run.parent,
        )  # fmt: skip
        self.stores.runs.move(run.id, run.fencing, RunState.SCORING)
        return ref

    def promoted(self) -> AdapterRef:
        run = self.claim()
        ref = self.candidate(run)
        self.stores.runs.move(run.id, run.fencing, RunState.STAGING)
        self.stores.runs.promote(run.id, run.fencing, ref.id, BETTER)
        return ref

    def rejected(self) -> AdapterRef:
        run = self.claim(Trigger.DRIFT)
        ref = self.candidate(run)
        self.stores.runs.reject(run.id, run.fencing, ref.id, LOST)
        return ref

    def failed(self) -> None:
        run = self.claim(Trigger.MANUAL)
        self.stores.runs.move(run.id, run.fencing, RunState.FAILED, error="the loss is NaN")

    def export(self, tracking: Tracking, *words: object) -> Result:
        given = ["--tracking-uri", tracking.uri, "--experiment", tracking.experiment, "--config", self.config]
        return CliRunner().invoke(app, ["runs", "export", *map(str, (*given, *words))])


@dataclass(frozen=True)
class Tracking:
    """An experiment of MLflow's that is not there yet. files: all that MLflow writes."""

    uri: str
    experiment: str
    files: Path

    @property
    def client(self) -> MlflowClient:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri)

    def runs(self) -> dict[str, Run]:
        """By redraft.run."""
        found = self.client.get_experiment_by_name(self.experiment)
        assert found is not None
        runs = self.client.search_runs([found.experiment_id])
        by_run = {run.data.tags["redraft.run"]: run for run in runs}
        assert len(by_run) == len(runs)
        return by_run

    def content(self) -> dict[str, Any]:
        """All that is there, by MLflow's id."""
        return {
            run.info.run_id: (run.to_dictionary(), {name: self.history(run, name) for name in run.data.metrics})
            for run in self.runs().values()
        }

    def history(self, run: Run, metric: str) -> list[tuple[int, float, int]]:
        points = self.client.get_metric_history(run.info.run_id, metric)
        return sorted((point.step, point.value, point.timestamp) for point in points)


@pytest.fixture(scope="module")
def mlflow_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where MLflow writes: making its tables takes seconds, so tests share a database, whose artifacts go below the current
    folder."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        yield folder


@pytest.fixture(params=["files", pytest.param("sqlite", marks=pytest.mark.nightly)])
def tracking(request: pytest.FixtureRequest, mlflow_folder: Path) -> Tracking:
    uri = f"sqlite:///{mlflow_folder}/mlflow.db" if request.param == "sqlite" else f"file://{mlflow_folder}/files"
    return Tracking(uri, request.node.name, mlflow_folder)


@pytest.fixture
def make_log(tmp_path: Path) -> Iterator[Callable[[str], Log]]:
    made: list[Log] = []

    def make(name: str) -> Log:
        made.append(Log(tmp_path / name))
        return made[-1]

    yield make
    for each in made:
        each.stores.close()


@pytest.fixture
def log(make_log: Callable[[str], Log]) -> Log:
    return make_log("log")


def test_runs_are_exported_with_what_they_were_given_and_found(
    log: Log, tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_export, "BATCH", 3)
    first, second = log.promoted(), log.rejected()
    log.failed()
    log.claim()
    done = log.export(tracking)
    assert (done.exit_code, done.stdout) == (0, f"3 runs exported to {tracking.experiment}\n")
    found = tracking.runs()
    assert sorted(found) == ["1", "2", "3"], "what is not over is not exported"
    for name, run in found.items():
        row = log.stores.runs.get(int(name))
        assert row.finished_at is not None
        assert (run.info.start_time, run.info.end_time) == (
            int(row.created_at.timestamp() * 1000),
            int(row.finished_at.timestamp() * 1000),
        )
        assert run.info.run_name == f"run {name}"
        assert run.data.params == {name: str(value) for name, value in TrainingSettings(rank=4).model_dump().items()}
        pair = {name: run.data.tags[f"redraft.{name}"] for name in ("target", "tokenizer", "draft")}
        assert pair == {"target": WHO.target, "tokenizer": WHO.tokenizer, "draft": WHO.draft}
    assert [found[name].info.status for name in "123"] == ["FINISHED", "FINISHED", "FAILED"]
    names = ("state", "trigger", "parent", "parent_run", "adapter", "adapter_sha256", "reason", "measured_on")
    assert [[found[name].data.tags.get(f"redraft.{tag}") for tag in names] for name in "123"] == [
        ["promoted", "cases", "0", None, "1", first.sha256, "better: +10 %", "one GPU, another"],
        ["rejected", "drift", "1", "1", "2", second.sha256, LOST.reason, None],
        ["failed", "manual", "1", "1", None, None, "the loss is NaN", None],
    ]
    ended = found["1"].info.end_time
    assert tracking.history(found["1"], "loss") == [(step, loss, ended) for step, loss in CURVE]
    assert tracking.history(found["1"], "grad_norm") == [(7, 3.5, ended)]
    assert tracking.history(found["1"], "tokens_per_second") == [(7, 700.0, ended)]
    gate = {name: value for name, value in found["1"].data.metrics.items() if name.startswith("gate/")}
    assert (gate.pop("gate/prompts"), gate.pop("gate/tokens")) == (40, 4000)
    places = ["gate", "gate/domains/code", "gate/no_domain", "gate/domains/a_b-c14cddc0", "gate/domains/a_b"]
    places += ["gate/domains/..-5ec1f7e7"]
    intervals = [(BETTER.gain, BETTER.low90, BETTER.high90), *DOMAINS.values()]
    assert gate == {
        f"{place}/{name}": value
        for place, interval in zip(places, intervals, strict=True)
        for name, value in zip(("gain", "low90", "high90"), interval, strict=True)
    }
    assert found["3"].data.metrics == {"generations": 1, "cases": 1}, "neither trained nor judged"
    assert tracking.client.list_artifacts(found["1"].info.run_id) == []


def test_what_was_exported_stays_and_what_is_new_is_added(
    log: Log, tracking: Tracking, make_log: Callable[[str], Log]
) -> None:
    first = log.promoted()
    log.failed()
    assert log.export(tracking, 2).stdout == f"1 runs exported to {tracking.experiment}\n"
    assert list(tracking.runs()) == ["2"]
    assert log.export(tracking).stdout == f"1 runs exported to {tracking.experiment}, 1 were there\n"
    tracking.client.set_tag(tracking.runs()["1"].info.run_id, "redraft.reason", "a note of mine")
    before = tracking.content()
    log.stores.adapters.roll_back(first.id, BARE_DRAFT, LOST)
    assert log.export(tracking).stdout == f"0 runs exported to {tracking.experiment}, 2 were there\n"
    assert tracking.content() == before
    log.rejected()
    assert log.export(tracking).stdout == f"1 runs exported to {tracking.experiment}, 2 were there\n"
    after = tracking.content()
    assert len(after) == 3 and after.items() >= before.items()
    other = make_log("other")
    other.failed()
    assert other.export(tracking).stdout == f"1 runs exported to {tracking.experiment}\n", "another log's first run"
    tracking.client.delete_run(next(iter(before)))
    assert log.export(tracking).stdout == f"1 runs exported to {tracking.experiment}, 2 were there\n", "deleted there"


def test_an_export_that_was_interrupted_is_made_whole(
    log: Log, tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.promoted()
    log.rejected()
    client_class = type(tracking.client)
    sent = client_class.log_batch

    def break_off(client: MlflowClient, run_id: str, **what: Any) -> None:
        sent(client, run_id, **what)
        if client.get_run(run_id).data.tags["redraft.run"] == "2":
            raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(client_class, "log_batch", break_off)
        broken = log.export(tracking)
    assert isinstance(broken.exception, RedraftError)
    assert str(broken.exception) == "MLflow did not take it: no space left"
    whole = tracking.runs()["1"].info.run_id
    assert log.export(tracking).stdout == f"1 runs exported to {tracking.experiment}, 1 were there\n"
    found = tracking.runs()
    assert sorted(found) == ["1", "2"] and found["1"].info.run_id == whole
    assert found["2"].info.status == "FINISHED"
    assert [(step, loss) for step, loss, _ in tracking.history(found["2"], "loss")] == CURVE


def test_no_text_of_the_log_is_exported(log: Log, tracking: Tracking) -> None:
    log.promoted()
    log.failed()
    rows = (log.folder / "redraft.db").read_bytes() + (log.folder / "redraft.db-wal").read_bytes()
    assert all(secret.encode() in rows for secret in SECRETS)
    assert log.export(tracking).exit_code == 0
    files = [path for path in tracking.files.rglob("*") if path.is_file()]
    assert any(b"better: +10 %" in path.read_bytes() for path in files)
    for path in files:
        written = path.read_bytes()
        assert not [secret for secret in SECRETS if secret.encode() in written], path


def test_files_of_adapters_are_sent_when_asked_for(log: Log, tracking: Tracking, tmp_path: Path) -> None:
    log.promoted()
    altered, revoked = log.promoted(), log.promoted()
    (altered.folder / "adapters.safetensors").write_bytes(b"something else")
    run_sql(load_settings(log.config).database_url, f"UPDATE adapters SET state = 'revoked' WHERE id = {revoked.id}")
    done = log.export(tracking, "--artifacts")
    assert done.exit_code == 0
    assert done.stderr.endswith("files not sent (gone, altered, or the adapter is revoked): adapters 2, 3\n")
    found = {name: run.info.run_id for name, run in tracking.runs().items()}
    tracking.client.download_artifacts(found["1"], "adapter", str(tmp_path))
    assert (tmp_path / "adapter" / "adapters.safetensors").read_bytes() == b"weights 1"
    assert [tracking.client.list_artifacts(found[name]) for name in "23"] == [[], []]


def test_what_cannot_be_exported_is_refused(log: Log, tracking: Tracking) -> None:
    run = log.claim()
    open_run, unknown = log.export(tracking, run.id), log.export(tracking, 99)
    assert isinstance(open_run.exception, Conflict) and str(open_run.exception) == "run 1 is not over yet (training)"
    assert isinstance(unknown.exception, NotFound) and str(unknown.exception) == "no training run 99"
    nowhere = log.export(Tracking("http://127.0.0.1:1", "any", tracking.files))
    assert isinstance(nowhere.exception, RedraftError)
    assert str(nowhere.exception).startswith("MLflow did not take it: API request to http://127.0.0.1:1/")


def test_without_mlflow_it_says_what_to_install(log: Log) -> None:
    code = """if True:
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "mlflow":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        from service.cli import main

        main()
    """
    command = [sys.executable, "-c", code, "runs", "export", "--config", str(log.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "redraft: MLflow is not installed (No module named 'mlflow'): pip install mlflow-skinny, which is its client alone, "
        "or mlflow\n"
    )
