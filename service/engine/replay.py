"""Model calls that are traced once for each shape and replayed, where the host is what a round waits for.

A target's call over a few tokens is a thousand operations, which Python describes in 1.5 to 4 ms. `mx.compile` describes them
once, and may use kernels that would cost Python too much in every call (`products`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from service.engine import attention, products
from service.engine.kv.cache import RowCache
from service.engine.kv.groups import Groups
from service.engine.strategy import current

log = logging.getLogger(__name__)

MOST_TRACES = 128
"""Traces that are held, those used last: each takes one to four megabytes of the host."""
FIRST_CALLS = 3
"""Calls of a shape until it is replayed as it will always be: the first of all, the one that is traced, and one more."""

Arguments: TypeAlias = Sequence[Any]
"""Trees (lists, tuples and dicts) of arrays, numbers, booleans and None."""
Call: TypeAlias = Callable[[Arguments, RowCache], Any]
"""A model's call: returns a tree of arrays."""


class Replay:
    """Calls of a model over a row cache. call: runs it over arguments and a cache, to which it appends keys and values, and
    returns a tree of arrays. Everything else that it reads must stay what it is. traces_first: trace the first call too; else
    it runs as it is, so that what a model makes in its first call is not made inside a trace.

    Calls over more than `attention.FEW` tokens a row, of models with recurrent states or attention of their own, and where the
    device gains nothing by it (`strategy`), run as they are; so do calls inside another trace.
    """

    def __init__(self, model: nn.Module, call: Call, *, traces_first: bool = False) -> None:
        self._call = call
        self._model = model
        self._called = traces_first
        self._traces: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
        self._possible = current().replay
        if self._possible:
            products.route(model)

    def __call__(self, arguments: Arguments, cache: RowCache, count: int) -> Any:
        """What the call returns. Its keys and values are in `cache`. count: tokens of each row that it appends."""
        usual = self._possible and cache.routed and not cache.states and count <= attention.FEW
        pages = cache.pages
        if not usual or pages is None or products.inside() or not pages.pool.layers:
            return self._call(arguments, cache)
        pages.pool.launch()
        pages.reserve(cache.ahead + count)
        buffers = pages.buffers()
        kinds = [_kind(leaf) for _, leaf in cast("list[tuple[str, Any]]", tree_flatten(arguments))]
        key = (buffers[0].shape, pages.table.shape, *kinds)
        trace = self._traces.get(key)
        if trace is None:
            if not self._called:
                self._called = True
                # With the kernels that a trace has, so that both give the same bits.
                cache.lengths.equal = False
                return _by_kernel(self._call, arguments, cache)
            trace = self._new_trace(pages.groups, pages.written())
        try:
            returned, buffers, writes = trace(arguments, cache.lengths.starts(cache.ahead), pages.table, buffers)
        except Exception as error:  # noqa: BLE001  (whatever the model raises, it may raise because it is traced)
            log.warning("a model's calls cannot be traced and run as they are: %s", error)
            self._possible = False
            return self._call(arguments, cache)
        cache.appended(count, buffers, writes)
        self._traces[key] = trace
        self._traces.move_to_end(key)
        if len(self._traces) > MOST_TRACES:
            self._traces.popitem(last=False)
        return returned

    def _new_trace(self, groups: Groups, written: Sequence[int]) -> Callable[..., Any]:
        # Not `self`, which holds the traces: in a cycle they and the weights in them would stay until Python's collector runs.
        model, call = self._model, self._call

        def run(
            arguments: Arguments, starts: mx.array, table: mx.array, buffers: Sequence[mx.array]
        ) -> tuple[Any, ...]:
            cache = RowCache.traced(model, starts, table, groups, written, buffers)
            returned = _by_kernel(call, arguments, cache)
            assert cache.pages is not None
            return returned, *cache.pages.traced_writes()

        return cast("Callable[..., Any]", mx.compile(run))


def _by_kernel(call: Call, arguments: Arguments, cache: RowCache) -> Any:
    with products.by_kernel():
        return call(arguments, cache)


def _kind(leaf: Any) -> Hashable:
    """What tells two calls' arguments apart."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf
