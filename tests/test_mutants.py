"""The list of mutants is valid; `just mutants` runs them."""

import pytest

from tests.mutants import ROOT, Mutant, load, survives

MUTANTS = load()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_every_change_still_applies_and_names_a_test(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    file, _, name = mutant.test.partition("::")
    source = (ROOT / file).read_text()
    assert not name or f"def {name.partition('[')[0]}(" in source


def test_names_are_not_used_twice() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


HERE = "tests/test_mutants.py::test_names_are_not_used_twice"


def test_a_change_that_applies_several_times_is_reported() -> None:
    assert "times" in (survives(Mutant("several", "service/core/errors.py", '"""', '"""', HERE)) or "")


@pytest.mark.nightly
def test_a_change_that_hurts_nothing_is_reported() -> None:
    same = Mutant("same", "tests/mutants.py", "FAILED = 1\n", "FAILED = 1\n\n", HERE)
    assert survives(same) == f"{HERE} still passes"
