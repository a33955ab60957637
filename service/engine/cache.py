"""A KV cache whose rows have lengths of their own, behind mlx-lm's cache protocol.

Rows are left-aligned: row b holds positions 0 .. lengths[b]-1, what lies behind is garbage that the mask hides and the next
write overwrites. Rolling a row back is therefore setting its length. Sliding-window layers keep all positions too and
narrow the mask instead (a rotating buffer cannot be rolled back). Recurrent layers hold states (`state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from service.core import PairError
from service.engine.state import StateLayer, record

STEP = 128
"""Positions allocated at a time."""


class Lengths:
    """How many positions each row holds, on the host and (made when asked for) as an array for rope and masks."""

    def __init__(self, values: Sequence[int]) -> None:
        self.set(values)

    def set(self, values: Sequence[int]) -> None:
        self.host = list(values)
        # Every layer asks for these.
        self.longest = max(self.host, default=0)
        self.equal = min(self.host, default=0) == self.longest
        self._array: mx.array | None = None

    @property
    def array(self) -> mx.array:
        if self._array is None:
            self._array = mx.array(self.host, dtype=mx.int32)
        return self._array


class RowLayer:
    """One layer's keys and values, (B, heads, capacity, dims); heads and dims may differ between the two."""

    def __init__(self, lengths: Lengths, window: int | None) -> None:
        self.lengths = lengths
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.ahead = 0
        """Positions written since `lengths` was last set, the same for every row."""

    @property
    def offset(self) -> mx.array | int:
        """Position of the next token of each row: an int where all rows agree (rope's fast path), else (B,)."""
        if self.lengths.equal:
            return self.lengths.host[0] + self.ahead
        return self.lengths.array + self.ahead if self.ahead else self.lengths.array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, heads, N, dims) to every row; returns views up to the longest row."""
        self.keys = self._written(self.keys, keys)
        self.values = self._written(self.values, values)
        self.ahead += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views up to the longest row; later layers that share this one's ask for them again (gemma3n)."""
        assert self.keys is not None and self.values is not None
        top = self.lengths.longest + self.ahead
        return self.keys[:, :, :top], self.values[:, :, :top]

    def note(self, states: mx.array) -> None:
        """Append (B, N, width) to every row, as keys without values."""
        self.keys = self._written(self.keys, states[:, None])
        self.ahead += states.shape[1]

    def _written(self, held: mx.array | None, new: mx.array) -> mx.array:
        held = grown(held, new, self.lengths.longest + self.ahead + new.shape[2])
        start = self.offset
        if isinstance(start, int):
            held[:, :, start : start + new.shape[2]] = new
            return held
        at = start[:, None] + mx.arange(new.shape[2])
        at = mx.broadcast_to(at[:, None, :, None], new.shape)
        return mx.put_along_axis(held, at, new.astype(held.dtype), axis=2)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """mlx-lm asks before the update. (1 or B, 1, N, longest + N) booleans; None or "causal" where that says it all.

        Raises PairError where a model asks for a wider window than its cache holds (plamo3): mlx-lm then reads prompts and
        generates through unlike windows, which no single mask can follow.
        """
        if window_size and self.window and window_size > self.window:
            raise PairError(f"it reads prompts through a window of {window_size} and generates through {self.window}")
        window = window_size or self.window
        start = self.offset
        longest = self.lengths.longest + self.ahead
        if isinstance(start, int):
            if window is None or longest + N <= window:
                if N == 1:
                    return None
                if not return_array:
                    return "causal"
            start = mx.array([start])
        key = mx.arange(longest + N)
        query = (start[:, None] + mx.arange(N))[:, None, :, None]
        mask = key <= query
        return mask if window is None else mask & (key > query - window)


