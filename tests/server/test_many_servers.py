"""Real servers and a trainer that share one PostgreSQL database."""

from __future__ import annotations

from pathlib import Path

from service.core import BARE_DRAFT
from tests.support.databases import POSTGRES, PostgresDatabases
from tests.support.fleet import Fleet, until
from tests.support.tiny_server import generate, register_adapters

pytestmark = POSTGRES


def test_a_trainer_does_the_runs_of_servers_that_train_nothing(tmp_path: Path, databases: PostgresDatabases) -> None:
    with Fleet(tmp_path, databases.empty(tmp_path), 2, idle=True) as fleet:
        first, second = fleet.servers
        ids = [ref.id for ref in register_adapters(first, fleet.pair, 2)]
        fleet.start()
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
