"""Model calls that are traced once per shape and replayed, for devices whose rounds are limited by the host.

A target's call over a few tokens consists of about a thousand operations, which Python takes 1.5 to 4 ms to build. `mx.compile`
builds them once, and a traced call can use kernels that would take Python too long in every call (`products`).
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
"""Maximum traces kept, most recently used. Each takes one to four megabytes of host memory."""
FIRST_CALLS = 3
"""Calls of a shape until it is replayed in its final form: the very first call, the traced one, and one more."""

Arguments: TypeAlias = Sequence[Any]
"""Trees (lists, tuples and dicts) of arrays, numbers, booleans and None."""
Call: TypeAlias = Callable[[Arguments, RowCache], Any]
"""A model's call: returns a tree of arrays."""


class Replay:
    """Traced calls of a model over a row cache. call: runs the model over arguments and a cache, to which it appends keys and
    values, and returns a tree of arrays. Everything else that it reads must not change. traces_first: trace the first call too;
    otherwise it runs untraced, so that arrays which a model creates in its first call are not created inside a trace.

    Some calls run untraced: those over more than `attention.FEW` tokens per row, those of models with recurrent states or
    custom attention, those on devices that do not benefit (`strategy`), and those inside another trace.
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
        """The result of the call, whose keys and values are in `cache` afterwards. count: tokens appended to each row."""
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
                # Use the kernels of a traced call, so that both give the same bits.
                cache.lengths.equal = False
                return _by_kernel(self._call, arguments, cache)
            trace = self._new_trace(pages.groups, pages.written())
        try:
            returned, buffers, writes = trace(arguments, cache.lengths.starts(cache.ahead), pages.table, buffers)
        except Exception as error:  # noqa: BLE001  (tracing may be the cause of any error)
            log.warning("cannot trace a model's calls, running them untraced: %s", error)
            self._possible = False
            return self._call(arguments, cache)
        cache.appended(count, buffers, writes)
        self._traces[key] = trace
        self._traces.move_to_end(key)
        if len(self._traces) > MOST_TRACES:
            self._traces.popitem(last=False)
        return returned

    def _new_trace(self, groups: Groups, written: Sequence[int]) -> Callable[..., Any]:
        # Not `self`, which holds the traces: a reference cycle would keep them and their weights until garbage collection.
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
    """The key that distinguishes the arguments of two calls."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, mx.array) else leaf
