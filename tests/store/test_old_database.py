"""A database of an old release comes out of an upgrade whole.

The code of commit 1d3be14 made data/release_1d3be14.sql: its own migrations (0001 to 0003) and its own Generations, Runs,
Adapters, Replay, Unseen and Quarantine wrote every row, under a clock with fixed times; the file is sqlite3's iterdump of it.
data/release_1d3be14.json is what the same code then read from that database, one object a line. The literals below are its
answers too, where today's code gives them another form. Names say what became of a text.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from sqlalchemy import text

from service.core import (
    AdapterRef,
    AdapterState,
    DatabaseTaken,
    FailureCase,
    FinishReason,
    Generation,
    Prompt,
    Provenance,
    Round,
    RunState,
    Sampling,
    Source,
    Targets,
    TrainingRun,
    Verdict,
)
from service.models.fingerprint import folder_sha256
from service.store.database import Database, integrity, upgrade
from service.store.log.cases import CaseRow, Cases
from service.store.log.generations import CaseStats, Generations
from service.store.log.quarantine import Quarantine, QuarantinedTexts
from service.store.log.training_texts import TrainingTexts, UntrainedCounts
from service.store.processes.members import HostProcess, Members
from service.store.registry.adapters import Adapters, EvaluationKind
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from tests.support.lifecycle_server import WHO, Installation
from tests.support.store_rows import ADAPTERS, url_of

DATA = Path(__file__).parent / "data"
SQL = (DATA / "release_1d3be14.sql").read_text(encoding="utf-8")
OTHER_DRAFT = replace(WHO, draft="other-draft")
OTHER_TARGET = replace(WHO, target="other-target")


@dataclass(frozen=True)
class Expected:
    """What the old code read from its database, newest first. curves: by run, in the order of `runs`. evaluations: adapter,
    kind, time, verdict."""

    cases: list[CaseRow]
    runs: list[TrainingRun]
    curves: list[list[tuple[int, float]]]
    adapters: list[AdapterRef]
    evaluations: list[tuple[int, str, datetime, Verdict]]
    watched: list[tuple[datetime, Verdict]]


def generation_of(item: Any) -> Generation:
    """From JSON. Fields that the old code did not have get their defaults."""
    prompt, targets = item["prompt"], item["targets"]
    sampling = prompt["sampling"] | {"stop": tuple(prompt["sampling"]["stop"])}
    return Generation(
        id=item["id"],
        prompt=Prompt(**prompt | {"tokens": tuple(prompt["tokens"]), "sampling": Sampling(**sampling)}),
        output=tuple(item["output"]),
        finish=FinishReason(item["finish"]),
        rounds=tuple(Round(**one | {"source": Source(one["source"])}) for one in item["rounds"]),
        cases=tuple(FailureCase(**one) for one in item["cases"]),
        logprobs=tuple(item["logprobs"]),
        sampled_logprobs=tuple(item["sampled_logprobs"]),
        targets=targets
        and Targets(targets["top"], *map(bytes.fromhex, [targets[n] for n in ("ids", "logprobs", "tail")])),
        provenance=Provenance(**item["provenance"]),
        created_at=datetime.fromisoformat(item["created_at"]),
    )


JSON = (DATA / "release_1d3be14.json").read_text(encoding="utf-8")
TREE = json.loads(JSON)
# The old code did not say the ids of failure cases.
TREE["cases"] = [one | {"id": 0} for one in TREE["cases"]]
# Runs that drift had set off are now told as set off by failure cases.
TREE["runs"] = [one | {"trigger": "cases"} if one["trigger"] == "drift" else one for one in TREE["runs"]]
EXPECTED = TypeAdapter(Expected).validate_python(TREE)
GENERATIONS = [generation_of(one) for one in TREE["generations"]]
NAMES = [one.id for one in GENERATIONS]

TEXTS_OF_RUNS = {
    1: ["copy-2", "copy-1", "plain-2", "plain-1", "support-1", "sql-2", "sql-1"],  # promoted; two more are erased
    2: ["poor-half", "poor-2", "poor-1"],  # promoted, rolled back by the watch
    3: ["weak-2", "weak-1"],  # rejected
    4: ["few-1"],  # failed, so that it is free again
    5: ["undone-2", "undone-1"],  # promoted, rolled back by an operator, which quarantined nothing then
    6: [],  # promoted, rolled back by the watch, its text released
    7: [], 8: [], 9: [], 10: [], 11: [], 12: [],  # crashed: which texts they had is not known
    13: ["other-1"],  # promoted, of another draft
    14: ["last-half", "last-2", "last-1"],  # promoted, serves
    15: ["open-2", "open-1", "twice-1"],  # not over
}  # fmt: skip
STATES = {
    7: RunState.LOST,
    8: RunState.OUT_OF_MEMORY,
    9: RunState.OUT_OF_MEMORY,
    10: RunState.ENDED,
    11: RunState.FAILED,
    12: RunState.FAILED,
}
"""What was called crashed, by its reason."""
UNDRAFTED = ["half-1", "undrafted-other", "undrafted-2", "undrafted-1"]
"""Texts that waited for their cases. half-1 has one already, of the tokens that were drafted."""
BAD = ["bad-half", "bad-unseen", "bad-2", "bad-1"]
"""Texts that the old code quarantined after three crashes."""
FREE = ["free-2", "other-2", *UNDRAFTED, "free-1", "other-1", "stopped-1", "supplied-1", *BAD, "released-1", "few-1"]
"""What no run of this draft has learnt: what the old code said, and BAD, and few-1, which a failed run had, and other-1, which
a run of another draft has had: each draft may learn it."""
FREE_AFTER_START = [*FREE[:7], "open-2", "open-1", "other-1", "twice-1", *FREE[8:]]
"""The same once the open run has ended. Two runs had crashed over twice-1 before; the upgrade forgets those crashes
(docs/decisions/store.md)."""
HELD = [QuarantinedTexts(run=2, adapter=2, cases=5, generations=3)]
"""What is quarantined."""
KIND, OTHER_KIND, THIRD_KIND = "cluster:ca98ffebb5995768", "cluster:9f1c90b457954d12", "cluster:035095a703c6df89"


def undrafted(database: Database) -> list[str]:
    """Texts whose cases are not known, newest first."""
    query = text("select id from generations where cases is null order by seq desc")
    with database.read() as connection:
        return list(connection.execute(query).scalars())


def load(path: Path, adapters: Path = Path("/srv/redraft/adapters")) -> str:
    """Write the old database to a file. adapters: where its adapter folders are. Returns its URL."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SQL.replace("/srv/redraft/adapters", str(adapters)))
    return url_of(path)


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def rows(path: Path, wanted: dict[str, list[str]]) -> dict[str, list[tuple[object, ...]]]:
    """Rows by table, sorted. wanted: columns by table."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            table: sorted(connection.execute(f"SELECT {', '.join(names)} FROM {table}"), key=repr)
            for table, names in wanted.items()
        }


def columns(path: Path) -> dict[str, list[str]]:
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")] for name in tables}


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old database after the upgrade; tests get copies."""
    path = tmp_path_factory.mktemp("upgraded") / "old.db"
    upgrade(load(path))
    return path


