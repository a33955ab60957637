"""Memory that serving lends to the running child, and reclaims when requests need it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from service.core import MemoryLender, Unavailable

log = logging.getLogger(__name__)

LEND_SECONDS = 60.0
"""Longest wait for the engine, which lends memory between two rounds."""
SHORT = "requests need the memory it would take"
NEEDED = "requests needed the memory it took"


class Borrower(StrEnum):
    """What the child is started for."""

    RUN = "a run"
    PRACTICE = "practice"
    COMPARISON = "a comparison"


@dataclass(frozen=True, slots=True)
class LoanSize:
    """wanted: bytes that the child borrows if serving can spare them. least: bytes that it needs to work at all."""

    wanted: int
    least: int


class Loans:
    """The loan of the one child. lender: the engine that serves from the same memory; None when there is no such
    engine, or when memory is reserved for the child, which then takes what is free. sizes: by borrower."""

    def __init__(self, lender: MemoryLender | None = None, sizes: Mapping[Borrower, LoanSize] | None = None) -> None:
        self._lender = lender
        self._sizes = sizes or {}
        self.lent: int | None = None
        """Bytes that the child may take; None: whatever is free."""
        self._refused = ""

    def borrow(self, borrower: Borrower) -> bool:
        """Borrows memory for a child that is about to start. False when serving cannot spare it now."""
        if self._lender is None or (size := self._sizes.get(borrower)) is None:
            return True
        try:
            lent = self._lender.lend(size.wanted, size.least).result(LEND_SECONDS)
        except (Unavailable, TimeoutError):
            lent = 0
        self.lent = lent or None
        refused = "" if lent else f"{borrower} waits: {SHORT} ({size.least / 2**30:.1f} GiB)"
        if refused and refused != self._refused:
            log.info(refused)
        self._refused = refused
        return lent > 0

    def give_back(self) -> None:
        """Returns the loan: the child has ended, or none was started. Idempotent."""
        if self._lender is not None:
            self._lender.take_back()
        self.lent = None

    @property
    def needed_back(self) -> bool:
        """Whether requests wait for the lent memory."""
        return self._lender is not None and self._lender.loan_needed
