"""Start-up check of a model: in ragged rows of the engine's cache it must compute the same as in mlx-lm's cache.

The tolerance is measured: mlx-lm processes the same tokens in calls of different shapes, and the engine may differ by a
multiple of the differences among those (docs/decisions/engine.md).
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
from service.engine.kv.cache import RowCache
from service.engine.kv.layer import RowLayer
from service.engine.kv.pages import FEWEST
from service.engine.kv.pool import Pool
from service.engine.replay import Replay
from service.engine.strategy import PAGE

LENGTHS = (9, 5, 4)
"""Tokens of the rows. All but the last TAIL are prefilled before the rows are batched, so the last row has no prefill."""
TAIL = 4
TEXTS = 3
"""A model is refused if it differs on each of this many texts. A structural fault always does. A single rounding outlier, such
as a token whose experts nearly tie, does not recur with other tokens."""
FACTOR = 3.0
"""The engine may differ by this factor times the measured rounding."""
WIDTH = FEWEST * PAGE
"""Positions that the page tables of short rows can hold."""
PADDED = 4.0
"""Extra rounding allowed, in machine epsilons: for calls over WIDTH positions, whose sums are longer by zeros, and for our
custom attention, which adds in another order, in float32."""

Vectors = dict[str, mx.array]
"""The cache contents and logits of a row by name: (positions, features), or (1, features) for a recurrent state."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of a comparison. where: the name of the vector. gap, rounding: relative root mean square
    differences, between engine and mlx-lm and among mlx-lm's calls."""

    row: int
    where: str
    gap: float
    rounding: float

    @property
    def ratio(self) -> float:
        """gap / rounding; more than FACTOR is refused."""
        return self.gap / self.rounding


def check_rows(model: nn.Module, role: str) -> None:
    """Decode rows of different lengths in a batch, truncate them by different numbers of tokens, and compare keys, values,
    recurrent states and logits with those of mlx-lm's cache.

    role: "target" or "draft", for the message. Raises PairError naming the model family if they differ by more than rounding.
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
    """Compare the engine's rows with mlx-lm's on one text (a random seed). Returns the difference with the largest ratio to the
    measured rounding. Raises PairError if the model does not run at all."""
    try:
        rows = _rows(model, text)
        reference = [_prompt_and_token(model, row) for row in rows]
        device.wait(reference)
    except Exception as error:
        raise PairError(f"the {name} does not run on this device: {error}") from error
    try:
        batched = _in_engine(model, rows)
        device.wait(batched)
    except PairError as error:
        raise PairError(f"the {name} cannot be served: {error}") from error
    except Exception as error:
        raise PairError(
            f"the {name} does not run on rows of unlike length (most such families compute positions from one "
            f"length for the whole batch): {error}"
        ) from error
    others = [[_token_by_token(model, row), _several_tokens(model, row)] for row in rows]
    shapes = [[one, *more] for one, more in zip(reference, others, strict=True)]
    cache = RowCache(model, 0)
    # Left out for windows and sparse attention, whose code depends on the number of positions.
    plain = all(type(layer) is KVCache for layer in make_prompt_cache(model))
    whole = [_several_tokens(model, row, whole=True) for row in rows] if cache.pages and plain else None
    # Our custom attention adds in another order.
    least = PADDED * mx.finfo(mx.float32).eps if cache.routed else 0.0
    return _largest(batched, shapes, whole, least)


def _rows(model: nn.Module, text: int) -> list[list[int]]:
    """Random token ids of the whole vocabulary. Neighbouring ids may be reserved tokens with equal embeddings."""
    width = cast("mx.array", model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))).shape[-1]
    random = np.random.default_rng(text)
    return [random.choice(width, size=n, replace=False).tolist() for n in LENGTHS]


def _prompt_and_token(model: nn.Module, row: list[int]) -> Vectors:
    """In two calls, as mlx-lm generates: the prompt, then the last token."""
    return _in_mlx_lm(model, [row], [len(row) - 1, 1])


def _token_by_token(model: nn.Module, row: list[int]) -> Vectors:
    return _in_mlx_lm(model, [row], [n for n in (len(row) - TAIL, 1, 1, 1, 1) if n])


def _several_tokens(model: nn.Module, row: list[int], *, whole: bool = False) -> Vectors:
    """Three copies of the row, several tokens per call, with an array mask as in the engine. whole: over WIDTH positions."""
    return _in_mlx_lm(model, [row] * 3, [n for n in (len(row) - TAIL, 3, 1) if n], masked=True, whole=whole)


def _in_mlx_lm(
    model: nn.Module, rows: list[list[int]], calls: Sequence[int], *, masked: bool = False, whole: bool = False
) -> Vectors:
    """Process identical rows with mlx-lm's cache in calls of calls[i] tokens. masked: with array masks. whole: attention over
    WIDTH positions, for models with full attention only."""
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
    """mlx-lm's cache with attention over as many positions as the engine's paged rows have capacity for."""

    step = WIDTH

    def make_mask(self, N: int, return_array: bool = True, window_size: int | None = None) -> mx.array:
        """Booleans (N, WIDTH)."""
        query, key = self.offset + mx.arange(N)[:, None], mx.arange(WIDTH)
        mask = key <= query
        return mask if window_size is None else mask & (key > query - window_size)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values (B, heads, WIDTH, dims)."""
        return cast("Any", self).keys[..., :WIDTH, :], cast("Any", self).values[..., :WIDTH, :]


def _as_array(make_mask: Callable[..., Any], N: int, *positional: object, **named: object) -> Any:
    return make_mask(N, *positional, **(named | {"return_array": True}))


