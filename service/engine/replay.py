"""Model calls that are traced once for each shape and replayed, where the host is what a round waits for.

A target's call over a few tokens is a thousand operations, which Python describes in 1.5 to 4 ms. `mx.compile` describes them
once, and may use kernels that would cost Python too much in every call (`products`).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn

from service.engine import attention, products
from service.engine.kv.cache import RowCache
from service.engine.strategy import current

log = logging.getLogger(__name__)

MOST_TRACES = 128
"""Traces that are held, those used last: each takes one to four megabytes of the host."""
SEEN_BEFORE = 2
"""Calls of a shape before it is traced: tracing costs as much as some calls, and many shapes come once or twice."""
MOST_SHAPES = 4096
"""Shapes whose calls are counted; after that counting starts again."""

Call: TypeAlias = Callable[[Sequence[mx.array], RowCache], tuple[mx.array, ...]]
Trace: TypeAlias = Callable[
    [Sequence[mx.array], mx.array, Sequence[mx.array]], tuple[Sequence[mx.array], Sequence[mx.array]]
]


class Replay:
    """Calls of a model over a row cache. call: runs it over arrays, the first of which are tokens (B, N), appends their keys
    and values to a cache and returns arrays. Everything else that it reads must stay what it is. seen_before: see SEEN_BEFORE.

    Calls over more than `attention.MOST` tokens a row, of models with recurrent states or attention of their own, and where the
    device gains nothing by it (`strategy`), run as they are.
    """

    def __init__(self, model: nn.Module, call: Call, *, seen_before: int = SEEN_BEFORE) -> None:
        self._call = call
        self._model = model
        self._seen_before = seen_before
        self._traces: OrderedDict[tuple[tuple[int, ...], ...], Trace] = OrderedDict()
        self._seen: Counter[tuple[tuple[int, ...], ...]] = Counter()
        self._possible = current().replay

    def __call__(self, arrays: Sequence[mx.array], cache: RowCache) -> tuple[mx.array, ...]:
        """What the call returns. Its keys and values are in `cache`."""
        count = arrays[0].shape[1]
        if not self._possible or not cache.routed or cache.states or count > attention.MOST or not cache.reserve(count):
            return self._call(arrays, cache)
        first = cache.attention[0].keys
        assert first is not None
        key = (*(array.shape for array in arrays), first.shape)
        trace = self._traces.get(key)
        if trace is None:
            if len(self._seen) > MOST_SHAPES:
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= self._seen_before:
                return self._call(arrays, cache)
            trace = self._new_trace()
        starts, buffers = cache.lengths.starts(cache.ahead), cache.buffers()
        try:
            returned, written = trace(arrays, starts, buffers)
        except Exception as error:  # noqa: BLE001  (whatever the model raises, it may raise because it is traced)
            log.warning("a model's calls cannot be traced and run as they are: %s", error)
            self._possible = False
            return self._call(arrays, cache)
        cache.set_buffers(written, count)
        self._traces[key] = trace
        self._traces.move_to_end(key)
        if len(self._traces) > MOST_TRACES:
            del self._seen[self._traces.popitem(last=False)[0]]
        return tuple(returned)

    def _new_trace(self) -> Trace:
        products.route(self._model)

        def run(
            arrays: Sequence[mx.array], starts: mx.array, buffers: Sequence[mx.array]
        ) -> tuple[tuple[mx.array, ...], list[mx.array]]:
            cache = RowCache(self._model, 0)
            cache.trace(starts, buffers)
            with products.tracing():
                returned = self._call(arrays, cache)
            return returned, cache.buffers()

        return cast("Trace", mx.compile(run))
