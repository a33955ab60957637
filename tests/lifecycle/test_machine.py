"""Reports of real systems on power, heat and memory, and their effect on a run."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from service.core import RunState
from service.lifecycle.machine import (
    EVERY_SECONDS,
    Cached,
    Strain,
    discharging,
    drawn_from_battery,
    machine_strain,
    on_linux,
    on_macos,
    slowed_down,
    squeezed,
    stalled,
    throttled,
)
from service.lifecycle.training import MAX_PAUSE_SECONDS
from service.metrics import Metrics
from service.settings import TrainingSettings
from tests.support.lifecycle_server import WHO, Installation

BATTERY = {"type": "Battery", "status": "Discharging"}
MOUSE = {"type": "Battery", "status": "Discharging", "scope": "Device"}
MAINS, UNPLUGGED = {"type": "Mains", "online": "1"}, {"type": "Mains", "online": "0"}


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ([], False),
        ([MAINS], False),
        ([UNPLUGGED, BATTERY], True),
        ([BATTERY], True),
        ([UNPLUGGED, {"type": "Battery", "status": "Not charging"}], False),
        ([MAINS, BATTERY], False),
        ([{"type": "USB", "online": "1"}, BATTERY], False),
        ([{"type": "USB", "online": "0"}, UNPLUGGED, BATTERY], True),
        ([UNPLUGGED, MOUSE], False),
        ([{}], False),
    ],
)
def test_linux_power(supplies: list[Mapping[str, str]], expected: bool) -> None:
    assert discharging(supplies) is expected


QUIET = """some avg10=0.00 avg60=0.12 avg300=0.05 total=1843201
full avg10=0.00 avg60=0.00 avg300=0.00 total=912344
"""
SWAPPING = """some avg10=37.81 avg60=21.40 avg300=8.02 total=98211043
full avg10=30.02 avg60=17.55 avg300=6.11 total=81120334
"""


@pytest.mark.parametrize(("text", "expected"), [(QUIET, False), (SWAPPING, True), ("", False), ("nonsense", False)])
def test_linux_memory(text: str, expected: bool) -> None:
    assert stalled(text) is expected


ZONE = {
    "temp": "61000",
    "trip_point_0_temp": "105000",
    "trip_point_0_type": "critical",
    "trip_point_1_temp": "98000",
    "trip_point_1_type": "passive",
    "trip_point_2_temp": "50000",
    "trip_point_2_type": "active",  # only a fan
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"temp": "98000"}, True),
        ({"temp": "97999"}, False),
        ({"trip_point_1_temp": "-274000"}, False),
        ({"trip_point_1_temp": "0"}, False),
        ({"temp": ""}, False),
        ({"trip_point_0_temp": "", "temp": "99000"}, False),
    ],
)
def test_linux_heat(changes: dict[str, str], expected: bool) -> None:
    assert throttled({**ZONE, **changes}) is expected
    assert not throttled({})


ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=21823587)\t72%; discharging; 3:15 remaining present: true
"""
PLUGGED_IN = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=21823587)\t100%; charged; 0:00 remaining present: true
"""
COOL = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
LIMITED = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
2020-11-24 13:10:40 +0100 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 35
"""


def test_macos_reports_power_heat_and_memory() -> None:
    assert drawn_from_battery(ON_BATTERY) and not drawn_from_battery(PLUGGED_IN) and not drawn_from_battery("")
    assert slowed_down(LIMITED)
    assert not slowed_down(COOL) and not slowed_down("") and not slowed_down(LIMITED.replace("= 35", "= 100"))
    assert slowed_down("Thermal Warning Level = 1\n") and not slowed_down("Thermal Warning Level = 0\n")
    assert [squeezed(level) for level in ("1\n", "2\n", "4\n", "")] == [False, True, True, False]


ALL_OFF = {"pause_on_battery": False, "pause_when_hot": False, "pause_on_memory_pressure": False}


