"""Start-up check: does this model, in ragged rows of the engine's cache, compute what it computes in mlx-lm's own cache?

Rounding is measured, not assumed: mlx-lm's own cache is fed the same tokens in calls of other shapes, and what these differ by
is what the engine may differ by (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from service.core import PairError
from service.engine import device
from service.engine.kv.buffers import capacity
from service.engine.kv.cache import RowCache, RowLayer

LENGTHS = (9, 5, 4)
"""Tokens of the rows. All but the last TAIL are prefilled before the rows meet: nothing of the last row."""
TAIL = 4
TEXTS = 3
"""A model is refused when it differs on each of so many texts: structure always does, while a single outlier of rounding (a
token whose experts nearly tie) does not come back with other tokens."""
FACTOR = 3.0
"""Times the measured rounding that the engine may differ by."""
PADDED = 4.0
"""Units of rounding that calls over the whole capacity may add: sums over more zeros are rounded otherwise, not wrong."""

Vectors = dict[str, mx.array]
"""What a row's cache and logits hold: name -> (positions, features), or (1, features) for a recurrent state."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest of a comparison. gap, rounding: relative root mean squares of the engine's difference from mlx-lm and of
    mlx-lm's from itself."""

    row: int
    where: str
    gap: float
    rounding: float

    @property
    def ratio(self) -> float:
        """How many times the measured rounding the engine differs by; more than FACTOR is refused."""
        return self.gap / self.rounding


def check_rows(model: nn.Module, role: str) -> None:
    """Decode rows of unlike lengths together, roll unlike numbers of tokens back, and compare keys, values, recurrent states
    and logits with those of mlx-lm's cache.

    Raises PairError naming the family: better refused at start than subtly wrong (or broken) at the first request.
    """
    family = getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1])
    worst = None
    for text in range(TEXTS):
        worst = largest_difference(model, f"{role} ({family})", text)
        if worst is None or worst.gap <= FACTOR * worst.rounding:
            return
    assert worst is not None
    raise PairError(
        f"the {role} ({family}) gives other results in a batch than alone (row {worst.row}, {worst.where}: differs by "
        f"{worst.gap:.2g} of its size, where calls of other shapes differ by {worst.rounding:.2g})"
    )


def largest_difference(model: nn.Module, name: str, text: int = 0) -> Difference | None:
    """Compare the engine's rows with mlx-lm's on one text, and return the difference that is largest in relation to the
    measured rounding. Raises PairError where the model does not run at all."""
    try:
        rows = _rows(model, text)
        plain = [_plain(model, row) for row in rows]
        device.wait(plain)
    except Exception as error:
        raise PairError(f"the {name} does not run on this device: {error}") from error
    try:
        together = _together(model, rows)
        device.wait(together)
    except PairError as error:
        raise PairError(f"the {name} cannot be served: {error}") from error
    except Exception as error:
        raise PairError(
            f"the {name} does not run on rows of unlike length (most such families compute positions from one "
            f"length for the whole batch): {error}"
        ) from error
    others = [[_stepwise(model, row), _batched(model, row)] for row in rows]
    found = [[one, *more] for one, more in zip(plain, others, strict=True)]
    whole = [_batched(model, row, whole=True) for row in rows] if RowCache(model, 0).whole else None
    return _largest(together, found, whole)


def _rows(model: nn.Module, text: int) -> list[list[int]]:
    """Token ids spread over the vocabulary: neighbouring ids may be reserved ones that all look alike to the model."""
    width = cast("mx.array", model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))).shape[-1]
    random = np.random.default_rng(text)
    return [random.choice(width, size=n, replace=False).tolist() for n in LENGTHS]


def _plain(model: nn.Module, row: list[int]) -> Vectors:
    """As mlx-lm generates: the prompt, then the last token."""
    return _alone(model, [row], [len(row) - 1, 1])


def _stepwise(model: nn.Module, row: list[int]) -> Vectors:
    return _alone(model, [row], [n for n in (len(row) - TAIL, 1, 1, 1, 1) if n])


def _batched(model: nn.Module, row: list[int], *, whole: bool = False) -> Vectors:
    """Three copies of the row, several tokens at a time under a mask that is an array, as the engine's rows are. whole: over
    the whole capacity."""
    return _alone(model, [row] * 3, [n for n in (len(row) - TAIL, 3, 1) if n], masked=True, whole=whole)


def _alone(
    model: nn.Module, rows: list[list[int]], calls: Sequence[int], *, masked: bool = False, whole: bool = False
) -> Vectors:
    """Feed identical rows to mlx-lm's cache in calls of so many tokens. masked: write its masks out as arrays. whole: with keys
    and values at their whole capacity, where all layers hold keys and values of every position."""
    cache: list[Any] = make_prompt_cache(model)
    if masked:
        for layer in _flat(cache):
            if not isinstance(layer, ArraysCache):
                if whole:
                    layer.__class__ = _WholeCache
                layer.make_mask = partial(_as_array, layer.make_mask)
    logits, done = list[mx.array](), 0
    for count in calls:
        logits.append(model(mx.array([row[done : done + count] for row in rows]), cache=cache)[-1])
        done += count
    return _vectors(cache, len(rows) - 1, done) | {"logits": mx.concatenate(logits)[-TAIL:]}


