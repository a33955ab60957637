"""A prompt on its way into the batch: what is kept of its beginning is taken over, the rest is read in chunks."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from service.engine.cache import RowCache
from service.engine.prefix import Owner, PrefixCache
from service.engine.row import Row


@dataclass(slots=True)
class Prefill:
    """A prompt being read, in chunks, in caches of its own."""

    row: Row
    target: RowCache
    drafter: RowCache | None
    epoch: int
    """The decoder's when the draft began to read it; what another draft read, or one that failed since, is worth nothing."""

    @property
    def left(self) -> int:
        """Tokens the target has still to read, unless a kept beginning saves some."""
        return len(self.row.prompt.tokens) - 1 - self.target.lengths.longest


def advance(
    owner: Owner, model: nn.Module, cache: RowCache, row: Row, *, size: int, prefix: PrefixCache | None
) -> bool:
    """Take over what is kept of a prompt, once, and read the next `size` tokens, all but its last. True while there is more."""
    prompt = row.prompt.tokens[:-1]
    if prefix is not None and cache.lengths.host[0] == 0:
        held = prefix.fill(owner, prompt, cache)
        row.reused = held if owner is Owner.TARGET else row.reused
    done = cache.lengths.host[0]
    chunk = mx.array([prompt[done : done + size]], dtype=mx.int32)
    if chunk.size:
        model(chunk, cache=cache.layers)
        mx.eval(cache.arrays())
        cache.commit(chunk.shape[1])
        if prefix is not None and row.prompt.store:
            prefix.enter(owner, prompt, cache)
    return cache.lengths.host[0] < len(prompt)
