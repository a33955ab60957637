"""The requests that decode together: their rows in the target's and the draft's KV cache, and whether the draft is usable."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial

from service.core import BARE_DRAFT, Source
from service.engine import device
from service.engine.acceptance import Acceptance
from service.engine.adapters import Draft
from service.engine.drafters.head import make_drafter
from service.engine.drafters.lookup import WAITED_SHARE
from service.engine.kv.buffers import compaction_order
from service.engine.kv.cache import RowCache
from service.engine.kv.pool import Pool
from service.engine.kv.prefix import Owner, PrefixCache
from service.engine.prefill import Prefill
from service.engine.request import PADDING_LENGTH, Request, padding_row
from service.engine.rounds import Outcome, Plan, Step
from service.engine.strategy import current
from service.engine.target import Target

log = logging.getLogger(__name__)

RETRY = 32
"""Rounds that a row decodes without the draft after the draft produced non-finite logits for it. Doubled each time."""


class Batch:
    """Rows of one target and one drafter.

    draft: None for the target alone. vocabulary: width of the target's logits. draft_length: maximum tokens that the draft
    proposes. prefill_chunk: tokens per call when the draft catches up.

    A draft that raises an error is disabled until the next `switch`. If its logits for one row are not finite, only that row
    continues without it for a while.

    Where the device prefers few batch sizes (`strategy`), padding rows fill up the batch. A row that leaves becomes padding,
    and a joining row replaces a padding row.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        vocabulary: int,
        draft_length: int,
        prefix: PrefixCache | None,
        prefill_chunk: int,
    ) -> None:
        self.target = target
        self.draft_length = draft_length
        self.rows: list[Request] = []
        """All running rows, including padding rows."""
        self._padding = padding_row(draft_length)
        self.cache = target.cache(0)
        self.drafter = make_drafter(draft, vocabulary, self.cache, prefill_chunk) if draft is not None else None
        self.prefix = prefix
        for pool in self.pools:
            pool.reclaim = None if prefix is None else partial(prefix.reclaim, pool)
        self.failed = False
        """Whether the draft raised an error and is disabled."""
        self.draft_failures = 0
        self.epoch = 0
        """Number of draft switches and failures so far."""
        self._epochs: list[int] = []
        """By row: the epoch in which the draft started to prefill it."""
        self._logged = -1
        """The epoch in which non-finite logits were last logged."""

    @property
    def adapter(self) -> int:
        """The id of the adapter that drafts; BARE_DRAFT (0) for the base draft or no draft."""
        return self.drafter.draft.adapter if self.drafter is not None else BARE_DRAFT

    def switch(self, draft: Draft) -> None:
        """Draft with another version from now on, for every row. Raises ValueError if there is no draft."""
        if self.drafter is None:
            raise ValueError("this batch was built without a draft")
        self.drafter.switch(draft)
        self.failed = False
        self._next_epoch()
        for row in self.rows:
            row.acceptance = Acceptance(self.draft_length)
            row.draft_failures = row.draft_again = 0

    def forget_failures(self) -> None:
        """Enable the draft again and reset the failure count. The batch must be empty."""
        if self.drafter is not None and self.draft_failures:
            self.switch(self.drafter.draft)
        self.draft_failures, self._logged = 0, -1

    def _next_epoch(self) -> None:
        self.epoch += 1
        if self.prefix is not None:
            self.prefix.clear(Owner.DRAFT)

    @property
    def requests(self) -> list[Request]:
        """The rows that are not padding."""
        return [row for row in self.rows if not row.padding]

    @property
    def pools(self) -> list[Pool]:
        """The page pools of target and draft, if keys and values are paged."""
        return [self.target.pool] if self.drafter is None else [self.target.pool, self.drafter.pool]

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(cache.storage.nbytes for cache in self._caches)

    @property
    def _caches(self) -> list[RowCache]:
        return [self.cache] if self.drafter is None else [self.cache, self.drafter.cache]

    # ------------------------------------------------------------------------------------------------ rows come and go

    def size(self, requests: int) -> int:
        """The number of rows that run for this number of requests."""
        return requests if any(cache.states for cache in self._caches) else current().batch_size(requests)

    def join(self, ready: Sequence[Prefill]) -> None:
        """Add rows with prefilled prompts. They replace padding rows first and are then appended."""
        joining = [row for prefill in ready for row in prefill.rows]
        size = max(self.size(len(self.requests) + len(joining)), len(self.rows))
        free = [i for i in range(size) if i >= len(self.rows) or self.rows[i].padding]
        slots, padding = free[: len(joining)], free[len(joining) :]
        counts = [len(prefill.rows) for prefill in ready]
        self.cache.join([prefill.target_cache for prefill in ready], counts, slots, size)
        if self.drafter is not None:
            caches = [prefill.ensure_draft_cache(self.drafter, self.epoch) for prefill in ready]
            self.drafter.cache.join(caches, counts, slots, size)
        epochs = [prefill.epoch for prefill in ready for _ in prefill.rows]
        self.rows += [self._padding] * (size - len(self.rows))
        self._epochs += [self.epoch] * (size - len(self._epochs))
        for slot, row, epoch in zip(slots, joining, epochs, strict=True):
            row.decode_started_at = row.decode_started_at or time.perf_counter()
            row.acceptance = Acceptance(self.draft_length)
            # If it was preempted: the draft has prefilled it again.
            row.draft_failures = row.draft_again = 0
            self.rows[slot], self._epochs[slot] = row, epoch
        self._pad(padding)

    def make_room(self, count: int) -> None:
        """Allocate capacity for `count` more positions per row in both caches."""
        longest = max(cache.lengths.longest for cache in self._caches)
        for cache in self._caches:
            cache.make_room(longest + count)

    def _pad(self, places: Collection[int]) -> None:
        """Turn these rows into padding."""
        for i in places:
            self.rows[i] = self._padding
        for cache in self._caches:
            cache.pad(places, PADDING_LENGTH)

    @property
    def constrained(self) -> int:
        """The number of requests with a grammar."""
        return sum(row.prompt.constraint is not None for row in self.requests)

    @property
    def few_constrained(self) -> bool:
        """Whether so few requests have a grammar that the next round does not wait for them. Draft steps are then not masked,
        because a mask depends on tokens that are not read yet."""
        return current().launch_ahead and 0 < self.constrained < WAITED_SHARE * len(self.requests)

    def stays_without(self, gone: Sequence[Request]) -> bool:
        """Whether the batch keeps its size without these rows, which then become padding."""
        return self.size(len(self.requests) - len(gone)) == len(self.rows)

    def remove(self, gone: Sequence[Request], *, under_way: bool = False, tight: bool = False) -> list[Request]:
        """Remove rows, finished or not, and insert their verified tokens into the prefix cache. Returns the removed rows.

        under_way: a round over them is pending, so nothing is waited for. tight: release the spare capacity of the remaining
        rows.
        """
        indices = {i for i, row in enumerate(self.rows) if any(row is other for other in gone)}
        removed = [self.rows[i] for i in indices]
        for i in indices:
            if self.rows[i].error is None:
                self._cache_prefix(i)
            else:
                self._discard(i)
        if self.prefix is not None:
            # MLX copies an array on the next write if it is still being read.
            self.prefix.copy(wait=not under_way)
        self._pad(indices)
        padding = [i for i, row in enumerate(self.rows) if row.padding]
        size = self.size(len(self.rows) - len(padding))
        if size < len(self.rows) or tight:
            leaving = padding[size - len(self.rows) :] if size < len(self.rows) else []
            self._compact(compaction_order(len(self.rows), leaving), tight=tight)
        return removed

    def _compact(self, staying: Sequence[int], *, tight: bool) -> None:
        """Keep only these rows, in this order."""
        caches = self._caches
        copies = [cache.copy_moved(staying, tight=tight) for cache in caches]
        if moved := [copy for each in copies for copy in each if copy is not None]:
            device.wait(moved)
        for cache, each in zip(caches, copies, strict=True):
            cache.compact(staying, each, tight=tight)
        self.rows = [self.rows[i] for i in staying]
        self._epochs = [self._epochs[i] for i in staying]

    def _discard(self, index: int) -> None:
        """Erase a failed row: its slot is reused, and other requests may begin with the same tokens."""
        row = self.rows[index]
        for cache in self._caches:
            cache.zero_tail(index, 0)
        if self.prefix is not None:
            self.prefix.discard(row.tokens, row.prompt.cache_salt)

    def _cache_prefix(self, index: int) -> None:
        row = self.rows[index]
        if self.prefix is None or not row.prompt.store:
            return
        salt = row.prompt.cache_salt
        self.prefix.insert(Owner.TARGET, row.tokens, self.cache, index, salt)
        if self.drafter is not None and self._epochs[index] == self.epoch:
            self.prefix.insert(Owner.DRAFT, row.tokens, self.drafter.cache, index, salt)

    # ------------------------------------------------------------------------------------------------- around a round

    def draft_views(self, rows: Sequence[Request]) -> list[list[int]]:
        """Each row's tokens as the draft sees them. A draft step runs over the whole batch. For a row that does not use the
        draft, it reads one token more than the row's draft cache holds, at least two, and proposes nothing."""
        if self.drafter is None:
            return [row.tokens for row in rows]
        lengths = self.drafter.cache.lengths.host
        return [
            row.tokens if drafts(row) else row.tokens[: max(n, 1) + 1] for row, n in zip(rows, lengths, strict=True)
        ]

    def truncate(self, step: Step, before: Sequence[int], outcome: Outcome) -> None:
        """Truncate both caches to the tokens that the rows have after a round. before: the length of each row before it. What a
        round launched ahead wrote stays past the rows' ends, unless values of this round are not finite."""
        self.truncate_target(outcome)
        if self.drafter is None:
            return
        cache = self.drafter.cache
        if step.drafted and not self.failed:
            self._truncate_draft(cache, step.plan, before, outcome.draft_finite)
        else:
            cache.truncate(cache.lengths.host)

    def truncate_target(self, outcome: Outcome) -> None:
        """Truncate the target's cache to the tokens that the rows have, and zero non-finite values past them."""
        self.cache.truncate([len(row.tokens) - 1 for row in self.rows])
        if not outcome.clean:
            # Attention gives positions past a row's end zero weight, but zero times NaN is NaN. All rows are zeroed, because a
            # dropped round that was launched ahead may have written NaN into others.
            for index, row in enumerate(self.rows):
                self.cache.zero_tail(index, 0 if row.padding else None)

    def _truncate_draft(self, cache: RowCache, plan: Plan, before: Sequence[int], finite: Sequence[bool]) -> None:
        """Truncate the draft's cache. The draft wrote its proposal into it, except the last token. The accepted part stays,
        unless the drafter reads it again. Where a lookup replaced the proposal, nothing of it stays, because the tokens differ.
        """
        assert self.drafter is not None
        limits, fed = list[int](), plan.choice.drafted - 1
        rows, visible = plan.rows, [len(tokens) for tokens in plan.visible]
        # Rows may have become padding since the round was planned.
        padding = [row.padding for row in self.rows]
        for i, (row, source, old, seen) in enumerate(zip(rows, plan.sources, before, visible, strict=True)):
            if padding[i]:
                limits.append(PADDING_LENGTH)
            elif not _drafted(row):
                # A recurrent state cannot be restored to before the round's first step. That step read the row's actual tokens.
                limits.append(seen if cache.states else seen - 1)
            else:
                fed_own = finite[i] and source is Source.DRAFT and not self.drafter.rereads
                limits.append(min(old + fed if fed_own else old, len(row.tokens) - 1))
        cache.truncate(limits)
        for index, row in enumerate(rows):
            if finite[index]:
                continue
            if padding[index]:
                # A padding row holds nothing worth keeping.
                cache.zero_tail(index, 0)
            elif _drafted(row):
                self._pause_draft(index, row)
            else:
                cache.zero_tail(index)

    def _pause_draft(self, index: int, row: Request) -> None:
        """Let a row whose draft logits were not finite decode without the draft, and retry later."""
        assert self.drafter is not None
        sound = self.drafter.cache.remove_nonfinite(index)
        if not sound and self.prefix is not None:
            # Cached prefixes may hold the same values.
            self.prefix.clear(Owner.DRAFT)
        rounds = RETRY << min(row.draft_failures, 16)
        row.draft_failures += 1
        row.draft_again = len(row.rounds) + rounds
        if not sound and len(row.tokens) > self.drafter.catch_up_tokens(len(self.rows)):
            # Catching up would take several rounds in which no other row could draft.
            row.draft_again = sys.maxsize
        self.draft_failures += 1
        if self._logged != self.epoch:
            self._logged = self.epoch
            log.warning(
                "the draft (adapter %d) produced non-finite logits: request %s continues without it for %d rounds",
                self.adapter,
                row.id,
                rounds,
            )

    def disable_draft(self, error: Exception) -> None:
        """Decode without the draft, which raised `error`, until the next switch. Its keys and values are dropped as unreliable,
        so the next draft prefills the rows from the start."""
        log.error(
            "the draft (adapter %d) failed; decoding goes on without it until the next switch",
            self.adapter,
            exc_info=error,
        )
        self.failed = True
        self.draft_failures += 1
        self._next_epoch()
        if self.drafter is not None:
            self.drafter.cache = self.drafter.new_cache(len(self.rows))
            self.drafter.cache.storage.pad([i for i, row in enumerate(self.rows) if row.padding])


def drafts(row: Request) -> bool:
    """Whether the draft proposes tokens for a row in its next round."""
    return row.prompt.num_draft_tokens != 0 and len(row.rounds) >= row.draft_again


def _drafted(row: Request) -> bool:
    """Whether the draft proposed tokens for a row in its last round."""
    return row.prompt.num_draft_tokens != 0 and len(row.rounds) > row.draft_again
