"""Panics of Rust libraries are ordinary errors."""

from __future__ import annotations

import traceback

import pytest

from service.core import LibraryPanic, panics_as_errors
from tests.support.panicking import panic


def test_a_panic_is_no_exception_until_it_is_made_one() -> None:
    with pytest.raises(BaseException, match="unwrap") as raised:
        panic()
    assert not isinstance(raised.value, Exception)
    with pytest.raises(LibraryPanic) as error, panics_as_errors():
        panic("a secret")
    assert "secret" not in str(error.value)
    assert error.value.__suppress_context__
    assert "in panic" in "".join(traceback.format_tb(error.value.__traceback__))


@pytest.mark.parametrize("other", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_nothing_else_is_changed(other: type[BaseException]) -> None:
    with pytest.raises(other), panics_as_errors():
        raise other
