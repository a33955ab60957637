"""Processes that claim runs of one PostgreSQL database in the same moment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.store.database import Database
from service.store.log.generations import Generations
from service.store.registry.runs import Runs
from tests.support.databases import POSTGRES, PostgresDatabases
from tests.support.store_rows import generation

ROOT = Path(__file__).resolve().parents[2]


RACES = 1000


@POSTGRES
@pytest.mark.nightly
@pytest.mark.promise(15)
def test_of_four_that_claim_at_once_one_gets_the_run(
    tmp_path: Path, databases: PostgresDatabases, figure: Callable[[str], None]
) -> None:
    url = databases.empty(tmp_path)
    database = Database(url)
    Generations(database).add([generation(), generation()]).result()
    command = [sys.executable, "-m", "tests.support.racing", url]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(4)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        for race in range(RACES):
            for child in children:
                assert child.stdin is not None
                child.stdin.write(f"draft {race}\n")
                child.stdin.flush()
            got = [int(child.stdout.readline()) for child in children if child.stdout is not None]
            assert sorted(map(bool, got)) == [False, False, False, True], got
    finally:
        for child in children:
            child.communicate(timeout=60)
    found = Runs(database).latest(2 * RACES)
    assert len(found) == len({run.fencing for run in found}) == RACES
    figure(f"{RACES} races of four processes, one run each")
    assert all(Runs(database).texts(run.id) == 2 for run in found[:10]), "each draft learns each text"
    database.close()
