"""Whether the machine can spare what training takes: power, heat and memory, as far as the system reports them.

Parsing is pure. Linux is read through kernel files, macOS through Apple's tools. What a system does not report (a
virtual machine has neither battery nor thermometer) never pauses training.
"""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar, cast

from service.settings import TrainingSettings

EVERY_SECONDS = 30.0
TOOL_SECONDS = 5.0
AWAY_SECONDS = 300.0
"""A person who has not touched keyboard or pointer for this long counts as away."""
STALLED = 10.0
"""Percent of the last ten seconds in which a task waited for memory; above it, the machine is swapping."""
WARNING = 2
"""Level of macOS memory pressure (1 normal, 2 warning, 4 critical) at which training pauses."""
LIMITING = frozenset({"passive", "hot", "critical"})
"""Types of thermal trip points at which the kernel throttles the machine or is about to shut it down."""


class Strain(StrEnum):
    """What the machine is short of. An automatic run pauses for it. For MEMORY the run ends, because a paused run keeps
    its memory."""

    BATTERY = "on battery"
    HEAT = "the machine is hot"
    MEMORY = "memory is short"


# ------------------------------------------------------------------------------------------------------------- pure


def discharging(supplies: Iterable[Mapping[str, str]]) -> bool:
    """Whether a Linux machine runs on battery. supplies: the files of each folder in /sys/class/power_supply. Batteries
    of devices (a mouse) do not count."""
    own = [supply for supply in supplies if supply.get("scope") != "Device"]
    outside = any(s.get("type") in {"Mains", "USB"} and s.get("online") == "1" for s in own)
    return not outside and any(s.get("type") == "Battery" and s.get("status") == "Discharging" for s in own)


def stalled(pressure: str) -> bool:
    """Whether a Linux machine is short of memory, from /proc/pressure/memory."""
    found = re.search(r"^some avg10=(\d+(?:\.\d+)?)", pressure, re.MULTILINE)
    return found is not None and float(found[1]) >= STALLED


def throttled(zone: Mapping[str, str]) -> bool:
    """Whether a Linux thermal zone has reached a trip point at which the kernel acts. zone: the files of its folder."""
    with contextlib.suppress(KeyError, ValueError):
        heat = int(zone["temp"])
        for name, kind in zone.items():
            if name.startswith("trip_point_") and name.endswith("_type") and kind in LIMITING:
                limit = int(zone[name.removesuffix("type") + "temp"])
                if 0 < limit <= heat:
                    return True
    return False


def drawn_from_battery(pmset_batt: str) -> bool:
    """Parses `pmset -g batt`."""
    return "drawing from 'Battery Power'" in pmset_batt


def slowed_down(pmset_therm: str) -> bool:
    """Parses `pmset -g therm`: a recorded warning level, or a CPU speed limit below 100 %."""
    speed = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", pmset_therm)
    level = re.search(r"thermal (?:warning )?level\W+(\d+)", pmset_therm, re.IGNORECASE)
    return (speed is not None and int(speed[1]) < 100) or (level is not None and int(level[1]) > 0)


def squeezed(pressure_level: str) -> bool:
    """Parses `sysctl -n kern.memorystatus_vm_pressure_level`."""
    return pressure_level.strip().isdigit() and int(pressure_level) >= WARNING


def untouched_seconds(ioreg: str) -> float | None:
    """Parses `ioreg -c IOHIDSystem`: seconds since the last use of keyboard or pointer on a Mac; None: unknown."""
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', ioreg)
    return None if found is None else int(found[1]) / 1e9


# ---------------------------------------------------------------------------------------------------------- effects


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # missing or unreadable
        return ""


def _folders(root: Path, pattern: str, *names: str) -> list[dict[str, str]]:
    """The files with these names in each matching folder."""
    return [{file.name: _read(file) for name in names for file in folder.glob(name)} for folder in root.glob(pattern)]


def _ask(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def on_linux(training: TrainingSettings, root: Path = Path("/")) -> Strain | None:
    """Why training should pause, or None. root: the folder that contains /sys and /proc."""
    supplies = _folders(root / "sys/class/power_supply", "*", "type", "status", "scope", "online")
    if training.pause_on_battery and discharging(supplies):
        return Strain.BATTERY
    zones = _folders(root / "sys/class/thermal", "thermal_zone*", "temp", "trip_point_*")
    if training.pause_when_hot and any(map(throttled, zones)):
        return Strain.HEAT
    if training.pause_on_memory_pressure and stalled(_read(root / "proc/pressure/memory")):
        return Strain.MEMORY
    return None


def on_macos(training: TrainingSettings, ask: Callable[..., str] = _ask) -> Strain | None:
    """Why training should pause, or None, from the output of macOS's tools."""
    if training.pause_on_battery and drawn_from_battery(ask("/usr/bin/pmset", "-g", "batt")):
        return Strain.BATTERY
    if training.pause_when_hot and slowed_down(ask("/usr/bin/pmset", "-g", "therm")):
        return Strain.HEAT
    level = ("/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level")
    if training.pause_on_memory_pressure and squeezed(ask(*level)):
        return Strain.MEMORY
    return None


def user_on_macos(ask: Callable[..., str] = _ask) -> str | None:
    """A message when a person is using this Mac, otherwise None."""
    untouched = untouched_seconds(ask("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"))
    return "the machine is in use" if untouched is not None and untouched < AWAY_SECONDS else None


def somebody_here() -> Callable[[], str | None]:
    """Returns the check whether a person is using this machine. Linux does not report that."""
    return Cached(user_on_macos) if sys.platform == "darwin" else lambda: None


def machine_strain(training: TrainingSettings) -> Callable[[], Strain | None]:
    """Returns the check why training should pause now: the checks for this system, macOS or Linux, that `training` enables."""
    check = on_macos if sys.platform == "darwin" else on_linux
    return Cached(lambda: check(training))


T = TypeVar("T")


class Cached(Generic[T]):
    """The result of `check`, cached for EVERY_SECONDS."""

    def __init__(self, check: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._check = check
        self._clock = clock
        self._result: T | None = None
        self._checked = -math.inf

    def __call__(self) -> T:
        """Calls `check` at most once every EVERY_SECONDS."""
        now = self._clock()
        if now - self._checked >= EVERY_SECONDS:
            self._result, self._checked = self._check(), now
        return cast("T", self._result)
