"""Prefill: loads cached prefixes and computes the rest of each prompt in chunks, with prompts of similar length in one call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from service.engine.activations import Activations
from service.engine.drafters.model import ModelDrafter, pad_rows
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.kv.prefix_files import Piece, Speed
from service.engine.prompt_logprobs import score_chunk
from service.engine.request import PADDING_LENGTH, PADDING_TEXT, Request
from service.engine.strategy import current
from service.engine.target import Target

LEAST = 32
"""Minimum tokens that are prefilled before a round, regardless of how long running requests wait for them."""


@dataclass(slots=True)
class Prefill:
    """Prompts in prefill, with separate caches until they join the batch. All but the last token of each is prefilled. The text
    of a preempted request is its prompt and its output so far. The caches may have padding rows after those of the requests
    (`strategy`)."""

    rows: list[Request]
    target_cache: RowCache
    draft_cache: RowCache | None
    """None while the draft has prefilled nothing."""
    epoch: int
    """The batch's epoch when the draft's prefill started. A draft cache of an earlier epoch belongs to another or a failed
    draft."""

    reserved: int = 0
    """Positions for which the caches' buffers are allocated at once (`RowMemory.reserved`)."""
    prefills_draft: bool | None = None
    """Whether the draft prefills these prompts too; None: not decided yet."""
    cached: int = 0
    """Tokens of an unstarted prompt that were in the prefix cache when it was admitted."""
    pieces: list[Piece] = field(default_factory=list[Piece])
    """Parts of its prompt that are first loaded from the prefix cache's files."""
    admitted_at: float = field(default_factory=time.perf_counter)
    """perf_counter."""

    @property
    def unstarted(self) -> bool:
        """Whether no token was prefilled or loaded from the prefix cache yet."""
        return self.target_cache.lengths.longest == 0

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of these prompts are requested. If so, nothing is loaded from the prefix cache."""
        return any(row.unscored for row in self.rows)

    @property
    def answered(self) -> bool:
        """Whether answers to these prompts are requested."""
        return any(row.prompt.sampling.max_tokens > 0 for row in self.rows)

    @property
    def remaining(self) -> int:
        """Tokens of the longest prompt that the target still has to prefill."""
        prompts, done = _prompts(self.rows, self.target_cache), self.target_cache.lengths.host
        return max(len(prompt) - max(count, self.cached) for prompt, count in zip(prompts, done, strict=True))

    def next_call_tokens(self, size: int) -> int:
        """Tokens of the target's next call, including padding, with chunks of `size` tokens."""
        return len(self.target_cache.lengths.host) * min(size, self.remaining)

    def ensure_draft_cache(self, drafter: ModelDrafter, epoch: int) -> RowCache:
        """The draft's cache for these rows. A new one is made if there is none, or only one of another epoch."""
        if self.draft_cache is None or self.epoch != epoch:
            self.draft_cache, self.epoch = drafter.new_cache(len(self.target_cache.lengths.host)), epoch
            self.draft_cache.reserve(self.reserved)
        return self.draft_cache


