"""Memory of a batch's keys and values: what they take, and a budget for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import Prompt
from service.engine import device
from service.engine.batch import Batch
from service.engine.kv.budget import HEADROOM, Budget
from service.engine.request import Request

ANSWER_SHARE = 8
"""An answer's first share is the prompt's length divided by this, HEADROOM at least: a batch that grows copies its rows."""


@dataclass(slots=True)
class _Loan:
    """size: bytes of the budget that are lent. needed: rows need them."""

    size: int
    needed: bool = False


class RowMemory:
    """Of the rows of a batch. paged: they are in pages."""

    def __init__(self, batch: Batch, *, paged: bool) -> None:
        self._batch = batch
        self._paged = paged
        self.budget: Budget | None = None
        """None: as much as rows take."""
        self._loan: _Loan | None = None
        self._spare = 0
        self._prefilling: Sequence[int] = ()
        """Positions of the texts that prefill, when that was last said."""

    def limit(self, budget: Budget, spare: int = 0) -> None:
        """Keep rows and cached prefixes within a budget. In pages all of it is taken with the first call; in rectangles cached
        prefixes get what rows leave, and are evicted when rows need it. spare: free bytes beside the budget."""
        self.budget, self._spare = budget, spare
        if self._batch.prefix is not None and not self._paged:
            self._batch.prefix.room = self._prefix_room
        # Rows of a model whose layers are all recurrent take no pages.
        if self._paged and budget.row.first:
            for pool, pages in zip(self._batch.pools, budget.pages, strict=True):
                pool.set_size(pages)

    def reserved(self, row: Request) -> int:
        """Positions for which buffers of a request are made when its prefill begins: its text and a first share of what is left
        of its answer."""
        return self.reserved_for(len(row.tokens), row.prompt)

    def reserved_for(self, tokens: int, prompt: Prompt) -> int:
        """The same for a request that has so many tokens of prompt and answer."""
        if self._paged:
            return tokens + HEADROOM
        left = max(len(prompt.tokens) + prompt.sampling.max_tokens - tokens, 0)
        return tokens + min(left, max(HEADROOM, tokens // ANSWER_SHARE))

    def has_room(self, prefilling: Sequence[int]) -> bool:
        """Whether the rows fit with a next share of their answers, and texts that prefill with so many positions each
        (`reserved`). Cached prefixes that are in their way are evicted."""
        running = [length + HEADROOM for length in self._lengths()]
        if not self.fits(running, prefilling) or not self._fits_beside_loan(running, prefilling):
            return False
        self.make_room(running, prefilling)
        return True

    def make_room(self, running: Sequence[int], prefilling: Sequence[int]) -> None:
        """Evict cached prefixes that are in the way of rows in rectangles of such lengths."""
        self._prefilling = prefilling
        # Those that run already grow, whatever is lent.
        self._fits_beside_loan(running, prefilling)
        if self._batch.prefix is not None and self.budget is not None and not self._paged:
            self._batch.prefix.shrink(self._left(running, prefilling))

    def lend(self, wanted: int, least: int) -> int:
        """Lends up to `wanted` bytes that rows do not use, from `spare` first; cached prefixes give way. Returns the bytes that
        are lent; 0 where fewer than `least` could be. What was lent before is taken back."""
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
        """The loan is over. Returns whether there was one. From any thread."""
        loan, self._loan = self._loan, None
        return loan is not None

    @property
    def lent(self) -> bool:
        """Whether there is a loan. From any thread."""
        return self._loan is not None

    @property
    def loan_needed(self) -> bool:
        """Whether rows that fit into the budget do not fit beside the loan. From any thread."""
        return (loan := self._loan) is not None and loan.needed

    def _fits_beside_loan(self, running: Sequence[int], prefilling: Sequence[int]) -> bool:
        """Whether such rows, which fit into the budget, fit into what the loan leaves of it; notes it where they do not."""
        if (loan := self._loan) is None or self.budget is None:
            return True
        taken = self.budget.bytes_of(running, prefilling, self._batch.cache.slots)
        if taken + loan.size > self.budget.size:
            loan.needed = True
        return not loan.needed

    def _left(self, running: Sequence[int], prefilling: Sequence[int]) -> int:
        """Bytes that such rows leave of the budget, and of what is lent."""
        assert self.budget is not None
        left = self.budget.left(running, prefilling, have=self._batch.cache.slots)
        return max(left - (0 if self._loan is None else self._loan.size), 0)

    def _prefix_room(self) -> int:
        running = [length + HEADROOM for length in self._lengths()]
        return self._left(running, self._prefilling)

    def fits(self, running: Sequence[int], prefilling: Sequence[int], have: int | None = None) -> bool:
        """Whether rows of such lengths fit. have: see Budget.fits; None: what the batch has allocated."""
        if self.budget is None:
            return True
        have = self._batch.cache.slots if have is None else have
        return self.budget.fits(running, prefilling, have=have)

    @property
    def usage(self) -> float:
        """Share of the budget that is in use; 0 without one. From any thread."""
        lengths = self._lengths()
        return 0.0 if self.budget is None or not lengths else self.budget.used(lengths)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values. From any thread."""
        return self._batch.kv_bytes

    def _lengths(self) -> list[int]:
        return [len(row.tokens) for row in self._batch.requests]