class _WholeCache(KVCache):
    """mlx-lm's cache, seen at the capacity that the engine would have allocated."""

    def make_mask(self, N: int, return_array: bool = True, window_size: int | None = None) -> mx.array:
        """Booleans (N, capacity)."""
        query, key = self.offset + mx.arange(N)[:, None], mx.arange(capacity(self.offset + N))
        mask = key <= query
        return mask if window_size is None else mask & (key > query - window_size)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """As far as the mask reaches."""
        width = capacity(self.offset)
        return cast("Any", self).keys[..., :width, :], cast("Any", self).values[..., :width, :]


def _as_array(make_mask: Callable[..., Any], N: int, *positional: object, **named: object) -> Any:
    return make_mask(N, *positional, **(named | {"return_array": True}))


def _together(model: nn.Module, rows: list[list[int]]) -> list[Vectors]:
    """The same rows in one batch of the engine's cache."""
    batch = RowCache(model, 0)
    for row in rows:
        own = RowCache(model, 1)
        if read := row[:-TAIL]:
            model(mx.array([read]), cache=own.layers)
            own.commit(len(read))
        batch.join([own])
    # Three tokens each, of which rows keep one, two and all, the others being wrong and rolled back; then what is missing.
    kept = [1 + i % 3 for i in range(len(rows))]
    fed = [[*row[-TAIL:][:n], 1, 1][:3] for row, n in zip(rows, kept, strict=True)]
    first = model(mx.array(fed), cache=batch.layers)
    batch.settle([len(row) - TAIL + n for row, n in zip(rows, kept, strict=True)])
    fed = [[*row[len(row) - TAIL + n :], 1, 1][:3] for row, n in zip(rows, kept, strict=True)]
    second = model(mx.array(fed), cache=batch.layers)
    batch.settle([len(row) for row in rows])
    return [
        _vectors(batch.layers, i, len(row)) | {"logits": mx.concatenate([first[i, :n], second[i, : TAIL - n]])}
        for i, (row, n) in enumerate(zip(rows, kept, strict=True))
    ]


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    """A cache's layers, of which some families put several into one."""
    for layer in layers:
        parts = layer.caches if isinstance(layer, CacheList) else layer if isinstance(layer, tuple) else [layer]
        yield from parts


def _vectors(layers: Sequence[Any], row: int, length: int) -> Vectors:
    """What one row of a cache holds."""
    found: Vectors = {}
    for i, layer in enumerate(_flat(layers)):
        if isinstance(layer, ArraysCache):
            held = {f"state {slot}": array for slot, array in enumerate(layer.cache) if array is not None}
            found |= {f"{name} of layer {i}": array[row].reshape(1, -1) for name, array in held.items()}
        else:
            window = layer.window if isinstance(layer, RowLayer) else getattr(layer, "max_size", None)
            if window is not None and length > window:
                continue
            for name, array in (("keys", layer.keys), ("values", layer.values)):
                if array is not None:
                    found[f"{name} of layer {i}"] = array[row, :, :length].swapaxes(0, 1).reshape(length, -1)
    return found


def _largest(
    ours: Sequence[Vectors], theirs: Sequence[Sequence[Vectors]], whole: Sequence[Vectors] | None
) -> Difference | None:
    """theirs: several for each row. whole: mlx-lm's over the whole capacity, where the engine's calls go over that."""
    # States may be kept in higher precision than what they are made from.
    kinds = {vector.dtype for mine in ours for vector in mine.values() if mx.issubdtype(vector.dtype, mx.floating)}
    unit = max(mx.finfo(kind).eps for kind in kinds)
    found: dict[tuple[int, str], tuple[mx.array, mx.array]] = {}
    for row, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        for name, vector in mine.items():
            if vector.size:
                padded = None if whole is None else whole[row][name]
                found[row, name] = _gaps(vector, [other[name] for other in others], padded, unit)
    device.wait(list(found.values()))
    rounding: dict[str, float] = {}
    gaps: dict[tuple[int, str], float] = {}
    for (row, name), (gap, noise) in found.items():
        rounding[name] = max(rounding.get(name, 0.0), float(np.array(noise).max()))
        gaps[row, name] = float(np.array(gap).max())
    made = [Difference(row, name, gap, rounding[name]) for (row, name), gap in gaps.items()]
    return max(made, key=lambda each: each.ratio, default=None)


def _gaps(
    mine: mx.array, others: Sequence[mx.array], padded: mx.array | None, unit: float
) -> tuple[mx.array, mx.array]:
    """Relative root mean squares (positions,): of what is mine to the nearest of the others; and of these to one another and to
    `padded`, at least `unit`. Infinite where mine has infinities (tokens that a family rules out) or NaN where none of the
    others has."""
    stack = mx.stack(list(others)).astype(mx.float32)
    mine = mine.astype(mx.float32)
    elsewhere = (mx.isfinite(stack) != mx.isfinite(mine)).any(axis=-1).all(axis=0)
    there = mx.isfinite(stack).all(axis=0) & mx.isfinite(mine)
    stack, mine = mx.where(there, stack, 0.0), mx.where(there, mine, 0.0)
    size = mx.maximum(mx.sqrt((stack[0] ** 2).mean(axis=-1)), 1e-20)
    gap = mx.sqrt(((stack - mine) ** 2).mean(axis=-1)).min(axis=0) / size
    noise = mx.sqrt(((stack[:, None] - stack[None]) ** 2).mean(axis=-1)).max(axis=(0, 1)) / size
    if padded is not None:
        added = mx.where(there, padded.astype(mx.float32), 0.0)
        noise = mx.maximum(noise, mx.minimum(mx.sqrt(((added - stack[0]) ** 2).mean(axis=-1)) / size, PADDED * unit))
    return mx.where(elsewhere, mx.inf, gap), mx.maximum(noise, unit)