def _in_engine(model: nn.Module, rows: list[list[int]]) -> list[Vectors]:
    """The rows in one batch of the engine's cache: prefilled, joined, decoded, truncated, decoded to the end."""
    pool = Pool()
    batch = RowCache(model, 0, pool=pool)
    for row in rows:
        alone = RowCache(model, 1, pool=pool)
        if prompt := row[:-TAIL]:
            model(mx.array([prompt]), cache=alone.layers)
            alone.commit(len(prompt))
        batch.append(alone)
    # Three tokens each, of which one, two or all are accepted and the others rolled back. Then the rest of each row.
    accepted = [1 + i % 3 for i in range(len(rows))]
    tokens = [[*row[-TAIL:][:n], 1, 1][:3] for row, n in zip(rows, accepted, strict=True)]
    run = Replay(model, lambda arrays, cache: (model(arrays[0], cache=cache.layers),), traces_first=True)
    (first,) = run([mx.array(tokens)], batch, 3)
    batch.truncate([len(row) - TAIL + n for row, n in zip(rows, accepted, strict=True)])
    tokens = [[*row[len(row) - TAIL + n :], 1, 1][:3] for row, n in zip(rows, accepted, strict=True)]
    (second,) = run([mx.array(tokens)], batch, 3)
    batch.truncate([len(row) for row in rows])
    return [
        _vectors(batch.layers, i, len(row)) | {"logits": mx.concatenate([first[i, :n], second[i, : TAIL - n]])}
        for i, (row, n) in enumerate(zip(rows, accepted, strict=True))
    ]


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    """The layers of a cache. Some model families have several caches in one layer."""
    for layer in layers:
        parts = layer.caches if isinstance(layer, CacheList) else layer if isinstance(layer, tuple) else [layer]
        yield from parts


def _vectors(layers: Sequence[Any], row: int, length: int) -> Vectors:
    """The contents of one row of a cache, up to `length` positions."""
    vectors: Vectors = {}
    for i, layer in enumerate(_flat(layers)):
        if isinstance(layer, ArraysCache):
            states = {f"state {slot}": array for slot, array in enumerate(layer.cache) if array is not None}
            vectors |= {f"{name} of layer {i}": array[row].reshape(1, -1) for name, array in states.items()}
            continue
        window = layer.window if isinstance(layer, RowLayer) else getattr(layer, "max_size", None)
        if window is not None and length > window:
            continue
        if isinstance(layer, RowLayer):
            held = layer.contents(row)
        else:
            held = None if layer.keys is None else (layer.keys[row, :, :length], layer.values[row, :, :length])
        for name, array in zip(("keys", "values"), held or (), strict=False):
            if array is not None:
                vectors[f"{name} of layer {i}"] = array.swapaxes(0, 1).reshape(length, -1)
    return vectors


def _largest(
    ours: Sequence[Vectors], theirs: Sequence[Sequence[Vectors]], whole: Sequence[Vectors] | None, least: float
) -> Difference | None:
    """The difference with the largest ratio. ours: the engine's rows. theirs: mlx-lm's, in several call shapes per row. whole:
    mlx-lm's over WIDTH positions, if the engine's calls are that wide. least: rounding that is always allowed."""
    # States may have a higher precision than the values from which they are computed.
    kinds = {vector.dtype for mine in ours for vector in mine.values() if mx.issubdtype(vector.dtype, mx.floating)}
    unit = max(mx.finfo(kind).eps for kind in kinds)
    compared: dict[tuple[int, str], tuple[mx.array, mx.array]] = {}
    for row, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        for name, vector in mine.items():
            if vector.size:
                padded = None if whole is None else whole[row][name]
                compared[row, name] = _gaps(vector, [other[name] for other in others], padded, unit, max(unit, least))
    device.wait(list(compared.values()))
    rounding: dict[str, float] = {}
    gaps: dict[tuple[int, str], float] = {}
    for (row, name), (gap, noise) in compared.items():
        rounding[name] = max(rounding.get(name, 0.0), float(np.array(noise).max()))
        gaps[row, name] = float(np.array(gap).max())
    differences = [Difference(row, name, gap, rounding[name]) for (row, name), gap in gaps.items()]
    return max(differences, key=lambda each: each.ratio, default=None)


def _gaps(
    mine: mx.array, others: Sequence[mx.array], padded: mx.array | None, unit: float, least: float
) -> tuple[mx.array, mx.array]:
    """Relative root mean square differences (positions,): between `mine` and the nearest of `others`, and among `others` and
    `padded`, at least `least`. The first is infinite where the finite values of `mine` differ from those of each of the others.
    """
    stack = mx.stack(list(others)).astype(mx.float32)
    mine = mine.astype(mx.float32)
    mismatch = (mx.isfinite(stack) != mx.isfinite(mine)).any(axis=-1).all(axis=0)
    finite = mx.isfinite(stack).all(axis=0) & mx.isfinite(mine)
    stack, mine = mx.where(finite, stack, 0.0), mx.where(finite, mine, 0.0)
    size = mx.maximum(mx.sqrt((stack[0] ** 2).mean(axis=-1)), 1e-20)
    gap = mx.sqrt(((stack - mine) ** 2).mean(axis=-1)).min(axis=0) / size
    noise = mx.sqrt(((stack[:, None] - stack[None]) ** 2).mean(axis=-1)).max(axis=(0, 1)) / size
    if padded is not None:
        added = mx.where(finite, padded.astype(mx.float32), 0.0)
        noise = mx.maximum(noise, mx.minimum(mx.sqrt(((added - stack[0]) ** 2).mean(axis=-1)) / size, PADDED * unit))
    return mx.where(mismatch, mx.inf, gap), mx.maximum(noise, least)
