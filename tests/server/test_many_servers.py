"""Real servers and a trainer that share one PostgreSQL database."""

from __future__ import annotations

import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import select

from service.core import BARE_DRAFT, AdapterState, RunState, Unavailable
from service.store.database import Database
from service.store.registry.adapters import Adapters
from service.store.registry.runs import Runs
from service.store.tables import members
from tests.store.test_migrations import configured
from tests.support import skewed
from tests.support.databases import POSTGRES, PostgresDatabases
from tests.support.fleet import Fleet, Pooler
from tests.support.tiny_server import generate, register_adapters
from tests.support.waiting import until

pytestmark = POSTGRES

LATE = 30.0
"""Seconds after which others have taken over from a process that ended or fell silent."""
KILLS = 10
SWITCHES = 100


@pytest.fixture(params=["directly", "through PgBouncer"])
def url(request: pytest.FixtureRequest, databases: PostgresDatabases, tmp_path: Path) -> Iterator[str]:
    found = databases.empty(tmp_path)
    if request.param == "directly":
        yield found
        return
    pooler = Pooler(databases.server)
    yield databases.server.tcp_url(found, port=pooler.port)
    pooler.close()


def pids(database: Database) -> list[int]:
    """Of the processes that share it."""
    with database.read() as connection:
        return list(connection.execute(select(members.c.pid)).scalars())


def over(fleet: Fleet, run: int) -> bool:
    return RunState(fleet.servers[0].get(f"/train/{run}")["state"]).over


@pytest.mark.nightly
def test_a_trainer_does_the_runs_of_servers_that_train_nothing(tmp_path: Path, databases: PostgresDatabases) -> None:
    with Fleet(tmp_path, databases.empty(tmp_path), 2, idle=True) as fleet:
        first, second = fleet.servers
        ids = [ref.id for ref in register_adapters(first, fleet.pair, 2)]
        made_of_texts = [tmp_path / "home" / name / "model" / "1-1-1-log.npz" for name in ("targets", "practice")]
        for file in made_of_texts:
            file.parent.mkdir(parents=True)
            file.touch()
        fleet.start()
        assert not any(file.exists() for file in made_of_texts), "its texts may have been erased by others meanwhile"
        fleet.traffic()
        refused = first.request("POST", "/train")
        assert refused.status_code == 409 and "redraft trainer" in refused.text
        # What one is told to serve all serve.
        for version in (*ids, BARE_DRAFT):
            first.post(f"/adapters/{version}/activate")
            assert until(lambda version=version: second.serving == version) < 2.0
        fleet.trainer.start()
        run = second.post("/train")
        until(
            lambda: first.get(f"/train/{run['id']}")["state"] in {"promoted", "rejected"}, fleet.trainer.log.read_text
        )
        said = f"run {run['id']} "
        assert said in fleet.trainer.log.read_text()
        assert not [server for server in fleet.servers if said in server.log.read_text()]
        assert generate(second, "hello")["tokens"]
        assert fleet.trainer.stop() == 0


@pytest.mark.nightly
@pytest.mark.promise(6)
def test_a_switch_is_live_everywhere_within_two_seconds(
    tmp_path: Path, url: str, figure: Callable[[str], None]
) -> None:
    with Fleet(tmp_path, url, 4, idle=True) as fleet:
        ids = [ref.id for ref in register_adapters(fleet.servers[0], fleet.pair, 2)]
        fleet.start()
        took: list[float] = []
        for i in range(SWITCHES):
            version = (*ids, BARE_DRAFT)[i % 3]
            fleet.servers[i % 4].post(f"/adapters/{version}/activate")
            took.append(until(lambda v=version: all(server.serving == v for server in fleet.servers)))
        late = statistics.quantiles(took, n=100)[98]
        figure(f"{SWITCHES} switches of four servers, live everywhere in {late:.2f} s (p99)")
        assert late < 2.0, sorted(took)[-3:]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.promise(15)
def test_servers_and_a_trainer_outlive_kills_of_any_of_them(tmp_path: Path, url: str, seed: int) -> None:
    """One of five is killed again and again, mostly in the middle of a run. The others answer all the time, the run of a
    process that was killed is given up in time, and the last run of all is done as the first."""
    rng = random.Random(seed)
    with Fleet(tmp_path, url, 4) as fleet:
        fleet.start()
        fleet.trainer.start()
        database = Database(url)
        runs = Runs(database)
        lost, took = 0, list[float]()
        for kill in range(KILLS):
            fleet.traffic(4, seed=kill)
            with suppress(Unavailable):  # one is under way
                rng.choice(fleet.servers).post("/train")
            time.sleep(rng.uniform(0.0, 1.0))
            if rng.random() < 0.4:
                victim = fleet.trainer.pid
                fleet.trainer.stop(signal.SIGKILL)
                restart, others = fleet.trainer.start, fleet.servers
            else:
                server = rng.choice(fleet.servers)
                victim = server.pid
                server.kill()
                restart, others = server.start, [other for other in fleet.servers if other is not server]
            for other in others:
                assert generate(other, f"still there {kill}?")["tokens"]
            took.append(until(lambda pid=victim: pid not in pids(database) and not runs.orphaned(), seconds=LATE))
            lost += bool(runs.latest(1)) and runs.latest(1)[0].state is RunState.LOST
            restart()
        assert lost > 0, "kills that hit no run show little"
        until(lambda: runs.unfinished() == [], lambda: runs.latest(3))
        fleet.traffic(8, seed=KILLS)
        run = fleet.servers[1].post("/train")
        until(lambda: over(fleet, run["id"]))
        ended = runs.get(run["id"])
        assert ended.state in {RunState.PROMOTED, RunState.REJECTED}, ended
        active = [ref.id for ref in Adapters(database, fleet.adapters).all() if ref.state is AdapterState.ACTIVE]
        assert len(active) <= 1
        until(lambda: {server.serving for server in fleet.servers} == {*(active or [BARE_DRAFT])})
        database.close()