def grown(held: mx.array | None, like: mx.array, top: int) -> mx.array:
    """`held` with room for `top` positions (new room is zeros), allocated in steps."""
    capacity = 0 if held is None else held.shape[2]
    if held is not None and top <= capacity:
        return held
    rows, heads, _, dims = like.shape
    extra = mx.zeros((rows, heads, -(-top // STEP) * STEP - capacity, dims), dtype=like.dtype)
    return extra if held is None else mx.concatenate([held, extra], axis=2)


class RowCache:
    """The cache of one model over a batch: pass `layers` to the model, then say what holds of what was written, for the time
    being (`rewind`) or for good (`settle`).

    Raises PairError when the model keeps a state that cannot be rolled back.
    """

    def __init__(self, model: nn.Module, rows: int, *, features: bool = False) -> None:
        self.lengths = Lengths([0] * rows)
        self.attention: list[RowLayer] = []
        self.states: list[StateLayer] = []
        self.layers = [self._layer(layer) for layer in make_prompt_cache(model)]
        self.features: RowLayer | None = None
        """Not a layer of the model, but joined, kept and rolled back with its layers."""
        if features:
            self.features = RowLayer(self.lengths, None)
            self.attention.append(self.features)
        self._settled = self.lengths.host
        if self.states:
            record(model)

    def _layer(self, layer: object) -> RowLayer | StateLayer | tuple[object, ...]:
        if isinstance(layer, CacheList):
            return tuple(self._layer(part) for part in cast("tuple[object, ...]", layer.caches))
        if type(layer) is ArraysCache:
            self.states.append(StateLayer(len(cast("list[object]", layer.cache))))
            return self.states[-1]
        if type(layer) is KVCache:
            self.attention.append(RowLayer(self.lengths, None))
        elif type(layer) is RotatingKVCache and layer.keep == 0:
            self.attention.append(RowLayer(self.lengths, layer.max_size))
        else:
            raise PairError(f"its {type(layer).__name__} cannot be rolled back to before a rejected token")
        return self.attention[-1]

    def note(self, features: mx.array) -> None:
        """Hold the features (B, N, width) of the tokens just fed."""
        assert self.features is not None
        self.features.note(features)

    def before(self, starts: Sequence[int], count: int) -> mx.array | None:
        """Features (B, count, width) of the positions before each of row b's positions from starts[b] on, zeros before the
        first; None where nothing was noted yet. Beyond what a row holds they are anything."""
        held = self.features.keys if self.features is not None else None
        if held is None:
            return None
        first, room = starts[0] - 1, held.shape[2]
        if min(starts) == max(starts) and first >= 0 and first + count <= room:
            return held[:, 0, first : first + count]
        at = np.array(starts)[:, None] - 1 + np.arange(count)
        picked = mx.array(np.clip(at, 0, room - 1).astype(np.int32))[..., None]
        known = mx.array((at >= 0).tolist())[..., None]
        return mx.where(known, mx.take_along_axis(held[:, 0], picked, axis=1), 0.0)

    def commit(self, count: int) -> None:
        """`count` tokens were fed to every row, and stay."""
        self.settle([length + count for length in self.lengths.host])

    def settle(self, lengths: Sequence[int]) -> None:
        """Set every row's length for good: no row will be taken back before it."""
        self.rewind(lengths)
        self._settled = self.lengths.host
        for layer in self.states:
            layer.settle()

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set every row's length, to what was settled or more; what lies behind is forgotten."""
        if self.states:
            self._rewind_states(lengths)
        self.lengths.set(lengths)
        for layer in self.attention:
            layer.ahead = 0

    def _rewind_states(self, lengths: Sequence[int]) -> None:
        counts = [wanted - settled for wanted, settled in zip(lengths, self._settled, strict=True)]
        fed = self.states[0].fed
        if min(counts, default=0) < 0:
            raise ValueError("a recurrent state was settled and cannot be taken back before that")
        if all(count == fed for count in counts):
            return
        for layer in self.states:
            if max(counts) > fed:
                # Measurements say that positions are held which never were read.
                layer.settle()
            else:
                layer.rewind(counts)
        self._settled = list(lengths)

    def join(self, others: Sequence[RowCache]) -> None:
        """Append other caches' rows (of the same model) to this batch."""
        caches = [self, *others]
        counts = [len(cache.lengths.host) for cache in caches]
        for i, mine in enumerate(self.attention):
            mine.keys = stacked([cache.attention[i].keys for cache in caches], counts)
            mine.values = stacked([cache.attention[i].values for cache in caches], counts)
        for i, state in enumerate(self.states):
            state.join([cache.states[i] for cache in others], counts)
        self._hold([length for cache in caches for length in cache.lengths.host])

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and give back the room only the others needed."""
        lengths = [self.lengths.host[row] for row in rows]
        top = -(-max(lengths, default=0) // STEP) * STEP
        picked = mx.array(list(rows), dtype=mx.int32)
        for layer in self.attention:
            layer.keys = layer.keys[picked][:, :, :top] if top and layer.keys is not None else None
            layer.values = layer.values[picked][:, :, :top] if top and layer.values is not None else None
        for state in self.states:
            state.keep(rows, len(self.lengths.host))
        self._hold(lengths)

    def _hold(self, lengths: Sequence[int]) -> None:
        """Other rows than before, all of them settled."""
        self.lengths.set(lengths)
        self._settled = self.lengths.host
        for layer in self.attention:
            layer.ahead = 0

    def arrays(self) -> list[mx.array]:
        """Everything held, for evaluation."""
        held = [a for layer in self.attention for a in (layer.keys, layer.values)]
        held += [a for layer in self.states for a in layer.cache]
        return [a for a in held if a is not None]


def stacked(held: Sequence[mx.array | None], rows: Sequence[int]) -> mx.array | None:
    """Caches' arrays one below the other, padded to the longest; rows without any position yet are zeros."""
    like = next((one for one in held if one is not None), None)
    if like is None:
        return None
    top = max(one.shape[2] for one in held if one is not None)
    parts: list[mx.array] = []
    for one, count in zip(held, rows, strict=True):
        if count:
            room = mx.zeros((count, *like.shape[1:]), dtype=like.dtype) if one is None else one
            parts.append(grown(room, room, top))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
