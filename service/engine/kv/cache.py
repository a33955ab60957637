"""A KV cache whose rows have different lengths, behind mlx-lm's cache protocol.

A row is truncated by setting its length. Keys and values are in `pages` on CUDA and in `rectangles` elsewhere. Recurrent layers
hold states (`recurrent`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from service.core import PairError
from service.engine import device
from service.engine.attention import route
from service.engine.kv.groups import Groups, grouped
from service.engine.kv.layer import RowLayer
from service.engine.kv.lengths import Lengths
from service.engine.kv.pages import Pages
from service.engine.kv.pool import Pool
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.kv.rectangles import Rectangles
from service.engine.kv.recurrent import StateLayer, record_calls
from service.engine.strategy import current, using


class RowCache:
    """The KV cache of one model over a batch. Pass `layers` to the model, then set which of the fed tokens stay: with
    `truncate`, or with `rewind` if more may have to be dropped later. pool: where its rows take pages; None: a new pool.

    Raises PairError if a layer of the model cannot be truncated.
    """

    def __init__(self, model: nn.Module, rows: int, *, features: bool = False, pool: Pool | None = None) -> None:
        self.lengths = Lengths([0] * rows)
        self.pages: Pages | None = None
        """Where keys and values are, if paged."""
        if current().paged:
            pool = pool or Pool()
            pool.groups = pool.groups or _groups(model, features=features)
            self.pages = Pages(pool, pool.groups, self.lengths, rows)
        self.storage: Any = self.pages or Rectangles(self.lengths)
        """Holds keys and values: `Pages` or `Rectangles`."""
        self.attention: list[RowLayer] = []
        """The layers with keys and values; the one with features is last."""
        self.states: list[StateLayer] = []
        self.routed = self.pages is not None and route(model)
        """Whether calls over few tokens per row go through `attention`."""
        self.layers = [self._layer(layer) for layer in make_prompt_cache(model)]
        self.features: RowLayer | None = None
        """The target's features for an EAGLE head. Not a layer of the model, but joined, compacted and truncated like one."""
        if features:
            self.features = self._attention_layer(None)
        if self.states:
            record_calls(model)

    @classmethod
    def traced(
        cls,
        model: nn.Module,
        starts: mx.array,
        table: mx.array,
        groups: Groups,
        written: Sequence[int],
        buffers: Sequence[mx.array],
    ) -> RowCache:
        """The cache inside a traced call. starts: each row's end. table: the numbers of its pages. written, buffers: the pool's
        arrays that hold keys and values."""
        pool = Pool()
        pool.groups = groups
        cache = cls(model, 0, pool=pool)
        # Lengths on the host would become constants of the trace.
        cache.follow(starts, [0] * starts.shape[0])
        assert cache.pages is not None
        cache.pages.trace(table, written, buffers)
        return cache

    def _layer(self, layer: object) -> RowLayer | StateLayer | tuple[object, ...]:
        if isinstance(layer, CacheList):
            return tuple(self._layer(part) for part in cast("tuple[object, ...]", layer.caches))
        if type(layer) is ArraysCache:
            self.states.append(StateLayer(len(cast("list[object]", layer.cache))))
            return self.states[-1]
        if type(layer) is KVCache:
            return self._attention_layer(None)
        if type(layer) is RotatingKVCache and layer.keep == 0:
            return self._attention_layer(layer.max_size)
        raise PairError(f"its {type(layer).__name__} cannot be rolled back when a token is rejected")

    def _attention_layer(self, window: int | None) -> RowLayer:
        self.attention.append(self.storage.layer(window))
        return self.attention[-1]

    def appended(self, count: int, buffers: Sequence[mx.array], writes: Sequence[mx.array]) -> None:
        """Record that a traced call has appended `count` tokens to every row. buffers, writes: from `Pages.traced_writes`."""
        assert self.pages is not None
        self.pages.take_writes(buffers, writes)
        written = set(self.pages.written())
        for i, layer in enumerate(self.attention):
            if self.pages.groups.place(i)[1] in written:
                layer.ahead += count

    @property
    def ahead(self) -> int:
        """Positions written since the lengths were last set, the same for every row."""
        return self.attention[0].ahead

    def append_features(self, features: mx.array) -> None:
        """Store the features (B, N, width) of the tokens just fed."""
        assert self.features is not None
        self.features.append_features(features)

    def features_before(self, lengths: Lengths, count: int) -> mx.array | None:
        """Features (B, count, width) of positions n - 1 .. n + count - 2 of each row, with n its length in `lengths`. Zeros
        before position 0, garbage past the row's end. None if none are stored yet."""
        if self.features is None:
            return None
        at = lengths.starts(0)[:, None] - 1 + mx.arange(count)
        found = self.features.features_at(mx.maximum(at, 0))
        return None if found is None else mx.where((at >= 0)[..., None], found, 0.0)

    def commit(self, count: int) -> None:
        """Keep `count` fed tokens of every row."""
        self.truncate([length + count for length in self.lengths.host])

    def follow(self, starts: mx.array, most: Sequence[int]) -> None:
        """Set every row's length to a value that only the device knows: see Lengths. Not for models with recurrent states."""
        self.lengths.follow(starts, most)
        for layer in self.attention:
            layer.ahead = 0

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set every row's length. Afterwards no row can be rewound to an earlier position."""
        self.rewind(lengths)
        self.lengths.commit()
        for layer in self.states:
            layer.commit()

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set every row's length to that of the last `truncate` or more."""
        if self.states:
            self._rewind_states(lengths)
        self.lengths.set(lengths)
        for layer in self.attention:
            layer.ahead = 0

    def _rewind_states(self, lengths: Sequence[int]) -> None:
        counts = [wanted - settled for wanted, settled in zip(lengths, self.lengths.committed, strict=True)]
        fed = self.states[0].uncommitted
        if min(counts, default=0) < 0:
            raise ValueError("a recurrent state was committed and cannot be rewound further")
        if all(count == fed for count in counts):
            return
        for layer in self.states:
            if max(counts) > fed:
                # Cost measurements set lengths that were never fed.
                layer.commit()
            else:
                layer.truncate(counts)
        self.lengths.committed = list(lengths)

    def join(self, others: Sequence[RowCache], counts: Sequence[int], slots: Sequence[int], size: int) -> None:
        """Move the first counts[i] rows of each of these caches of the same model into the given slots of this cache, which
        then has `size` rows. New slots without a row are empty. With recurrent states, rows can only be appended. The other
        caches are empty afterwards."""
        have = len(self.lengths.host)
        self.storage.join([cache.storage for cache in others], counts, slots, size)
        for i, state in enumerate(self.states):
            state.join([cache.states[i] for cache in others], [have, *counts])
            for cache in others:
                cache.states[i].clear()
        lengths = [*self.lengths.host, *[0] * (size - have)]
        joined = [n for cache, count in zip(others, counts, strict=True) for n in cache.lengths.host[:count]]
        for slot, length in zip(slots, joined, strict=True):
            lengths[slot] = length
        self._set_rows(lengths)

    def reserve(self, positions: int) -> None:
        """Allocate buffers for `positions` of each row on the first write (rectangles only)."""
        self.lengths.reserved = positions

    def make_room(self, positions: int) -> None:
        """Give every row capacity for `positions` (`Rectangles.make_room`); nothing to do with pages."""
        if self.pages is None:
            self.storage.make_room(positions)

    def append(self, other: RowCache) -> None:
        """Append the rows of another cache of the same model."""
        have, more = len(self.lengths.host), len(other.lengths.host)
        self.join([other], [more], range(have, have + more), have + more)

    def pad(self, rows: Collection[int], length: int) -> None:
        """Turn these rows into padding of the given length. Their contents no longer matter."""
        self.storage.pad(rows)
        self._set_rows([length if row in rows else n for row, n in enumerate(self.lengths.host)])

    def copy_moved(self, rows: Sequence[int], *, tight: bool = False) -> list[mx.array | None]:
        """The arrays that must be computed before `compact`."""
        return self.storage.copy_moved(rows, tight=tight)

    def compact(self, rows: Sequence[int], copies: Sequence[mx.array | None], *, tight: bool = False) -> None:
        """Keep these rows, in this order. copies: from `copy_moved`, computed. tight: without spare memory."""
        lengths = [self.lengths.host[row] for row in rows]
        self.storage.compact(rows, copies, tight=tight)
        for state in self.states:
            state.keep(rows, len(self.lengths.host))
        self._set_rows(lengths)

    def contents(self, row: int) -> list[tuple[mx.array, mx.array | None]]:
        """Keys and values (heads, length, dims) of a row in every layer that has any."""
        return [found for layer in self.attention if (found := layer.contents(row)) is not None]

    def remove_nonfinite(self, row: int) -> bool:
        """Remove a row's non-finite values. Values past its end are zeroed. If there are any before its end, the row is
        emptied. Returns False if it was emptied. One host sync."""
        lengths = list(self.lengths.host)
        slots = [a for state in self.states for a in state.cache if a is not None]
        held = [a for both in self.contents(row) for a in both if a is not None]
        parts = [*held, *(a[row] for a in slots)]
        sound = not parts or bool(device.read(mx.stack([mx.isfinite(part).all() for part in parts]).all())[0])
        if not sound:
            lengths[row] = 0
            for array in slots:
                array[row] = 0
            for state in self.states:
                state.commit()
            self.storage.clear(row)
            self._set_rows(lengths)
        self.zero_tail(row)
        return sound

    def zero_tail(self, row: int, start: int | None = None) -> None:
        """Zero non-finite values past a row's end, or from `start` on."""
        self.storage.zero_tail(row, self.lengths.host[row] if start is None else start)

    def _set_rows(self, lengths: Sequence[int]) -> None:
        """Set the lengths after the rows of the batch have changed; all of them are committed."""
        self.lengths.set(lengths)
        self.lengths.commit()
        for layer in self.attention:
            layer.ahead = 0

    @property
    def slots(self) -> int:
        """Rows for which memory is reserved, including spare rows."""
        return self.storage.slots

    def arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated to compute the rows' contents; with rectangles, in the order of the model's
        layers."""
        if self.pages is not None:
            return [*self.storage.arrays(), *self._state_arrays(self.states)]
        found = [array for layer in self.layers for array in self._layer_arrays(layer)]
        return found if self.features is None else [*found, *self._layer_arrays(self.features)]

    def _layer_arrays(self, layer: object) -> list[mx.array]:
        if isinstance(layer, tuple):
            return [array for part in cast("tuple[object, ...]", layer) for array in self._layer_arrays(part)]
        if isinstance(layer, StateLayer):
            return self._state_arrays([layer])
        return [array for array in cast("RectangleLayer", layer).both if array is not None]

    @staticmethod
    def _state_arrays(states: Sequence[StateLayer]) -> list[mx.array]:
        return [array for state in states for array in state.cache if array is not None]

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all rows."""
        return sum(array.nbytes for array in self._state_arrays(self.states))