@pytest.fixture
def database(upgraded: Path, tmp_path: Path) -> Iterator[Database]:
    opened = Database(url_of(Path(shutil.copy(upgraded, tmp_path / "redraft.db"))))
    yield opened
    opened.close()


def test_every_text_and_case_is_as_it_was(database: Database) -> None:
    store = Generations(database)
    assert store.by_ids(NAMES) == GENERATIONS
    cases = Cases(database).newest(1000)
    # What the failed run had is free.
    assert [replace(one, id=0) for one in cases] == [
        replace(one, trained_run=None) if one.trained_run == 4 else one for one in EXPECTED.cases
    ]
    assert [one.id for one in cases] == sorted({one.id for one in cases}, reverse=True)
    assert store.stats() == CaseStats(
        requests=47, generations=47, tokens=409, cases=73, ties=6, trained=35, quarantined=5,
        domains={"": 16, "sql": 21, "support": 10},
    )  # fmt: skip
    held_out = ["held-out-3", "undrafted-held-out", "held-out-2", "held-out-1"]
    assert [one.id for one in store.held_out(WHO, 100)] == held_out


def test_runs_are_as_they_were(database: Database) -> None:
    runs = Runs(database)
    runs_now = [replace(run, state=STATES.get(run.id, run.state)) for run in EXPECTED.runs]
    assert runs.latest(100) == runs_now
    assert [runs.loss_curve(run.id) for run in EXPECTED.runs] == EXPECTED.curves
    assert {run.state for run in EXPECTED.runs} > {state for state in RunState if state.judged}
    assert runs.current(WHO) == runs.by_key("evening of the 2nd") == EXPECTED.runs[0] == runs.get(15)


