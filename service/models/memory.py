"""Memory of this machine, in bytes, as the system counts it (Linux, macOS)."""

from __future__ import annotations

from pathlib import Path

import psutil


def total_bytes() -> int:
    """Physical memory."""
    return psutil.virtual_memory().total


def free_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process can have without swapping: what the system calls available, or what its control group has left where
    that is less. group: its folder (cgroup v2); elsewhere there is none, and its limit may be "max"."""
    available = psutil.virtual_memory().available
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return available
    # Cached files count as used, but the kernel gives them up before it refuses anything.
    used -= int(counts.get("inactive_file", 0))
    return min(available, max(limit - used, 0))
