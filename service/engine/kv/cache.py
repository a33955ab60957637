"""A KV cache whose rows have lengths of their own, behind mlx-lm's cache protocol.

Rows are left-aligned: row b has positions 0 .. lengths[b]-1; slots after them hold garbage, which the mask hides and the next
write overwrites. Truncating a row is therefore setting its length. Sliding-window layers keep all positions and narrow the
mask (a rotating buffer cannot be truncated). Recurrent layers hold states (`recurrent`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from service.core import PairError
from service.engine import device
from service.engine.attention import RowCall, route
from service.engine.kv.buffers import copy_moved, grow, join_rows, keep_rows, scatter, write, write_in_place
from service.engine.kv.lengths import Lengths
from service.engine.kv.recurrent import StateLayer, record_calls
from service.engine.strategy import current


class RowLayer:
    """One layer's keys and values, (R, heads, capacity, dims) each, R at least the batch's rows (see `buffers`); heads and dims
    may differ between the two."""

    def __init__(self, lengths: Lengths, window: int | None, *, whole: bool = False, routed: bool = False) -> None:
        self.lengths = lengths
        self.whole = whole
        """Calls that need a mask see keys and values at their whole capacity (see `strategy`)."""
        self.routed = routed
        """Calls over few tokens a row go through `attention`, which needs no mask."""
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.ahead = 0
        """Positions written since `lengths` was last set, the same for every row."""
        self.in_place = False
        """Keys and values are written by `write_in_place`. Only for calls in which nothing but `attention` reads them."""
        self.unread: bool = False
        """They were written in place, and `attention` has not read them."""
        self.written: mx.array | None = None
        """What `write_in_place` returned last."""
        self._count = 0
        """Tokens of the last write."""
        self._views: tuple[mx.array | None, mx.array | None] = (None, None)
        """What `update_and_fetch` returned last."""

    @property
    def offset(self) -> mx.array | int:
        """Position of the next token of each row: an int where all rows agree (rope's fast path), else (B,)."""
        if self.lengths.equal:
            return self.lengths.host[0] + self.ahead
        return self.lengths.starts(self.ahead)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, heads, N, dims) to every row. Returns `keys_and_values`."""
        self._views = (None, None)
        if self.in_place:
            assert self.keys is not None and self.values is not None
            self.written = write_in_place(keys, values, self.keys, self.values, self.lengths.starts(self.ahead))
            self._count, self.unread = keys.shape[2], True
        else:
            self.keys = self._append(self.keys, keys)
            self.values = self._append(self.values, values)
        self.ahead += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views (B, heads, width, dims) of the rows, width the longest length or the mask's width. Layers that share
        this one's keys and values ask for them again (gemma3n)."""
        assert self.keys is not None and self.values is not None
        rows = len(self.lengths.host)
        top = self.keys.shape[2] if self._sees_whole(self._count) else self.lengths.longest + self.ahead
        views = self.keys[:rows, :, :top], self.values[:rows, :, :top]
        if self.routed:
            self._views = views
        return views

    def _sees_whole(self, count: int) -> bool:
        """Whether a call over so many tokens a row sees the whole capacity: where it needs a mask in any case."""
        return self.whole and (count > 1 or not self.lengths.equal)

    def reserve(self, count: int) -> None:
        """Allocate positions for the next `count` tokens of every row."""
        assert self.keys is not None and self.values is not None
        top = self.lengths.longest + self.ahead + count
        self.keys, self.values = grow(self.keys, self.keys, top), grow(self.values, self.values, top)

    def row_call(self, keys: mx.array, values: mx.array, mask: object) -> RowCall | None:
        """What a call over `keys` and `values` under `mask` is for `attention`, where these are the layer's own; else None."""
        known = self.lengths.masks.get(id(mask)) if self.routed else None
        own = keys is self._views[0] and values is self._views[1]
        # What is still referred to would be copied by the next write.
        self._views = (None, None)
        if known is None or not own:
            return None
        assert self.keys is not None and self.values is not None
        return RowCall(self.keys, self.values, known[1], known[2], self.written)

    def append_features(self, states: mx.array) -> None:
        """Append features (B, N, width) to every row, as keys without values."""
        self.keys = self._append(self.keys, states[:, None])
        self.ahead += states.shape[1]

    def _append(self, array: mx.array | None, new: mx.array) -> mx.array:
        count = self._count = new.shape[2]
        array = grow(array, new, self.lengths.longest + self.ahead + count)
        if self.lengths.equal:
            return write(array, new, self.lengths.host[0] + self.ahead)
        return scatter(array, new, *self.lengths.places(self.ahead, new.shape[1], count))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str | None:
        """mlx-lm asks before the update. (1 or B, 1, N, longest + N) booleans; None or "causal" where that says it all.

        Raises PairError where a model asks for a wider window than its cache holds (plamo3): mlx-lm then reads prompts and
        generates through unlike windows, which no single mask can follow.
        """
        if window_size and self.window and window_size > self.window:
            raise PairError(f"it reads prompts through a window of {window_size} and generates through {self.window}")
        window = window_size or self.window
        start = self.offset
        width = self.lengths.longest + self.ahead + N
        if isinstance(start, int):
            if window is None or width <= window:
                if N == 1:
                    return None
                if not return_array and not self.whole and not self.routed:
                    return "causal"
            start = mx.array([start])
        if self._sees_whole(N):
            width = max(current().capacity(width), 0 if self.keys is None else self.keys.shape[2])
        key = mx.arange(width)
        query = (start[:, None] + mx.arange(N))[:, None, :, None]
        mask = key <= query
        if window is not None:
            mask = mask & (key > query - window)
        if self.routed:
            self.lengths.masks[id(mask)] = (mask, self.lengths.starts(self.ahead), window or 0)
        return mask


