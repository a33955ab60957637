"""The memory of a batch's keys and values: what they take, and a budget for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import Prompt
from service.engine import device
from service.engine.batch import Batch
from service.engine.kv.budget import HEADROOM, Budget
from service.engine.request import Request

ANSWER_SHARE = 8
"""Space reserved for the start of an answer is the prompt's length divided by this, at least HEADROOM, because a batch that
grows copies its rows."""


@dataclass(slots=True)
class _Loan:
    """size: bytes of the budget that are on loan. needed: rows need them."""

    size: int
    needed: bool = False


class RowMemory:
    """The memory of a batch's rows. paged: whether rows are in pages."""

    def __init__(self, batch: Batch, *, paged: bool) -> None:
        self._batch = batch
        self._paged = paged
        self.budget: Budget | None = None
        """None: no limit."""
        self._loan: _Loan | None = None
        self._spare = 0
        self._prefilling: Sequence[int] = ()
        """Positions of the prefilling texts, as last reported."""

    def limit(self, budget: Budget, spare: int = 0) -> None:
        """Keep rows and cached prefixes within a budget. With pages, all of it is allocated at the first call. With rectangles,
        cached prefixes get what rows leave and are evicted when rows need it. spare: free bytes outside the budget."""
        self.budget, self._spare = budget, spare
        if self._batch.prefix is not None and not self._paged:
            self._batch.prefix.room = self._prefix_room
        # Rows of a model whose layers are all recurrent take no pages.
        if self._paged and budget.row.first:
            for pool, pages in zip(self._batch.pools, budget.pages, strict=True):
                pool.set_size(pages)

    def reserved(self, row: Request) -> int:
        """Positions for which a request's buffers are allocated when its prefill begins: its text and space for the next part
        of its answer."""
        return self.reserved_for(len(row.tokens), row.prompt)

    def reserved_for(self, tokens: int, prompt: Prompt) -> int:
        """The same for a request with this many tokens of prompt and answer."""
        if self._paged:
            return tokens + HEADROOM
        left = max(len(prompt.tokens) + prompt.sampling.max_tokens - tokens, 0)
        return tokens + min(left, max(HEADROOM, tokens // ANSWER_SHARE))

    def has_room(self, prefilling: Sequence[int]) -> bool:
        """Whether the rows, with space for the next part of their answers, fit together with prefilling texts of these
        positions (`reserved`). Evicts cached prefixes as needed."""
        running = [length + HEADROOM for length in self._lengths()]
        if not self.fits(running, prefilling) or not self._fits_beside_loan(running, prefilling):
            return False
        self.make_room(running, prefilling)
        return True

    def make_room(self, running: Sequence[int], prefilling: Sequence[int]) -> None:
        """Evict cached prefixes as needed to fit rows of these lengths in rectangles."""
        self._prefilling = prefilling
        # Running rows already grow, even into memory on loan.
        self._fits_beside_loan(running, prefilling)
        if self._batch.prefix is not None and self.budget is not None and not self._paged:
            self._batch.prefix.shrink(self._left(running, prefilling))

    def lend(self, wanted: int, least: int) -> int:
        """Lends up to `wanted` bytes that rows do not use, from `spare` first. Cached prefixes are evicted for it. Returns the
        bytes lent; 0 if fewer than `least` are available. An earlier loan ends first."""
        self._loan = None
        if self.budget is None or self._paged:
            return wanted
        running = [length + HEADROOM for length in self._lengths()]
        lent = min(wanted, self._spare + self._left(running, self._prefilling))
        if lent < least or lent <= 0:
            return 0
        self._loan = _Loan(max(lent - self._spare, 0))
        self.make_room(running, self._prefilling)
        device.release_cache()
        return lent

    def take_back(self) -> bool:
        """End the loan. Returns whether there was one. May be called from any thread."""
        loan, self._loan = self._loan, None
        return loan is not None

    @property
    def lent(self) -> bool:
        """Whether there is a loan. May be called from any thread."""
        return self._loan is not None

    @property
    def loan_needed(self) -> bool:
        """Whether rows that fit into the budget do not fit next to the loan. May be called from any thread."""
        return (loan := self._loan) is not None and loan.needed

    def _fits_beside_loan(self, running: Sequence[int], prefilling: Sequence[int]) -> bool:
        """Whether rows that fit into the budget also fit into what the loan leaves of it. If not, marks the loan as needed."""
        if (loan := self._loan) is None or self.budget is None:
            return True
        taken = self.budget.bytes_of(running, prefilling, self._batch.cache.slots)
        if taken + loan.size > self.budget.size:
            loan.needed = True
        return not loan.needed

    def _left(self, running: Sequence[int], prefilling: Sequence[int]) -> int:
        """Bytes of the budget left by these rows and by the loan."""
        assert self.budget is not None
        left = self.budget.left(running, prefilling, have=self._batch.cache.slots)
        return max(left - (0 if self._loan is None else self._loan.size), 0)

    def _prefix_room(self) -> int:
        running = [length + HEADROOM for length in self._lengths()]
        return self._left(running, self._prefilling)

    def fits(self, running: Sequence[int], prefilling: Sequence[int], have: int | None = None) -> bool:
        """Whether rows of these lengths fit. have: see Budget.fits; None: what the batch has allocated."""
        if self.budget is None:
            return True
        have = self._batch.cache.slots if have is None else have
        return self.budget.fits(running, prefilling, have=have)

    @property
    def usage(self) -> float:
        """Share of the budget in use; 0 without a budget. May be called from any thread."""
        lengths = self._lengths()
        return 0.0 if self.budget is None or not lengths else self.budget.used(lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values. May be called from any thread."""
        return self._batch.kv_bytes

    def _lengths(self) -> list[int]:
        return [len(row.tokens) for row in self._batch.requests]
