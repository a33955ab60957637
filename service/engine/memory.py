"""Memory of a batch's keys and values: what they take, and a budget for them."""

from __future__ import annotations

from collections.abc import Sequence

from service.engine.batch import Batch
from service.engine.kv.budget import HEADROOM, Budget


class RowMemory:
    """Of the rows of a batch. paged: they are in pages."""

    def __init__(self, batch: Batch, *, paged: bool) -> None:
        self._batch = batch
        self._paged = paged
        self.budget: Budget | None = None
        """None: as much as rows take."""

    def limit(self, budget: Budget) -> None:
        """Keep keys and values within a budget. In pages all of it is taken with the first call: cached prefixes use it too."""
        self.budget = budget
        # Rows of a model whose layers are all recurrent take no pages.
        if self._paged and budget.row.first:
            for pool, pages in zip(self._batch.pools, budget.pages, strict=True):
                pool.set_size(pages)

    def has_room(self, prefilling: Sequence[int]) -> bool:
        """Whether memory does for the rows and for texts of such lengths that prefill, with a next share of their answers."""
        running, texts = ([length + HEADROOM for length in lengths] for lengths in (self._lengths(), prefilling))
        return self.fits(running, texts)

    def fits(self, running: Sequence[int], prefilling: Sequence[int], have: int | None = None) -> bool:
        """Whether memory does for rows of such lengths. have: see Budget.fits; None: what the batch has allocated."""
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