class RowCache:
    """The KV cache of one model over a batch. Pass `layers` to the model, then set what stays of the tokens that were fed:
    `truncate`, or `rewind` where more may have to go.

    Raises PairError when a layer of the model cannot be truncated.
    """

    def __init__(self, model: nn.Module, rows: int, *, features: bool = False) -> None:
        self.lengths = Lengths([0] * rows)
        self.attention: list[RowLayer] = []
        self.states: list[StateLayer] = []
        kinds = make_prompt_cache(model)
        # Code of windows and sparse attention counts the positions that it is given.
        self.whole = current().whole_capacity and all(type(layer) is KVCache for layer in kinds)
        self.routed = current().row_attention and route(model)
        """Calls over few tokens a row go through `attention`."""
        self.layers = [self._layer(layer) for layer in kinds]
        self.features: RowLayer | None = None
        """The target's features, for an EAGLE head: no layer of the model, but joined, compacted and truncated as one."""
        if features:
            self.features = RowLayer(self.lengths, None)
            self.attention.append(self.features)
        self.unlaunched: list[mx.array] = []
        """What writes in place returned that was not launched yet: nothing else would run them."""
        self._committed = self.lengths.host
        if self.states:
            record_calls(model)

    def _layer(self, layer: object) -> RowLayer | StateLayer | tuple[object, ...]:
        if isinstance(layer, CacheList):
            return tuple(self._layer(part) for part in cast("tuple[object, ...]", layer.caches))
        if type(layer) is ArraysCache:
            self.states.append(StateLayer(len(cast("list[object]", layer.cache))))
            return self.states[-1]
        if type(layer) is KVCache:
            self.attention.append(RowLayer(self.lengths, None, whole=self.whole, routed=self.routed))
        elif type(layer) is RotatingKVCache and layer.keep == 0:
            self.attention.append(RowLayer(self.lengths, layer.max_size, routed=self.routed))
        else:
            raise PairError(f"its {type(layer).__name__} cannot be rolled back to before a rejected token")
        return self.attention[-1]

    @property
    def ahead(self) -> int:
        """Positions written since the lengths were last set, the same for every row."""
        return self.attention[0].ahead

    def reserve(self, count: int) -> bool:
        """Allocate positions for the next `count` tokens of every row. False where a layer has no keys yet, so that their shape
        is not known."""
        layers = self._model_layers()
        if any(layer.keys is None or layer.values is None for layer in layers):
            return False
        for layer in layers:
            layer.reserve(count)
        return True

    def buffers(self) -> list[mx.array]:
        """Keys and values of the model's layers, for a call that returns them with more tokens in them (`set_buffers`)."""
        return [a for layer in self._model_layers() for a in (layer.keys, layer.values) if a is not None]

    def set_buffers(self, buffers: Sequence[mx.array | None]) -> None:
        """Replace keys and values."""
        for i, layer in enumerate(self._model_layers()):
            layer.keys, layer.values = buffers[2 * i : 2 * i + 2]

    def appended(self, count: int, writes: Sequence[mx.array]) -> None:
        """A call has appended `count` tokens of every row. writes: its `writes`."""
        self.unlaunched.extend(writes)
        for layer in self._model_layers():
            layer.ahead += count

    @property
    def writes(self) -> list[mx.array]:
        """What the newest writes in place returned, one of each layer."""
        return [layer.written for layer in self._model_layers() if layer.written is not None]

    def launch_writes(self) -> None:
        """Launch writes in place, before anything but `attention` reads keys and values. Nothing where all were."""
        if self.unlaunched:
            device.launch(self.unlaunched)
            self.unlaunched.clear()

    def trace(self, starts: mx.array, buffers: Sequence[mx.array | None], *, in_place: bool) -> None:
        """Hold what a traced call is to see: each row's end, and keys and values. in_place: see RowLayer."""
        # The host's numbers would become part of the trace.
        self.follow(starts, [0] * starts.shape[0])
        for layer in self._model_layers():
            layer.whole = True
            layer.in_place = in_place
        self.set_buffers(buffers)

    @property
    def unread(self) -> bool:
        """Whether a layer was written in place for a call that does not read it by `attention`."""
        return any(layer.unread for layer in self._model_layers())

    def _model_layers(self) -> list[RowLayer]:
        return [layer for layer in self.attention if layer is not self.features]

    def append_features(self, features: mx.array) -> None:
        """Store the features (B, N, width) of the tokens just fed."""
        assert self.features is not None
        self.features.append_features(features)

    def features_before(self, lengths: Lengths, count: int) -> mx.array | None:
        """Features (B, count, width) of positions n - 1 .. n + count - 2 of each row, n its length by `lengths`; zeros before
        position 0, garbage behind the row's end. None where none are stored yet."""
        features = self.features.keys if self.features is not None else None
        if features is None:
            return None
        features = features[: len(lengths.host)]
        first, room = lengths.longest - 1, features.shape[2]
        if lengths.equal and first >= 0 and first + count <= room:
            return features[:, 0, first : first + count]
        at = lengths.starts(0)[:, None] - 1 + mx.arange(count)
        picked = mx.take_along_axis(features[:, 0], mx.clip(at, 0, room - 1)[..., None], axis=1)
        return mx.where((at >= 0)[..., None], picked, 0.0)

    def commit(self, count: int) -> None:
        """Keep `count` fed tokens of every row."""
        self.truncate([length + count for length in self.lengths.host])

    def follow(self, starts: mx.array, most: Sequence[int]) -> None:
        """Set every row's length to what only the device knows: see Lengths. Not for models with recurrent states."""
        self.lengths.follow(starts, most)
        for layer in self.attention:
            layer.ahead = 0

    def truncate(self, lengths: Sequence[int]) -> None:
        """Set every row's length. No row can be rewound to before it."""
        self.rewind(lengths)
        self._committed = self.lengths.host
        for layer in self.states:
            layer.commit()

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set every row's length, to that of the last `truncate` or more."""
        if self.states:
            self._rewind_states(lengths)
        self.lengths.set(lengths)
        for layer in self.attention:
            layer.ahead = 0

    def _rewind_states(self, lengths: Sequence[int]) -> None:
        counts = [wanted - settled for wanted, settled in zip(lengths, self._committed, strict=True)]
        fed = self.states[0].uncommitted
        if min(counts, default=0) < 0:
            raise ValueError("a recurrent state was committed and cannot be rewound to before that")
        if all(count == fed for count in counts):
            return
        for layer in self.states:
            if max(counts) > fed:
                # Measurements of costs claim lengths that were never fed.
                layer.commit()
            else:
                layer.truncate(counts)
        self._committed = list(lengths)

    def join(self, others: Sequence[RowCache], counts: Sequence[int], slots: Sequence[int], size: int) -> None:
        """Take the first counts[i] rows of each of these caches of the same model into these slots of `size` rows, which the
        cache then has. Those that were not there and that nothing goes to are empty. With recurrent states, rows can only be
        appended."""
        caches = [self, *others]
        for each in caches:
            each.launch_writes()
        rows = [len(self.lengths.host), *counts]
        for i, mine in enumerate(self.attention):
            mine.keys = join_rows([cache.attention[i].keys for cache in caches], rows, slots, size)
            mine.values = join_rows([cache.attention[i].values for cache in caches], rows, slots, size)
        for i, state in enumerate(self.states):
            state.join([cache.states[i] for cache in others], rows)
        lengths = [*self.lengths.host, *[0] * (size - rows[0])]
        joined = [n for cache, count in zip(others, counts, strict=True) for n in cache.lengths.host[:count]]
        for slot, length in zip(slots, joined, strict=True):
            lengths[slot] = length
        self._set_rows(lengths)

    def append(self, other: RowCache) -> None:
        """Take the rows of another cache of the same model behind these."""
        have, more = len(self.lengths.host), len(other.lengths.host)
        self.join([other], [more], range(have, have + more), have + more)

    def pad(self, rows: Collection[int], length: int) -> None:
        """Make padding of these rows: their contents no longer matter, and they count as of this length."""
        self._set_rows([length if row in rows else n for row, n in enumerate(self.lengths.host)])

    def copy_moved(self, rows: Sequence[int], *, tight: bool = False) -> list[mx.array | None]:
        """What `compact` needs computed."""
        self.launch_writes()
        return copy_moved(self._buffers(), rows, self._top(rows), tight=tight)

    def compact(self, rows: Sequence[int], copies: Sequence[mx.array | None], *, tight: bool = False) -> None:
        """Keep these rows, in this order. copies: of `copy_moved`, computed. tight: without spare slots and positions."""
        lengths = [self.lengths.host[row] for row in rows]
        remaining = keep_rows(self._buffers(), copies, rows, self._top(rows), tight=tight)
        for i, layer in enumerate(self.attention):
            layer.keys, layer.values = remaining[2 * i : 2 * i + 2]
        for state in self.states:
            state.keep(rows, len(self.lengths.host))
        self._set_rows(lengths)

    def _buffers(self) -> list[mx.array | None]:
        """Keys and values of each layer, features among them."""
        return [each for layer in self.attention for each in (layer.keys, layer.values)]

    def _top(self, rows: Sequence[int]) -> int:
        return current().capacity(max((self.lengths.host[row] for row in rows), default=0))

    def remove_nonfinite(self, row: int) -> bool:
        """Remove values of a row that are not finite: behind its end they become zeros; before it, the row is emptied. Returns
        whether it was not emptied. One host sync."""
        self.launch_writes()
        lengths = list(self.lengths.host)
        slots = [a for state in self.states for a in state.cache if a is not None]
        parts = [*(a[row, :, : lengths[row]] for a in self._keys_and_values()), *(a[row] for a in slots)]
        sound = not parts or bool(device.read(mx.stack([mx.isfinite(part).all() for part in parts]).all())[0])
        if not sound:
            lengths[row] = 0
            for array in slots:
                array[row] = 0
            for state in self.states:
                state.commit()
            self._set_rows(lengths)
        self.zero_tail(row)
        return sound

    def zero_tail(self, row: int, start: int | None = None) -> None:
        """Set the slots behind a row's end, or from `start` on, to zero: attention gives those behind it no weight, but zero
        times NaN is NaN."""
        self.launch_writes()
        for array in self._keys_and_values():
            array[row, :, self.lengths.host[row] if start is None else start :] = 0

    def _keys_and_values(self) -> list[mx.array]:
        return [each for each in self._buffers() if each is not None]

    def _set_rows(self, lengths: Sequence[int]) -> None:
        """Set the lengths of a batch of other rows, all of them committed."""
        self.lengths.set(lengths)
        self._committed = self.lengths.host
        for layer in self.attention:
            layer.ahead = 0

    @property
    def slots(self) -> int:
        """Rows for which there are keys and values, spare ones among them."""
        return max((each.shape[0] for each in self._keys_and_values()), default=0)

    def arrays(self) -> list[mx.array]:
        """All arrays, for evaluation."""
        states = (a for state in self.states for a in state.cache if a is not None)
        return [*self._keys_and_values(), *self.unlaunched, *states]
