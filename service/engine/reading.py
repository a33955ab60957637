"""A prompt on its way into the batch: what is kept of its beginning is taken over, the rest is read in chunks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from service.engine.cache import RowCache
from service.engine.drafting import ModelDrafter
from service.engine.prefix import Owner, PrefixCache
from service.engine.row import Row
from service.engine.target import Target


@dataclass(slots=True)
class Prefill:
    """A prompt being read, in chunks, in caches of its own."""

    row: Row
    target: RowCache
    drafter: RowCache | None
    epoch: int
    """The decoder's when the draft began to read it; what another draft read, or one that failed since, is worth nothing."""

    follows: bool | None = None
    """Whether the draft reads it too; None: not settled yet."""

    @property
    def left(self) -> int:
        """Tokens the target has still to read, unless a kept beginning saves some."""
        return len(self.row.prompt.tokens) - 1 - self.target.lengths.longest


def lead(target: Target, prefill: Prefill, *, size: int, prefix: PrefixCache | None) -> bool:
    """Let the target read the next chunk of a prompt. True while there is more."""
    return _advance(Owner.TARGET, target, prefill.target, prefill.row, size, sys.maxsize, prefix)


def follow(drafter: ModelDrafter, prefill: Prefill, *, size: int, prefix: PrefixCache | None) -> bool:
    """Let the draft read the next chunk, as far as it can go before the target. True while there is more."""
    assert prefill.drafter is not None
    read, upto = partial(drafter.feed, target=prefill.target), drafter.readable(prefill.target)
    return _advance(Owner.DRAFT, read, prefill.drafter, prefill.row, size, upto, prefix)


def _advance(
    owner: Owner,
    read: Callable[[mx.array, RowCache], object],
    cache: RowCache,
    row: Row,
    size: int,
    upto: int,
    prefix: PrefixCache | None,
) -> bool:
    """Take over what is kept of a prompt, once, and read the next `size` tokens, all but its last and none from position `upto`
    on. True while there is more."""
    prompt = row.prompt.tokens[:-1]
    if prefix is not None and cache.lengths.host[0] == 0:
        held = prefix.fill(owner, prompt, cache)
        row.reused = held if owner is Owner.TARGET else row.reused
    done = cache.lengths.host[0]
    chunk = mx.array([prompt[done : min(done + size, upto)]], dtype=mx.int32)
    if chunk.size:
        read(chunk, cache)
        mx.eval(cache.arrays())
        cache.commit(chunk.shape[1])
        if prefix is not None and row.prompt.store:
            prefix.enter(owner, prompt, cache)
    return cache.lengths.host[0] < len(prompt)
