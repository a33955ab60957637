"""Commands, server and training child, started in a folder with another `service` package, which is never imported."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from service.core import RunState
from service.lifecycle.launcher import ProcessLauncher
from tests.support.other_package import folder_with_other_package, imported
from tests.support.tiny_server import generate, prompts, tiny_server, write_pair

SCRIPT = [str(Path(sys.executable).with_name("redraft"))]
MODULE = [sys.executable, "-m", "service.cli"]


def test_python_alone_would_import_the_other_package(tmp_path: Path) -> None:
    """Otherwise the other tests would prove nothing."""
    done = subprocess.run(MODULE, cwd=folder_with_other_package(tmp_path), capture_output=True, text=True)
    assert "the package of another project" in done.stderr
    assert imported(tmp_path)


@pytest.mark.parametrize(
    ("command", "environment"),
    [(SCRIPT, {}), ([sys.executable, "-P", *MODULE[1:]], {}), (MODULE, {"PYTHONSAFEPATH": "1"})],
    ids=["redraft", "python -P", "PYTHONSAFEPATH"],
)
def test_commands_run_from_there(command: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*command, "models", "list"],
        cwd=folder_with_other_package(tmp_path),
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "smollm2-135m" in done.stdout
    assert not imported(tmp_path)


def test_the_training_child_imports_this_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_with_other_package(tmp_path))
    process = ProcessLauncher(tmp_path / "training.log").launch({"kind": "nonsense"})
    try:
        end = time.monotonic() + 60
        while not (messages := process.poll()) and process.exit_code() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert [message["type"] for message in messages] == ["failed"], (tmp_path / "training.log").read_text()
    finally:
        process.stop(0.0)
    assert not imported(tmp_path)


@pytest.mark.nightly
def test_a_server_started_from_there_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tiny_server(tmp_path, write_pair(tmp_path))
    monkeypatch.chdir(folder_with_other_package(tmp_path))
    server.start()
    try:
        for line in prompts(8, seed=1):
            generate(server, line.prompt)
        run = server.post("/train")
        end = time.monotonic() + 120
        while not RunState((run := server.get(f"/train/{run['id']}"))["state"]).over:
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        assert server.stop() == 0
    assert run["state"] in {RunState.PROMOTED, RunState.REJECTED}, run["error"]
    assert not imported(tmp_path)