def machine(root: Path) -> None:
    """A Linux laptop that runs on battery, is hot and swaps."""
    files = {
        "sys/class/power_supply/BAT0": BATTERY,
        "sys/class/power_supply/AC": UNPLUGGED,
        "sys/class/thermal/thermal_zone0": {**ZONE, "temp": "99000"},
        "proc/pressure": {"memory": SWAPPING},
    }
    for folder, contents in files.items():
        (root / folder).mkdir(parents=True)
        for name, text in contents.items():
            (root / folder / name).write_text(text.rstrip() + "\n")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("pause_on_battery", "on battery"),
        ("pause_when_hot", "the machine is hot"),
        ("pause_on_memory_pressure", "memory is short"),
    ],
)
def test_each_setting_controls_one_reason(tmp_path: Path, setting: str, reason: str) -> None:
    machine(tmp_path)
    only = TrainingSettings(**{**ALL_OFF, setting: True})
    assert on_linux(only, tmp_path) == reason
    assert on_linux(TrainingSettings(**ALL_OFF), tmp_path) is None
    assert on_linux(only, tmp_path / "a machine that tells nothing") is None
    answers = {"batt": ON_BATTERY, "therm": LIMITED, "kern.memorystatus_vm_pressure_level": "2\n"}
    assert on_macos(only, lambda *command: answers[command[-1]]) == reason
    assert on_macos(TrainingSettings(**ALL_OFF), lambda *command: answers[command[-1]]) is None
    assert on_macos(only, lambda *command: "") is None


def test_asking_this_machine_works_and_tools_that_are_missing_say_nothing() -> None:
    assert machine_strain(TrainingSettings())() in {None, "on battery", "the machine is hot", "memory is short"}
    assert on_macos(TrainingSettings(), lambda *command: "") is None


def test_the_system_is_asked_now_and_then() -> None:
    asked, now = [0], [100.0]

    def read_strain() -> str:
        asked[0] += 1
        return f"reason {asked[0]}"

    surroundings = Cached(read_strain, lambda: now[0])
    assert [surroundings() for _ in range(3)] == ["reason 1"] * 3
    now[0] += EVERY_SECONDS - 1
    assert surroundings() == "reason 1"
    now[0] += 1
    assert surroundings() == "reason 2"


# ----------------------------------------------------------------------------------------------- effect on runs


def test_on_battery_only_requested_runs_start(installation: Installation) -> None:
    with installation.server() as server:
        server.strain = Strain.BATTERY
        server.traffic()
        for _ in range(5):
            server.supervisor.tick()
        assert not server.runs.latest(1)
        run = server.supervisor.request_training(None)
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.runs.get(run.id).progress.paused is None


def test_a_paused_run_reports_the_reason_and_its_time_limit_pauses(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server(timeout_seconds=60.0) as server:
        server.traffic()
        server.tick_until(lambda: bool(server.runs.latest(1)) and server.runs.latest(1)[0].progress.step == 1)

        def paused() -> str | None:
            server.supervisor.tick()
            return server.runs.latest(1)[0].progress.paused

        assert paused() is None
        server.busy = True
        assert paused() == "serving is busy"
        server.strain = Strain.BATTERY
        assert paused() == "on battery"
        assert server.runs.latest(1)[0].progress.step == 1, "the rest of its progress stays"
        installation.clock_offset = timedelta(seconds=MAX_PAUSE_SECONDS - 10)
        assert paused() == "on battery"
        server.busy, server.strain = False, None
        assert paused() is None
        installation.clock_offset += timedelta(seconds=50)
        assert paused() is None
        assert [run.state for run in server.runs.latest(2)] == [RunState.TRAINING], "no second run after a crash"
        assert server.runs.loss_curve(1) == [(1, 1.5)], "pausing is no step"
        installation.clock_offset += timedelta(seconds=20)
        server.tick_until(server.ended(RunState.TIMED_OUT))


def test_progress_of_a_paused_child_does_not_hide_the_pause(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.supervisor.tick()
        server.strain = Strain.HEAT
        server.tick_until(lambda: server.runs.latest(1)[0].progress.step == 1)
        assert server.runs.latest(1)[0].progress.paused == "the machine is hot"


def test_a_comparison_runs_on_battery(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        server.strain = Strain.BATTERY
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))


def test_latencies_during_a_run_are_reported_separately(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        metrics = Metrics(3)
        run = server.runs.latest(1)[0]
        paused = replace(run, progress=replace(run.progress, paused="on battery"))
        for now, seconds in ((None, 1.0), (run, 2.0), (paused, 4.0), (replace(run, state=RunState.CRASHED), 8.0)):
            if now is not None:
                metrics.training(now)
            metrics.first_token(seconds)
            metrics.next_tokens(seconds)
            text = metrics.exposition(None)[0].decode()
            assert f"redraft:training_paused {float(now is paused)}" in text
        for name in ("time_to_first_token", "inter_token_latency"):
            assert f"redraft:{name}_seconds_sum 15.0" in text
            assert f"redraft:training_{name}_seconds_sum 2.0" in text
