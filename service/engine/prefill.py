"""Prompts on their way into the batch: what is kept of their beginnings is taken over, the rest is read in chunks, short ones
together in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from service.engine import device
from service.engine.drafters.model import ModelDrafter, ragged
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.request import Request
from service.engine.target import Target

PADDING = 1 / 8
"""Share of what is to be read by which prompts of unlike length may make a call longer. Three of 85 tokens in one call take a
fifth less time than one after the other on two cores, and no more than one on an accelerator."""


@dataclass(slots=True)
class Prefill:
    """Prompts being read, in chunks, in caches of their own."""

    rows: list[Request]
    target: RowCache
    drafter: RowCache | None
    epoch: int
    """The decoder's when the draft began to read them; what another draft read, or one that failed since, is worth nothing."""

    follows: bool | None = None
    """Whether the draft reads them too; None: not settled yet."""

    @property
    def new(self) -> bool:
        """Nothing was read yet."""
        return self.target.lengths.longest == 0

    def wanted(self, size: int) -> int:
        """Tokens of the target's next call, at most `size` a row, padding included, unless a kept beginning saves some."""
        left = (
            len(row.prompt.tokens) - 1 - held for row, held in zip(self.rows, self.target.lengths.host, strict=True)
        )
        return len(self.rows) * min(size, max(left))

    def draft_cache(self, draft: nn.Module, epoch: int) -> RowCache:
        """The draft's cache, a new one where none or another draft has read."""
        if self.drafter is None or self.epoch != epoch:
            self.drafter, self.epoch = RowCache(draft, len(self.rows)), epoch
        return self.drafter


def together(
    waiting: Sequence[Prefill],
    follows: Sequence[bool],
    target: Target,
    *,
    room: int,
    size: int,
    prefix: PrefixCache | None,
) -> Prefill:
    """The first of these prompts, as one with those nearest to it in length that can be read in one call of at most `room`
    tokens with it: all of them not begun, at most `size` tokens long, and read by the draft too or none of them (`follows`).

    Never two of which one had better wait for what the other will leave behind, nor one that keeps a state, which would take in
    padding too."""
    first, drafted = waiting[0], follows[0]
    if not first.new or first.target.states:
        return first
    owners = [Owner.TARGET, Owner.DRAFT] if drafted else [Owner.TARGET]
    chosen = [first]
    longest = total = _missing(first, owners, prefix)
    if 0 < longest <= size:
        alike = [each for each, kind in zip(waiting, follows, strict=True) if each.new and kind == drafted]
        lengths = [(_missing(other, owners, prefix), other) for other in alike if other is not first]
        for length, other in sorted(lengths, key=lambda pair: abs(pair[0] - total)):
            call = (len(chosen) + 1) * max(longest, length)
            fits = 0 < length <= size and call <= min(room, (1 + PADDING) * (total + length))
            if fits and not any(_shares(one, other, prefix) for one in chosen):
                chosen.append(other)
                longest, total = max(longest, length), total + length
    if len(chosen) > 1:
        rows = [each.rows[0] for each in chosen]
        first = Prefill(rows, target.cache(len(rows)), None, first.epoch, drafted)
    if min(longest, size) <= room:
        _recall(Owner.TARGET, first.target, first.rows, prefix)
    return first


def _missing(prefill: Prefill, owners: Sequence[Owner], prefix: PrefixCache | None) -> int:
    """Tokens that one of the owners has still to read of a prompt that is not begun."""
    prompt = prefill.rows[0].prompt.tokens[:-1]
    return len(prompt) - (min(prefix.cached_length(owner, prompt) for owner in owners) if prefix is not None else 0)


def _shares(one: Prefill, other: Prefill, prefix: PrefixCache | None) -> bool:
    """Whether one leaves behind what saves the other something."""
    if prefix is None:
        return False
    mine, theirs = (prefill.rows[0].prompt.tokens[:-1] for prefill in (one, other))
    upto = prefix.cached_length(Owner.TARGET, mine) + BLOCK
    return len(mine) >= upto and mine[:upto] == theirs[:upto]


def lead(target: Target, prefill: Prefill, *, size: int, prefix: PrefixCache | None) -> bool:
    """Let the target read the next chunk of each prompt. True while there is more."""
    return _advance(Owner.TARGET, target, prefill.target, prefill.rows, size, sys.maxsize, prefix)


def follow(drafter: ModelDrafter, prefill: Prefill, *, size: int, prefix: PrefixCache | None) -> bool:
    """Let the draft read the next chunk, as far as it can go before the target. True while there is more."""
    assert prefill.drafter is not None
    read, upto = partial(drafter.feed, target=prefill.target), drafter.readable(prefill.target)
    return _advance(Owner.DRAFT, read, prefill.drafter, prefill.rows, size, upto, prefix)


def _recall(owner: Owner, cache: RowCache, rows: Sequence[Request], prefix: PrefixCache | None) -> None:
    """Take over what is kept of prompts of which nothing was read yet."""
    if prefix is not None and cache.lengths.longest == 0:
        prefix.load(owner, [row.prompt.tokens[:-1] for row in rows], cache)
        if owner is Owner.TARGET:
            for row, held in zip(rows, cache.lengths.host, strict=True):
                row.reused = held


def _advance(
    owner: Owner,
    read: Callable[[mx.array, RowCache], object],
    cache: RowCache,
    rows: Sequence[Request],
    size: int,
    upto: int,
    prefix: PrefixCache | None,
) -> bool:
    """Read the next `size` tokens of each prompt, all but its last and none from position `upto` on. True while there is
    more."""
    _recall(owner, cache, rows, prefix)
    prompts, held = [row.prompt.tokens[:-1] for row in rows], cache.lengths.host
    chunks = [prompt[done : min(done + size, upto)] for prompt, done in zip(prompts, held, strict=True)]
    if any(chunks):
        read(ragged(chunks, cache), cache)
        device.wait(cache.arrays())
        cache.settle([done + len(chunk) for done, chunk in zip(held, chunks, strict=True)])
        if prefix is not None:
            for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                if row.prompt.store:
                    prefix.insert(owner, prompt, cache, i)
    return any(have < len(prompt) for have, prompt in zip(cache.lengths.host, prompts, strict=True))