_KINDS = "kinds_of_layers"
"""Attribute of a model that caches the result of `_kinds`."""


@dataclass(frozen=True, slots=True)
class _Kinds:
    """For each layer of a model: its window, and a key that layers with arrays of equal shape share (None: it holds
    nothing)."""

    windows: list[int | None]
    kinds: list[Hashable | None]


def _groups(model: nn.Module, *, features: bool) -> Groups:
    """How the layers of a model are grouped in pages. Raises PairError."""
    kinds = cast("_Kinds | None", getattr(model, _KINDS, None))
    if kinds is None:
        kinds = _kinds(model)
        setattr(model, _KINDS, kinds)
    return grouped(kinds.windows, kinds.kinds, features=features)


def _kinds(model: nn.Module) -> _Kinds:
    """The kinds of a model's layers. If windows differ, a call finds them, in which only shapes are computed."""
    with using(replace(current(), paged=False)):
        cache = RowCache(model, 1)
        windows = [layer.window for layer in cache.attention]
        if len(set(windows)) < 2:
            return _Kinds(windows, [True] * len(windows))
        model(mx.zeros((1, 1), dtype=mx.int32), cache=cache.layers)
        held = [layer.both for layer in cast("list[RectangleLayer]", cache.attention)]
    return _Kinds(windows, [_kind(*both) for both in held])


def _kind(keys: mx.array | None, values: mx.array | None) -> Hashable | None:
    if keys is None or values is None:
        return None
    return keys.shape[1], keys.shape[3], keys.dtype, values.shape[1], values.shape[3], values.dtype
