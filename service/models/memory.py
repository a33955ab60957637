"""Total and available memory of this machine and of MLX's device, in bytes (Linux, macOS), and assumptions about machines of
other sizes."""

from __future__ import annotations

from pathlib import Path

import psutil

OTHERS = 6 * 2**30
"""Bytes that macOS and other programs are assumed to use on a machine of which only the size is known."""
_SMALL, _SMALL_SHARE, _LARGE_SHARE = 36 * 2**30, 2 / 3, 3 / 4


def working_set(total: int) -> int:
    """Bytes that Metal recommends to use at once on a Mac with this much memory (`max_recommended_working_set_size`): two
    thirds up to 36 GiB, three quarters beyond. `sudo sysctl iogpu.wired_limit_mb=...` sets another limit."""
    return int(total * (_SMALL_SHARE if total <= _SMALL else _LARGE_SHARE))


def assumed_bytes(total: int) -> int:
    """Bytes that a server is assumed to have, weights included, on a machine of this size: within Metal's recommendation, and
    without OTHERS."""
    return max(min(working_set(total), total - OTHERS), 0)


def total_bytes() -> int:
    """Physical memory."""
    return psutil.virtual_memory().total


def free_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can allocate without swapping: the system's available memory, or the rest of its control group's
    limit if that is less. group: the folder of a cgroup v2; ignored if it does not exist or sets no limit."""
    available = psutil.virtual_memory().available
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return available
    # The group's usage includes the page cache, which the kernel reclaims before it refuses an allocation.
    used -= int(counts.get("inactive_file", 0))
    return min(available, max(limit - used, 0))


def device_free_bytes() -> int:
    """Bytes that this process can still allocate on MLX's device."""
    import mlx.core as mx

    if mx.default_device().type == mx.cpu:
        return free_bytes()
    info = mx.device_info()
    if "free_memory" in info:
        # CUDA.
        return int(info["free_memory"])
    # Metal shares the machine's memory, and recommends how much of it to use at once.
    return min(int(info["max_recommended_working_set_size"]) - mx.get_active_memory(), free_bytes())
