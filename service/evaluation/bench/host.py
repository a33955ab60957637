"""Describes the machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import mlx.core as mx

from service import FAST_BLAS
from service.core import package_version
from service.models.memory import total_bytes

_PACKAGES = ("redraft", "mlx", "mlx-lm")


def describe() -> dict[str, object]:
    """The machine by name, JSON-ready, without names of users, hosts or folders. precision: of loaded weights
    (models/pair.py)."""
    device = _device()
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(total_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "device": device,
        "accelerator": None if device == "cpu" else str(mx.device_info().get("device_name", "unknown")),
        "precision": "float32" if device == "cpu" else "as stored",
        "blas": _blas(),
        "versions": {name: package_version(name) for name in _PACKAGES},
    }


def label() -> str:
    """A short name of this machine, for figures of several machines in one document."""
    found = describe()
    return f"{found['accelerator'] or found['processor']}, {found['cores']} cores, {found['device']}, {found['blas']}"


def sentence() -> str:
    """The machine, package versions, device, precision of the weights and BLAS as one sentence."""
    found = describe()
    versions = ", ".join(f"{name} {package_version(name)}" for name in _PACKAGES)
    accelerator = f"{found['accelerator']}; " if found["accelerator"] else ""
    return (
        f"{accelerator}{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB; {found['system']}; "
        f"{versions}; MLX on {found['device']}, weights {found['precision']}, BLAS {found['blas']}."
    )


def _device() -> str:
    if mx.default_device().type == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _blas() -> str:
    if FAST_BLAS is not None:
        return Path(FAST_BLAS).name
    return "Accelerate" if sys.platform == "darwin" else "as MLX ships it"


def _processor() -> str:
    try:
        if sys.platform == "darwin":
            asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown processor")