def test_runs_have_the_texts_that_they_had(database: Database) -> None:
    runs = Runs(database)
    assert {
        run.id: [name for name, _ in TrainingTexts(database).claimed_names(run.id)] for run in reversed(EXPECTED.runs)
    } == TEXTS_OF_RUNS
    assert {run.id: runs.texts(run.id) for run in EXPECTED.runs} == {
        run: len(texts) for run, texts in TEXTS_OF_RUNS.items()
    }


def test_adapters_and_verdicts_are_as_they_were(database: Database) -> None:
    adapters = Adapters(database, ADAPTERS)
    refs = adapters.all()
    assert [replace(ref, target=None) for ref in refs] == EXPECTED.adapters
    targets = {run.id: Runs(database).recipe(run.id)[0].target for run in EXPECTED.runs}
    assert [ref.target for ref in refs] == [None if ref.run is None else targets[ref.run] for ref in refs]
    assert {ref.state for ref in EXPECTED.adapters} == set(AdapterState) - {
        AdapterState.REVOKED,
        AdapterState.REMOVED,
    }, "that release had no others"
    assert [
        (ref.id, kind, *found)
        for ref in EXPECTED.adapters
        for kind in EvaluationKind
        for found in adapters.evaluations(ref.id, kind)
    ] == [(ref, "interim" if kind == "look" else kind, at, verdict) for ref, kind, at, verdict in EXPECTED.evaluations]
    assert adapters.watched(WHO.target, "draft", 100) == EXPECTED.watched
    serving = [adapters.active(WHO.target, draft) for draft in ("draft", "other-draft", "none")]
    assert [None if ref is None else ref.id for ref in serving] == [8, 7, None]


def test_what_no_run_learnt_is_free_and_what_was_rolled_back_stays_quarantined(database: Database) -> None:
    assert Quarantine(database).all() == HELD
    free = UntrainedCounts(cases=20, tokens=98, generations=11, undrafted=55, rate=56 / 267)
    assert TrainingTexts(database).untrained(WHO) == free
    assert free.generations + len(UNDRAFTED) + len(["bad-unseen"]) == len(FREE)
    assert TrainingTexts(database).untrained(OTHER_TARGET) == UntrainedCounts(cases=2, tokens=9, generations=1)
    assert undrafted(database) == [*UNDRAFTED, "last-half", "bad-unseen"], "a run has had the last but one"
    assert Quarantine(database).release() == 5
    assert TrainingTexts(database).untrained(WHO).generations == free.generations + 3


def test_reservoirs_hold_what_they_held_but_for_quarantined_texts(database: Database) -> None:
    """The old code left texts in them that three runs had crashed over: bad-1 in "support", bad-2 in OTHER_KIND, bad-unseen and
    bad-half in "sql"."""
    replay = Replay(database)
    assert replay.sizes() == {
        ("", THIRD_KIND): 1,
        ("", OTHER_KIND): 1,
        ("", KIND): 4,
        ("sql", ""): 8,
        ("support", ""): 2,
    }
    with database.read() as connection:
        # In the order of their slots: what is drawn for a seed depends on it.
        held = connection.exec_driver_sql(
            "SELECT r.domain || r.kind, g.id FROM replay_buffer r JOIN generations g ON g.seq = r.seq"
            " ORDER BY r.domain, r.kind, r.slot"
        ).all()
        seen = connection.exec_driver_sql("SELECT domain, kind, seen FROM replay_domains ORDER BY domain, kind").all()
    found: dict[str, list[str]] = {}
    for place, name in held:
        found.setdefault(place, []).append(name)
    assert found == {
        THIRD_KIND: ["supplied-none"],
        OTHER_KIND: ["weak-2"],
        KIND: ["plain-1", "plain-2", "undone-2", "last-2"],
        "sql": ["sql-1", "weak-1", "sql-2", "well-1", "copy-1", "undone-1", "other-1", "last-1"],
        "support": ["support-1", "last-half"],
    }
    assert seen == [("", THIRD_KIND, 1), ("", OTHER_KIND, 2), ("", KIND, 5), ("sql", "", 12), ("support", "", 5)]
    everything = replay.sample(WHO, 100, seed=0)
    assert {one.id: one.prompt.domain or one.prompt.kind for one in everything} == {
        name: place for place, names in found.items() for name in names
    }


