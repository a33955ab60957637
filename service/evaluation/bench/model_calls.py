"""The model calls of a round by themselves: target calls and draft steps, handed over one after another with one wait at the
end.

What a round of the engine takes beyond that is its overhead: sampling, acceptance, evidence, bookkeeping, and the host's part
wherever the device waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from service.engine import device
from service.engine.adapters import Draft
from service.engine.drafters.head import draft_calls
from service.engine.kv.cache import RowCache
from service.engine.replay import FIRST_CALLS
from service.engine.target import Target
from service.models.heads import cut_head
from service.models.pair import Pair
from service.models.vocabulary import extra_ids

WARM = FIRST_CALLS
"""Calls before any that is timed: they allocate keys and values and compile kernels, and some devices trace them."""


class Calls:
    """Calls over rows that hold these texts, but for each row's last token, which is read next. draft None: no draft steps.

    Keys and values are zeros: a call costs the same. After every call the rows hold what they held before it. Use as a context,
    which gives a cut head the rows' own ids meanwhile.
    """

    def __init__(self, pair: Pair, draft: Draft | None, texts: Sequence[Sequence[int]]) -> None:
        model = None if draft is None else draft.model
        self._target = Target(pair.target.model, model)
        self._draft = None if model is None else draft_calls(model).replayed(model)
        self._known = pair.shared_vocabulary
        self._texts = texts
        self._lengths = [len(text) - 1 for text in texts]
        self._caches = [self._target.cache(len(texts))] + ([] if model is None else [RowCache(model, len(texts))])
        for cache in self._caches:
            cache.rewind(self._lengths)
        self._head = None if model is None else cut_head(model)

    def __enter__(self) -> Calls:
        if self._head is not None:
            self._head.allow_extra_ids(mx.array(extra_ids(self._texts, self._head.in_vocabulary)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._head is not None:
            self._head.allow_extra_ids(None)

    def target(self, tokens: int) -> list[mx.array]:
        """One target call over so many tokens of each row. Returns what has to be computed."""
        return self._verify(self._last(tokens))

    def step(self) -> list[mx.array]:
        """One draft step over one token of each row. Returns what has to be computed."""
        return [self._propose(self._last(1), 1)[0], *self._caches[1].arrays()]

    def round(self, drafted: int, proposed: int) -> list[mx.array]:
        """The calls of a round: `drafted` draft steps, each handed over by itself, and a target call over `proposed` + 1
        tokens of each row. Returns what has to be computed."""
        if not drafted:
            return self.target(proposed + 1)
        last = self._last(1)
        return self._verify(mx.concatenate([last, *self._propose(last, drafted)], axis=1))

    def _last(self, tokens: int) -> mx.array:
        return mx.array(np.array([text[-tokens:] for text in self._texts], dtype=np.int32))

    def _verify(self, tokens: mx.array) -> list[mx.array]:
        cache = self._caches[0]
        chosen = mx.argmax(self._target.verify(tokens, cache), axis=-1)
        cache.rewind(self._lengths)
        return [chosen, *cache.arrays()]

    def _propose(self, feed: mx.array, steps: int) -> list[mx.array]:
        assert self._draft is not None
        cache, drafted = self._caches[1], list[mx.array]()
        for step in range(steps):
            logits = self._draft.logits(feed, cache)
            cache.rewind([length + step + 1 for length in self._lengths])
            feed = mx.argmax(logits[..., : self._known], axis=-1).astype(mx.int32)
            drafted.append(feed)
            device.launch(feed)
        cache.rewind(self._lengths)
        return drafted


def queued(call: Callable[[], list[mx.array]], count: int, warm: int = WARM) -> float:
    """Seconds of one of `count` calls that are handed over one after another, with one wait at the end. warm: calls before
    them."""
    for _ in range(warm):
        device.wait(call())
    started = time.perf_counter()
    for _ in range(count - 1):
        device.launch(call())
    device.wait(call())
    return (time.perf_counter() - started) / count
