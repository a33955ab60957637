"""Turns panics of Rust libraries (llguidance, tokenizers, pydantic) into ordinary errors."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from service.core.errors import RedraftError

MODULE = "pyo3_runtime"
"""The module of every PyO3 extension's PanicException. None of them can be imported."""


class LibraryPanic(RedraftError):
    """A Rust library panicked. Reported as an internal error, status 500."""


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Raises LibraryPanic in place of a panic.

    PanicException derives from BaseException, not from Exception, so ordinary handlers do not catch it. Its message may quote a
    prompt, so the new error keeps only its traceback.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != MODULE:
            raise
        raise LibraryPanic("a Rust library panicked").with_traceback(error.__traceback__) from None