@pytest.mark.promise(18)
def test_every_column_that_stays_has_its_values(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    url = load(path)
    known = columns(path)
    before = rows(path, known)
    upgrade(url)
    now = columns(path)
    # What replaces these columns and tables is tested above.
    gone = {(table, name) for table, names in known.items() for name in names if name not in now.get(table, ())}
    assert gone - {("unseen", "seq")} == {
        ("failure_cases", name) for name in ("claimed_run", "trained_run", "crashes", "quarantined")
    }
    moved = {"alembic_version", "replay_buffer", "replay_domains", "unseen"}
    both = {
        table: [name for name in names if (table, name) not in gone]
        for table, names in known.items()
        if table not in moved
    }
    expected = {
        table: [tuple(row[known[table].index(name)] for name in both[table]) for row in before[table]] for table in both
    }
    state = both["training_runs"].index("state")
    trigger = both["training_runs"].index("trigger")
    for i, row in enumerate(expected["training_runs"]):
        changed = list(row)
        changed[state] = str(STATES.get(int(str(row[0])), row[state]))
        changed[trigger] = "cases" if row[trigger] == "drift" else row[trigger]
        expected["training_runs"][i] = tuple(changed)
    # That release called interim checks so.
    expected["evaluations"] = [
        tuple("interim" if value == "look" else value for value in row) for row in expected["evaluations"]
    ]
    assert rows(path, both) == {table: sorted(found, key=repr) for table, found in expected.items()}
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


def test_upgrading_again_changes_nothing(upgraded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(upgraded, tmp_path / "redraft.db"))
    upgrade(url_of(path))
    assert dump(path) == dump(upgraded)


def test_copies_of_old_texts_are_counted_in_their_rows(database: Database) -> None:
    store = Generations(database)
    assert store.add([replace(one, id=f"again {one.id}") for one in GENERATIONS]).result() == 0
    stats = store.stats()
    assert (stats.generations, stats.requests) == (47, 94)
    assert store.by_ids(NAMES) == GENERATIONS


def test_one_server_at_a_time_owns_it(database: Database) -> None:
    Members(database).join()
    with pytest.raises(DatabaseTaken):
        Members(database, process=HostProcess("elsewhere", "another", 1)).join()


def write_adapters(folder: Path) -> None:
    """The adapter folders that the old database names, with the files whose hashes it has."""
    for ref in EXPECTED.adapters:
        own = folder / ref.folder.name
        own.mkdir(parents=True)
        (own / "adapters.safetensors").write_text(f"{1.0 - (ref.run or 0) / 100:.2f}")
        (own / "adapter_config.json").write_text(json.dumps({"run": ref.run}))
        assert folder_sha256(own) == ref.sha256


def test_the_lifecycle_goes_on(tmp_path: Path) -> None:
    write_adapters(tmp_path / "adapters")
    url = load(tmp_path / "redraft.db", tmp_path / "adapters")
    upgrade(url)
    house = Installation(tmp_path, url)
    with house.server(min_cases=1) as server:
        lost = server.runs.get(15)
        assert (lost.state, lost.error) == (RunState.LOST, "its process died during the run")
        assert server.adapters.get(9).state is AdapterState.BROKEN
        assert server.engine.active == 8
        assert server.training_texts.untrained(WHO) == UntrainedCounts(26, 125, 14, 55, rate=56 / 267)
        assert Quarantine(server.db).all() == HELD
        server.tick_until(server.ended(RunState.PROMOTED, 7))
        run = server.runs.get(16)
        assert (run.state, run.parent, run.fencing) == (RunState.PROMOTED, 8, 16)
        assert [name for name, _ in server.training_texts.claimed_names(16)] == FREE_AFTER_START
        assert server.engine.active == run.adapter == 10
        assert server.adapters.get(8).state is AdapterState.RETIRED
        assert server.training_texts.untrained(WHO) == UntrainedCounts(0, 0, 0)
        assert integrity(server.db) == "ok"