@dataclass(slots=True)
class Pace:
    """Learns from measured calls how many tokens may be prefilled while requests run. gap: maximum seconds that running
    requests may wait; None: as long as a chunk takes."""

    gap: float | None = None
    limit: int = sys.maxsize
    speed: Speed = field(default_factory=Speed)
    """Tokens per second."""

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that a call over this many tokens took `seconds`."""
        self.speed.observe(tokens, seconds)
        if self.gap is None:
            return
        if seconds > self.gap:
            self.limit = int(tokens * self.gap / seconds)
        elif 2 * seconds < self.gap:
            # Twice as many tokens take at most twice as long.
            self.limit = max(self.limit, 2 * tokens)

    def within(self, most: int) -> int:
        """`most`, or a half, a quarter and so on of it, so that widths of calls repeat."""
        while most > self.limit and most >= 2 * LEAST:
            most //= 2
        return most


def batch_prompts(
    waiting: Sequence[Prefill],
    prefills_draft: Sequence[bool],
    target: Target,
    *,
    room: int,
    size: int,
    prefix: PrefixCache | None,
    batch_size: Callable[[int], int],
) -> Prefill:
    """The first of these prompts, batched with those nearest to it in length that fit into one call of `room` tokens, including
    padding rows. batch_size: rows of a call over a given number of prompts.

    Only unstarted prompts of at most `size` uncached tokens are batched, either all or none with a prefill of the draft
    (`prefills_draft`, one per prompt). Prompts that share an uncached block are not batched: the second waits for the prefix
    cache. Models with recurrent layers prefill prompts one by one, because padding would enter the state. prefix: None for no
    cache.
    """
    first, with_draft = waiting[0], prefills_draft[0]
    if first.pieces or not first.unstarted or first.target_cache.states:
        return first
    owners = [Owner.TARGET, Owner.DRAFT] if with_draft else [Owner.TARGET]
    chosen = [first]
    longest = total = _uncached_tokens(first, owners, prefix)
    if 0 < longest <= size:
        blocks = {_uncached_block(first, prefix)}
        alike = [
            each
            for each, kind in zip(waiting, prefills_draft, strict=True)
            if each.unstarted and kind == with_draft and not each.pieces
        ]
        lengths = [(_uncached_tokens(other, owners, prefix), other) for other in alike if other is not first]
        for length, other in sorted(lengths, key=lambda pair: abs(pair[0] - total)):
            count, most = len(chosen) + 1, max(longest, length)
            rows, dense = batch_size(count), count * most <= (1 + current().prefill_padding) * (total + length)
            call = rows * (most if rows == count else max(most, PADDING_LENGTH))
            if not (0 < length <= size and call <= room and dense):
                continue
            block = _uncached_block(other, prefix)
            if block is None or block not in blocks:
                chosen.append(other)
                blocks.add(block)
                longest, total = max(longest, length), total + length
    if len(chosen) > 1:
        rows = [each.rows[0] for each in chosen]
        cache, reserved = target.cache(batch_size(len(rows))), max(each.reserved for each in chosen)
        cache.reserve(reserved)
        first = Prefill(rows, cache, None, first.epoch, reserved, with_draft)
    if min(longest, size) <= room:
        _load_cached_prefixes(Owner.TARGET, first.target_cache, first.rows, prefix)
    return first


def _uncached_tokens(prefill: Prefill, owners: Sequence[Owner], prefix: PrefixCache | None) -> int:
    """Tokens of an unstarted prompt that at least one of the owners has to prefill."""
    row = prefill.rows[0]
    prompt, salt = row.tokens[:-1], row.prompt.cache_salt
    return len(prompt) - (
        min(prefix.cached_length(owner, prompt, salt) for owner in owners) if prefix is not None else 0
    )


def _uncached_block(prefill: Prefill, prefix: PrefixCache | None) -> tuple[str, tuple[int, ...]] | None:
    """The salt of an unstarted prompt, and its text up to the end of the first block that is not in the prefix cache. Another
    prompt with the same key could reuse that block. None if there is no such block."""
    if prefix is None:
        return None
    row = prefill.rows[0]
    prompt, salt = row.tokens[:-1], row.prompt.cache_salt
    end = prefix.cached_length(Owner.TARGET, prompt, salt) + BLOCK
    return (salt, tuple(prompt[:end])) if len(prompt) >= end else None


def prefill_target(
    target: Target,
    prefill: Prefill,
    *,
    size: int,
    prefix: PrefixCache | None,
    pace: Pace | None = None,
    vocabulary: int | None = None,
) -> bool:
    """Prefill the next chunk of `size` tokens of each prompt with the target. Returns whether tokens remain. pace: learns from
    calls that are waited for. vocabulary: width of the logits if log-probabilities of the prompts are requested; `size` then
    limits the logits held at a time."""
    cache, rows = prefill.target_cache, prefill.rows
    if vocabulary is None or not prefill.scored:
        return _prefill_chunk(Owner.TARGET, target, target.activations, cache, rows, size, sys.maxsize, prefix, pace)
    logits = list[mx.array]()
    starts = cache.lengths.host
    more = _prefill_chunk(
        Owner.TARGET,
        lambda tokens, cache: logits.append(target(tokens, cache)),
        target.activations,
        cache,
        rows,
        size,
        sys.maxsize,
        prefix,
    )
    if logits:
        counts = [end - start for start, end in zip(starts, cache.lengths.host, strict=True)]
        score_chunk(logits[0][..., :vocabulary], [row.scores for row in rows], starts, counts)
    return more


def prefill_draft(drafter: ModelDrafter, prefill: Prefill, *, size: int, prefix: PrefixCache | None) -> bool:
    """Prefill the next chunk of each prompt with the draft, as far as it can run ahead of the target. Returns whether tokens
    remain. The draft cache must exist (`Prefill.ensure_draft_cache`)."""
    assert prefill.draft_cache is not None
    run, upto = partial(drafter.extend, target=prefill.target_cache), drafter.prefill_limit(prefill.target_cache)
    return _prefill_chunk(Owner.DRAFT, run, drafter.activations, prefill.draft_cache, prefill.rows, size, upto, prefix)


def _prompts(rows: Sequence[Request], cache: RowCache) -> list[Sequence[int]]:
    """The tokens to prefill in each row of a cache: all but the last, for these requests and for padding rows."""
    prompts: list[Sequence[int]] = [row.tokens[:-1] for row in rows]
    return prompts + [PADDING_TEXT[:-1]] * (len(cache.lengths.host) - len(rows))


def _load_cached_prefixes(owner: Owner, cache: RowCache, rows: Sequence[Request], prefix: PrefixCache | None) -> None:
    """Load the cached prefixes of unstarted prompts."""
    if prefix is not None and cache.lengths.longest == 0:
        prompts = _prompts(rows, cache)
        salts = [row.prompt.cache_salt for row in rows]
        prefix.load(owner, prompts, cache, salts + [""] * (len(prompts) - len(rows)))
        if owner is Owner.TARGET:
            for row, length in zip(rows, cache.lengths.host, strict=False):
                if not row.decode_started_at:
                    row.cached_tokens = length


def _prefill_chunk(
    owner: Owner,
    run: Callable[[mx.array, RowCache], object],
    activations: Activations,
    cache: RowCache,
    rows: Sequence[Request],
    size: int,
    upto: int,
    prefix: PrefixCache | None,
    pace: Pace | None = None,
) -> bool:
    """Prefill the next `size` tokens of each prompt, up to its last one and to position `upto`, and insert them into the prefix
    cache. Returns whether tokens remain."""
    _load_cached_prefixes(owner, cache, rows, prefix)
    prompts, start = _prompts(rows, cache), cache.lengths.host
    chunks = [prompt[done : min(done + size, upto)] for prompt, done in zip(prompts, start, strict=True)]
    if any(chunks):
        started_at, tokens = time.perf_counter(), pad_rows(chunks, cache)
        run(tokens, cache)
        ends = [done + len(chunk) for done, chunk in zip(start, chunks, strict=True)]
        # Do not wait at the end of the prompts, so that the first round over these rows can be built meanwhile.
        whole = all(end == len(prompt) for end, prompt in zip(ends, prompts, strict=True))
        wait = not (whole and current().launch_ahead)
        if activations.evaluate(cache.arrays(), tokens.size, wait=wait) and wait and pace is not None:
            pace.observe(len(chunks) * max(map(len, chunks)), time.perf_counter() - started_at)
        cache.truncate(ends)
        if prefix is not None:
            for i, (row, prompt) in enumerate(zip(rows, prompts, strict=False)):
                if row.prompt.store:
                    prefix.insert(owner, prompt, cache, i, row.prompt.cache_salt)
            prefix.copy(wait=wait)
    return any(done < len(prompt) for done, prompt in zip(cache.lengths.host, prompts, strict=True))
