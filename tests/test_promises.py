"""docs/promises.md names every promise with the tests that hold it, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.promises import DOCUMENT, PROMISES, Outcome, document, marked, refreshed


def test_every_promise_is_held_by_a_test_and_every_number_is_a_promise() -> None:
    assert {number for number, tests in marked().items() if tests} == set(PROMISES)


def test_the_document_names_the_tests_of_today() -> None:
    """`just docs` brings it up to date."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert refreshed(text) == text
    tests = marked()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.*?) \|", text, re.MULTILINE)
    assert {int(number): (text, re.findall(r"`(.+?)`", names)) for number, text, names in rows} == {
        number: (text, tests[number]) for number, text in PROMISES.items()
    }


def test_outcomes_and_figures_are_shown() -> None:
    found = [
        Outcome("tests/a.py::test_x[1]", (6, 7), "passed", 1.0, ("3 swaps",)),
        Outcome("tests/a.py::test_x[2]", (6,), "failed", 1.0, ("3 swaps", "1 error")),
    ]
    rows = dict(re.findall(r"^\| (\d+) \|.*\| (.*? \| .*?) \|$", document(found, "Run here."), re.MULTILINE))
    assert (rows["6"], rows["7"]) == ("1 passed, 1 failed | 3 swaps; 1 error", "1 passed | 3 swaps")
    assert rows["8"].startswith("not run")


def test_a_test_says_what_it_measured(figure: Callable[[str], None], request: pytest.FixtureRequest) -> None:
    figure("seven")
    assert ("figure", "seven") in request.node.user_properties