@pytest.mark.nightly
def test_a_trainer_that_is_stopped_beyond_its_lease_publishes_nothing_stale(tmp_path: Path, url: str) -> None:
    with Fleet(tmp_path, url, 2) as fleet:
        config = fleet.trainer.config
        config.write_text(config.read_text().replace("epochs = 1", "epochs = 5000"))
        fleet.start()
        fleet.trainer.start()
        fleet.traffic()
        first = fleet.servers[0].post("/train")["id"]
        until(lambda: fleet.servers[0].get(f"/train/{first}")["progress"]["step"] > 0)
        fleet.trainer.send(signal.SIGSTOP)
        took = until(lambda: over(fleet, first), seconds=2 * LATE)
        assert took < LATE
        second = fleet.servers[1].post("/train")["id"]
        until(lambda: over(fleet, second))
        done = fleet.servers[0].get(f"/train/{second}")
        assert done["state"] in {"promoted", "rejected"}, done
        fleet.trainer.send(signal.SIGCONT)
        until(lambda: "missed its lease and was removed" in fleet.trainer.log.read_text())
        time.sleep(1.0)
        assert fleet.servers[0].get(f"/train/{first}")["state"] == "lost"
        database = Database(url)
        assert [ref.run for ref in Adapters(database, fleet.adapters).all()] == [second]
        database.close()
        # It leads again, and does the next one.
        fleet.traffic(seed=1)
        third = fleet.servers[1].post("/train")["id"]
        until(lambda: fleet.servers[0].get(f"/train/{third}")["progress"]["step"] > 0)
        assert "started" not in fleet.servers[1].log.read_text()


@pytest.mark.nightly
@pytest.mark.promise(16)
def test_clocks_an_hour_apart_change_nothing(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server is an hour ahead, the trainer an hour behind. Each is late for the others by its own clock, and for nobody by
    the database's."""
    with Fleet(tmp_path, url, 2, idle=True) as fleet:
        fleet.servers[0].start()
        monkeypatch.setenv("PYTHONPATH", str(Path(skewed.__file__).parent))
        monkeypatch.setenv("SKEW", "3600")
        fleet.servers[1].start()
        monkeypatch.setenv("SKEW", "-3600")
        fleet.trainer.start()
        monkeypatch.delenv("PYTHONPATH")
        now = datetime.now(UTC)
        for seed in range(2):
            fleet.traffic(seed=seed)
            run = fleet.servers[1].post("/train")["id"]
            until(lambda run=run: over(fleet, run))
            done = fleet.servers[0].get(f"/train/{run}")
            assert done["state"] in {"promoted", "rejected"}, done
            finished = datetime.fromisoformat(done["finished_at"])
            assert abs(finished - now) < timedelta(minutes=5), "the database's time"
        assert fleet.servers[1].get("/adapters") == fleet.servers[0].get("/adapters")
        logs = [*(one.log.read_text() for one in fleet.servers), fleet.trainer.log.read_text()]
        assert not [log for log in logs if "missed its lease and was removed" in log]
        ahead, behind = (datetime.fromisoformat(re.findall(r"^(\d{4}-\S+Z) ", log, re.M)[-1]) for log in logs[1:])
        assert timedelta(hours=1.9) < ahead - behind < timedelta(hours=2.1), "their clocks were not off"


@pytest.mark.nightly
@pytest.mark.parametrize("old", [None, "0004"])
def test_eight_that_start_at_once_make_or_upgrade_the_database(
    tmp_path: Path, databases: PostgresDatabases, old: str | None
) -> None:
    url = databases.bare(tmp_path)
    if old is not None:
        command.upgrade(configured(url), old)
    with Fleet(tmp_path, url, 8) as fleet:
        fleet.start()
        fleet.traffic(16)
        run = fleet.servers[7].post("/train")["id"]
        until(lambda: over(fleet, run))
        assert fleet.servers[0].get(f"/train/{run}")["state"] in {"promoted", "rejected"}
        assert sum(f"run {run} " in server.log.read_text() for server in fleet.servers) == 1
