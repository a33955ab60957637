"""What is promised, which tests hold it, and what they measured: docs/promises.md.

A test says `@pytest.mark.promise(number)`, and by the fixture `figure` what it measured. As a plugin of pytest
(`-p tests.support.promises --promises FILE`) this writes the outcomes of such tests to a file.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "promises.md"

PROMISES: Mapping[int, str] = {
    1: "A greedy answer is the target's own, token for token (in half precision but for ties)",
    2: "A sampled answer has the target's distribution",
    3: "A seed repeats, whatever else is asked, and seeds differ",
    4: "The acceptance that is reported is what happened",
    5: "A broken draft costs speed and nothing else; a pair that does not fit is refused",
    6: "No request fails because of a swap",
    7: "A damaged adapter changes nothing",
    8: "Runs and adapters are in a legal state after any order of events",
    9: "A kill while an adapter is published leaves all of it or nothing",
    10: "A worse adapter does not stay",
    11: "New topics do not erase old ones",
    12: "What was acknowledged survives kill -9",
    13: "Writers, readers and clean-up never meet a locked database",
    14: "Recording never delays an answer: a database that is locked, full or gone costs counted losses",
    15: "One run at a time, and each text is new to a draft once",
    16: "Missed ticks are made up by one, and clocks may differ",
    17: "Training publishes no nonsense",
    18: "A database of any release is upgraded with all that is in it; a newer one is not touched",
    19: "Training does not starve serving, and its end leaves serving untouched",
    20: "Memory, files and threads stay as many",
    21: "Health tells the truth, and whoever waits gets an error",
    22: "More than fits is refused at once, and what was admitted finishes",
    23: "A client that has gone costs nothing more",
    24: "The server ends cleanly: answers are finished, a second signal ends it at once",
    25: "No input makes a 500",
    26: "Everything has a bound: bytes, tokens, time, rate",
    27: "Closed by default: every route asks for what the table says",
    28: "Names are never paths",
    29: "Data never becomes code",
    30: "Prompts stay private: not in logs, errors or metrics, and after an erasure nowhere",
    31: "Hostile traffic costs speed at most",
    32: "The documents say what the code does",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one test. figures: what it measured."""

    test: str
    promises: tuple[int, ...]
    outcome: str
    seconds: float
    figures: tuple[str, ...]


def marked() -> dict[int, list[str]]:
    """The tests of every promise, as file::name, found in the files' syntax."""
    found: dict[int, list[str]] = {number: [] for number in PROMISES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []:
                match decorator:
                    case ast.Call(func=ast.Attribute(attr="promise"), args=[ast.Constant(value=int(number))]):
                        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                        found.setdefault(number, []).append(f"{path.relative_to(ROOT)}::{node.name}")
                    case _:
                        pass
    return found


def document(outcomes: Sequence[Outcome], run: str) -> str:
    """docs/promises.md. run: when, where and what was run."""
    lines = [
        "# What is promised",
        "",
        "Each promise is held by tests. `just promises` runs them at full length, which takes an hour or two, and writes this",
        "page; the tests of every day hold all of them as well, at a length of minutes. Outcomes count parameters one by one.",
        "",
        run,
        "",
        "| | promise | tests | outcome | measured |",
        "|---|---|---|---|---|",
    ]
    tests = marked()
    for number, text in PROMISES.items():
        mine = [one for one in outcomes if number in one.promises]
        counts = Counter(one.outcome for one in mine)
        outcome = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name])
        figures = "; ".join(dict.fromkeys(figure for one in mine for figure in one.figures))
        names = ", ".join(f"`{name}`" for name in tests[number])
        lines.append(f"| {number} | {text} | {names} | {outcome or 'not run'} | {figures} |")
    return "\n".join(lines) + "\n"


def refreshed(text: str) -> str:
    """The document with today's promises and tests, and the outcomes and figures that it has."""
    tests = marked()

    def row(found: re.Match[str]) -> str:
        number = int(found[1])
        names = ", ".join(f"`{name}`" for name in tests[number])
        return f"| {number} | {PROMISES[number]} | {names} |{found[2]}"

    return re.sub(r"^\| (\d+) \| [^|]* \| [^|]* \|(.*)$", row, text, flags=re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------ the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    """--promises FILE."""
    parser.addoption("--promises", type=Path, help="Write the outcomes of tests that hold promises to this file.")


class _Outcomes:
    def __init__(self, to: Path) -> None:
        self._to = to
        self._found: list[Outcome] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        promises = tuple(
            value for name, value in report.user_properties if name == "promise" and isinstance(value, int)
        )
        if promises and (report.when == "call" or report.outcome != "passed"):
            figures = tuple(str(value) for name, value in report.user_properties if name == "figure")
            self._found.append(Outcome(report.nodeid, promises, report.outcome, report.duration, figures))

    def pytest_sessionfinish(self) -> None:
        self._to.write_text(json.dumps([asdict(one) for one in self._found], indent=1), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Collect the reports that workers send, where this process is none."""
    if (to := config.getoption("--promises")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(to))


if __name__ == "__main__":
    DOCUMENT.write_text(refreshed(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
