"""The limit of open files: kept by imports, raised by a server, stated by doctor. Each limit is that of a real process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from service import open_files
from service.open_files import MAX_SOFT_LIMIT, OpenFilesLimit, raise_open_files_limit
from tests.support.tiny_server import tiny_server, write_pair

INFINITE = resource.RLIM_INFINITY
IMPORTS = (
    "import mlx_lm",
    "import mlx_lm.models.llama",
    "from mlx_lm.tokenizer_utils import TokenizerWrapper",
    "import importlib; importlib.import_module('mlx_lm.utils')",
    "import service.models.pair",
    "import service.learning.job",
    "import service.engine.kv.recurrent",
)
SHOWN = "; import resource as r, sys; assert 'mlx_lm.utils' in sys.modules; print(*r.getrlimit(r.RLIMIT_NOFILE))"


def limited(command: list[str], soft: int, hard: int) -> list[str]:
    """A command line whose process has these limits. Lowering the hard limit of this process would last."""
    return ["bash", "-c", f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"', "limited", *command]


def python(code: str, soft: int, hard: int) -> str:
    command = limited([sys.executable, "-W", "error", "-c", code], soft, hard)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("statement", IMPORTS)
def test_importing_mlx_lm_keeps_the_limit(statement: str) -> None:
    assert python(f"import service; {statement}{SHOWN}", 700, 1024) == "700 1024"


def test_importing_mlx_lm_alone_changes_the_limit() -> None:
    """What the other tests hold against: without this package the limit changes, or the import fails."""
    code = """
import resource
try:
    import mlx_lm
except ValueError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert python(code, 700, 1024) != "700 1024"


def test_a_later_setrlimit_works() -> None:
    code = "import service, mlx_lm, resource as r; r.setrlimit(r.RLIMIT_NOFILE, (300, 900))"
    assert python(code + SHOWN, 700, 1024) == "300 900"


@pytest.mark.parametrize(("soft", "hard", "raised"), [(1024, 1024, 1024), (600, 5000, 5000)])
def test_serve_starts_and_raises_its_soft_limit(tmp_path: Path, soft: int, hard: int, raised: int) -> None:
    server = tiny_server(tmp_path, write_pair(tmp_path))
    server._command = limited(list(server._command), soft, hard)
    server.start()
    try:
        assert server._process is not None
        assert psutil.Process(server._process.pid).rlimit(psutil.RLIMIT_NOFILE) == (raised, hard)
        assert httpx.post(f"{server.url}/generate", json={"prompt": "ab", "max_tokens": 3}).status_code == 200
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(("hard", "warned"), [(1024, False), (512, True)])
def test_doctor_states_the_limit(tmp_path: Path, hard: int, warned: bool) -> None:
    config, found = tmp_path / "settings.toml", tmp_path / "doctor.json"
    config.write_text(f"home = {json.dumps(str(tmp_path / 'home'))}\n[models]\ndraft = 'none'\n")
    command = [sys.executable, "-m", "service.cli", "doctor", "--config", str(config), "--json", str(found)]
    done = subprocess.run(
        limited(command, 400, hard),
        env=os.environ | {"COLUMNS": "240"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stderr and found.is_file(), done.stderr
    assert f"400; hard limit {hard:,}" in " ".join(done.stdout.split())
    report = json.loads(found.read_text())
    assert report["open_files"] == {"soft": 400, "hard": hard}
    assert any("open files" in warning for warning in report["warnings"]) == warned
    assert not any("open files" in problem for problem in report["problems"])


class System:
    """A stand-in for setrlimit of systems that are not at hand. refuses: soft limits that it does not take."""

    def __init__(self, soft: int, hard: int, refuses: Callable[[int], bool] = lambda soft: False) -> None:
        self.limits, self._refuses = (soft, hard), refuses

    def getrlimit(self, kind: int) -> tuple[int, int]:
        assert kind == resource.RLIMIT_NOFILE
        return self.limits

    def setrlimit(self, kind: int, limits: tuple[int, int]) -> None:
        assert limits[1] == self.limits[1], "the hard limit is kept"
        if self._refuses(limits[0]):
            raise ValueError("current limit exceeds maximum limit")
        self.limits = limits


@pytest.mark.parametrize(
    ("system", "soft"),
    [
        (System(256, INFINITE), MAX_SOFT_LIMIT),  # macOS
        (System(256, INFINITE, lambda soft: soft > 10_240), 10_240),  # macOS before 10.15 or so: OPEN_MAX
        (System(256, INFINITE, lambda soft: True), 256),
        (System(1024, 1_048_576), MAX_SOFT_LIMIT),  # systemd
        (System(1024, 20_000), 20_000),
        (System(100_000, 1_048_576), 100_000),
        (System(INFINITE, INFINITE), None),
        (System(512, 512), 512),
        (System(20_000, 200_000, lambda soft: soft > 20_000), 20_000),
    ],
    ids=lambda value: str(getattr(value, "limits", value)),
)
def test_the_soft_limit_is_raised_as_far_as_the_system_allows(
    system: System, soft: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files.resource, "getrlimit", system.getrlimit)
    monkeypatch.setattr(open_files.resource, "setrlimit", system.setrlimit)
    hard = None if system.limits[1] == INFINITE else system.limits[1]
    assert raise_open_files_limit() == OpenFilesLimit(soft, hard)
