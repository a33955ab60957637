"""The machine as `redraft doctor` reports it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from service.models import machine as machine_module
from service.models.machine import examine, outdated
from service.models.pair import load_model
from service.models.weights import bytes_in_memory
from tests.support.other_package import folder_with_other_package, imported
from tests.support.typed import leaves

MakeModel = Callable[..., Path]


def test_it_measures_this_machine(tmp_path: Path, make_model: MakeModel) -> None:
    home = tmp_path / "not" / "yet"
    folder = make_model("m")
    machine = examine(home, [str(folder)])
    assert not home.exists()
    assert machine.device in {"cpu", "metal", "cuda"}
    assert machine.gflops is not None
    assert machine.gflops > 0
    assert machine.needed == bytes_in_memory(folder, widen=machine.device == "cpu")
    assert machine.disk_free > 0
    assert 0 < machine.host_memory_free < machine.host_memory
    assert {"mlx", "mlx-lm"} <= machine.versions.keys()
    assert (machine.slow_gflops is None) == (machine.blas is None)


@pytest.mark.skipif(
    sys.platform != "linux" or mx.default_device().type != mx.cpu, reason="only a Linux CPU has two BLAS"
)
def test_a_missing_fast_blas_is_a_problem_with_a_remedy(tmp_path: Path) -> None:
    machine = _examine_in(tmp_path, {"REDRAFT_BLAS": "shipped"})
    assert machine["blas"] is None
    assert machine["slow_gflops"] is None
    assert not any("BLAS" in problem for problem in machine["problems"]), "it costs speed, and serves"
    warnings = [warning for warning in machine["warnings"] if "BLAS" in warning]
    assert len(warnings) == 1
    assert "scipy-openblas32" in warnings[0]
    assert "unset REDRAFT_BLAS" in warnings[0]


def test_a_broken_mlx_is_a_problem_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ImportError('libmlx is missing')")
    machine = _examine_in(tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert machine["device"] is None
    assert machine["gflops"] is None
    assert any("MLX does not run" in problem and "libmlx is missing" in problem for problem in machine["problems"])


def test_a_model_that_cannot_be_found_is_a_problem(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_probe", lambda **_: {"device": "cpu", "gflops": 1.0})
    (tmp_path / "empty").mkdir()
    names = ["nothing-here", str(tmp_path / "empty"), str(make_model("m")), "some/hub-name"]
    found = examine(tmp_path / "home", names).problems
    assert [problem for problem in found if "nothing-here" in problem or "empty" in problem] == found
    assert len(found) == 2


def test_it_measures_from_a_folder_with_another_service_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_with_other_package(tmp_path))
    assert examine(tmp_path / "home").device is not None
    assert not imported(tmp_path)


def _examine_in(home: Path, environment: dict[str, str]) -> dict[str, Any]:
    code = """
import dataclasses, json, sys
from pathlib import Path
from service.models.machine import examine
print(json.dumps(dataclasses.asdict(examine(Path(sys.argv[1])))))
"""
    child = subprocess.run(
        [sys.executable, "-c", code, str(home)],
        env={"PATH": ""} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return json.loads(child.stdout)


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({"mlx": "0.32.0", "mlx-lm": "0.32.2"}, ["mlx 0.32.0 is too old"]),
        ({"mlx": "0.32.1", "mlx-lm": "0.31.3"}, ["mlx-lm 0.31.3 is too old"]),
        ({"mlx-lm": "0.33"}, ["mlx is not installed"]),
        ({"mlx": "0.32.1.dev3", "mlx-lm": "1.0.0rc1"}, []),
    ],
)
def test_old_versions_are_named(versions: dict[str, str], named: list[str]) -> None:
    found = outdated(versions)
    assert len(found) == len(named)
    assert all(line.startswith(name) for line, name in zip(found, named, strict=True))


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="weights are widened on the CPU only")
@pytest.mark.parametrize("bits", [None, 4])
def test_the_estimated_memory_equals_the_memory_used(make_model: MakeModel, bits: int | None) -> None:
    folder = make_model("m", bits=bits)
    parameters = leaves(load_model(folder).model.parameters())
    assert bytes_in_memory(folder, widen=True) == sum(value.nbytes for _, value in parameters)
