"""The model calls of a round alone: target calls and draft steps, launched one after another with one wait at the end.

What a round of the engine takes beyond them is its overhead: sampling, acceptance, evidence, bookkeeping, and whatever the
device waits for the host.
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
"""Calls before those that are timed: they allocate keys and values and compile kernels, and some devices trace them."""


class ModelCalls:
    """Calls over rows of these texts, whose caches hold all tokens but the last. draft: None for no draft steps.

    Keys and values are zeros, which cost the same. After every call the caches are truncated to what they held before. Use as a
    context manager, which gives a cut head the rows' own ids meanwhile.
    """

    def __init__(self, pair: Pair, draft: Draft | None, texts: Sequence[Sequence[int]]) -> None:
        model = None if draft is None else draft.model
        self._target = Target(pair.target.model, model)
        self._draft = None if model is None else draft_calls(model).replayed(model)
        self._vocabulary = pair.shared_vocabulary
        self._texts = texts
        self._lengths = [len(text) - 1 for text in texts]
        self._caches = [self._target.cache(len(texts))] + ([] if model is None else [RowCache(model, len(texts))])
        for cache in self._caches:
            cache.rewind(self._lengths)
        self._head = None if model is None else cut_head(model)

    def __enter__(self) -> ModelCalls:
        if self._head is not None:
            self._head.allow_extra_ids(mx.array(extra_ids(self._texts, self._head.in_vocabulary)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._head is not None:
            self._head.allow_extra_ids(None)

    def target(self, tokens: int) -> list[mx.array]:
        """One target call over so many tokens of each row. Returns arrays that are not evaluated yet."""
        return self._verify(self._last(tokens))

    def step(self) -> list[mx.array]:
        """One draft step over one token of each row. Returns arrays that are not evaluated yet."""
        return [self._propose(self._last(1), 1)[0], *self._caches[1].arrays()]

    def round(self, drafted: int, proposed: int) -> list[mx.array]:
        """The calls of a round: `drafted` draft steps, each launched by itself, and a target call over `proposed` + 1 tokens
        of each row. Returns arrays that are not evaluated yet."""
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
            feed = mx.argmax(logits[..., : self._vocabulary], axis=-1).astype(mx.int32)
            drafted.append(feed)
            device.launch(feed)
        cache.rewind(self._lengths)
        return drafted


def queued(call: Callable[[], list[mx.array]], count: int, warm: int = WARM) -> float:
    """Mean seconds of `count` calls that are launched one after another, with one wait at the end. warm: calls before them,
    which are not timed."""
    for _ in range(warm):
        device.wait(call())
    started = time.perf_counter()
    for _ in range(count - 1):
        device.launch(call())
    device.wait(call())
    return (time.perf_counter() - started) / count
