"""The requests that decode together: their rows in the target's KV cache and in the draft's, and the draft's health."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from service.core import BARE_DRAFT, Source
from service.engine import device
from service.engine.acceptance import Acceptance
from service.engine.adapters import Draft
from service.engine.drafters.head import make_drafter
from service.engine.drafters.model import CATCH_UP, MAX_LAG
from service.engine.kv.buffers import compaction_order
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import Owner, PrefixCache
from service.engine.prefill import Prefill
from service.engine.request import Request
from service.engine.rounds import Plan, Step
from service.engine.target import Target

log = logging.getLogger(__name__)

RETRY = 32
"""Rounds that a row decodes without the draft after the draft's logits for it were not finite; doubled each time."""


class Batch:
    """Rows of one target and one drafter. draft None: the target alone. vocabulary: width of the target's logits. draft_length:
    tokens that the draft proposes at most.

    A draft that raises is disabled until the next `switch`. Where its logits for a row are not finite, that row alone goes on
    without it for a while.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        *,
        vocabulary: int,
        draft_length: int,
        prefix: PrefixCache | None,
    ) -> None:
        self.target = target
        self.draft_length = draft_length
        self.rows: list[Request] = []
        self.cache = target.cache(0)
        self.drafter = make_drafter(draft, vocabulary, self.cache) if draft is not None else None
        self.prefix = prefix
        self.failed = False
        """The draft raised and is disabled."""
        self.draft_failures = 0
        self.epoch = 0
        """Counts switches and failures of drafts."""
        self._epochs: list[int] = []
        """By row, the epoch in which the draft began to prefill it."""
        self._logged = -1
        """The epoch in which logits that were not finite were last logged."""

    @property
    def adapter(self) -> int:
        """The id of the adapter that drafts; BARE_DRAFT (0) for the bare draft or none."""
        return self.drafter.draft.adapter if self.drafter is not None else BARE_DRAFT

    def switch(self, draft: Draft) -> None:
        """Draft with another version from now on, for every row. Raises ValueError without a draft."""
        if self.drafter is None:
            raise ValueError("this batch was built without a draft")
        self.drafter.switch(draft)
        self.failed = False
        self._next_epoch()
        for row in self.rows:
            row.acceptance = Acceptance(self.draft_length)
            row.draft_failures = row.draft_again = 0

    def _next_epoch(self) -> None:
        self.epoch += 1
        if self.prefix is not None:
            self.prefix.clear(Owner.DRAFT)

    # ------------------------------------------------------------------------------------------------ rows come and go

    def join(self, ready: Sequence[Prefill]) -> None:
        """Append rows whose prompts were prefilled."""
        self.cache.join([prefill.target_cache for prefill in ready])
        if self.drafter is not None:
            draft = self.drafter.draft.model
            self.drafter.cache.join([prefill.ensure_draft_cache(draft, self.epoch) for prefill in ready])
        for prefill in ready:
            for row in prefill.rows:
                row.decode_started_at = time.perf_counter()
                row.acceptance = Acceptance(self.draft_length)
            self.rows += prefill.rows
            self._epochs += [prefill.epoch] * len(prefill.rows)

    def remove(self, gone: Sequence[Request]) -> list[Request]:
        """Take rows out, finished or not; what was verified of them goes into the prefix cache. Returns the rows taken."""
        indices = {i for i, row in enumerate(self.rows) if any(row is other for other in gone)}
        removed = [self.rows[i] for i in indices]
        for i in indices:
            self._cache_prefix(i)
        staying = compaction_order(len(self.rows), indices)
        caches = [self.cache] if self.drafter is None else [self.cache, self.drafter.cache]
        copies = [cache.copy_moved(staying) for cache in caches]
        if moved := [copy for each in copies for copy in each if copy is not None]:
            device.wait(moved)
        for cache, each in zip(caches, copies, strict=True):
            cache.compact(staying, each)
        self.rows = [self.rows[i] for i in staying]
        self._epochs = [self._epochs[i] for i in staying]
        return removed

    def _cache_prefix(self, index: int) -> None:
        row = self.rows[index]
        if self.prefix is None or not row.prompt.store:
            return
        self.prefix.insert(Owner.TARGET, row.tokens, self.cache, index)
        if self.drafter is not None and self._epochs[index] == self.epoch:
            self.prefix.insert(Owner.DRAFT, row.tokens, self.drafter.cache, index)

    # ------------------------------------------------------------------------------------------------- around a round

    def draft_views(self, rows: Sequence[Request]) -> list[list[int]]:
        """Each row's tokens as the draft sees them. A draft step runs over the whole batch: of a row that goes without the
        draft it reads one token more than its cache holds, two at least, and nothing is proposed there."""
        if self.drafter is None:
            return [row.tokens for row in rows]
        lengths = self.drafter.cache.lengths.host
        return [
            row.tokens if drafts(row) else row.tokens[: max(n, 1) + 1] for row, n in zip(rows, lengths, strict=True)
        ]

    def truncate(self, step: Step, before: Sequence[int], finite: Sequence[bool]) -> None:
        """Truncate both caches to the tokens that the rows have after a round. before: each row's tokens before it. finite: by
        row, whether the draft's logits were. What a round launched behind it has written stays behind the rows' ends."""
        self.cache.truncate([len(row.tokens) - 1 for row in self.rows])
        if self.drafter is None:
            return
        cache = self.drafter.cache
        if step.drafted and not self.failed:
            self._truncate_draft(cache, step.plan, before, finite)
        else:
            cache.truncate(cache.lengths.host)

    def _truncate_draft(self, cache: RowCache, plan: Plan, before: Sequence[int], finite: Sequence[bool]) -> None:
        """The draft wrote its own proposal into its cache, but for the last token. The accepted part stays; where a look-up
        took its place nothing of it does, for those were other tokens."""
        limits, fed = list[int](), plan.choice.drafted - 1
        rows, visible = plan.rows, [len(tokens) for tokens in plan.visible]
        for row, source, old, seen, fine in zip(rows, plan.sources, before, visible, finite, strict=True):
            if not _drafted(row):
                limits.append(seen - 1)
            else:
                limits.append(min(old + fed if fine and source is Source.DRAFT else old, len(row.tokens) - 1))
        cache.truncate(limits)
        for index, row in enumerate(rows):
            if not finite[index] and _drafted(row):
                self._pause_draft(index, row)
            elif not finite[index]:
                cache.zero_tail(index)

    def _pause_draft(self, index: int, row: Request) -> None:
        """Let a row decode without the draft, whose logits for it were not finite, and try again later."""
        assert self.drafter is not None
        sound = self.drafter.cache.remove_nonfinite(index)
        if not sound and self.prefix is not None:
            # Cached prefixes may hold the same values.
            self.prefix.clear(Owner.DRAFT)
        rounds = RETRY << min(row.draft_failures, 16)
        row.draft_failures += 1
        row.draft_again = len(row.rounds) + rounds
        if not sound and len(row.tokens) > max(CATCH_UP // len(self.rows), MAX_LAG):
            # The draft would have to read the row again in several rounds, in which no other row could draft.
            row.draft_again = sys.maxsize
        self.draft_failures += 1
        if self._logged != self.epoch:
            self._logged = self.epoch
            log.warning(
                "the draft (adapter %d) gave logits that are not finite: request %s goes on without it for %d rounds",
                self.adapter,
                row.id,
                rounds,
            )

    def disable_draft(self, error: Exception) -> None:
        """Decode without the draft, which raised `error`, until the next switch. Its keys and values may be as broken as its
        proposals: the next draft prefills the rows from the start."""
        log.error(
            "the draft (adapter %d) failed; decoding goes on without it until the next switch",
            self.adapter,
            exc_info=error,
        )
        self.failed = True
        self.draft_failures += 1
        self._next_epoch()
        if self.drafter is not None:
            self.drafter.cache = RowCache(self.drafter.draft.model, len(self.rows))


def drafts(row: Request) -> bool:
    """Whether the draft proposes tokens for a row in its next round."""
    return row.prompt.num_draft_tokens != 0 and len(row.rounds) >= row.draft_again


def _drafted(row: Request) -> bool:
    """The same of the row's last round."""
    return row.prompt.num_draft_tokens != 0 and len(row.rounds) > row.draft_again
