"""What a recurrent layer carries from token to token, kept so that rows can be taken back to before a rejected token.

Such a state cannot be cut by position. But the state before a call is an array that nobody overwrites, and what a layer makes
of it depends only on what the layer was given. So the modules that take a state note their inputs, and a row that keeps some of
its tokens gets its state by giving these modules, not the whole model, the kept ones again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from service.core import PairError


@dataclass(frozen=True, slots=True)
class Call:
    """A module and what it was called with."""

    module: nn.Module
    positional: tuple[object, ...]
    named: Mapping[str, object]

    @property
    def fed(self) -> mx.array:
        """The tokens or hidden states: (B, N) or (B, N, hidden), which every family puts first."""
        return next(a for a in (*self.positional, *self.named.values()) if isinstance(a, mx.array))


class StateLayer(ArraysCache):
    """One recurrent layer's state: an array (B, ...) in each slot, None before the first token.

    `cache` is the state after all that was fed, `settled` the one before the `calls`. Sizes are the same for every row: rows of
    a ragged call take in what stands behind their own tokens too, and are rewound.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.settle()

    def settle(self) -> None:
        """Forget how to get back before here."""
        self.settled: list[mx.array | None] = list(self.cache)
        self.calls: list[Call] = []

    @property
    def fed(self) -> int:
        """Tokens of each row since it was settled. Raises PairError where no module of the layer noted them."""
        if not self.calls:
            if any(now is not then for now, then in zip(self.cache, self.settled, strict=True)):
                raise PairError("no layer of its own takes its recurrent state, which cannot be rolled back")
            return 0
        first = self.calls[0].module
        return sum(call.fed.shape[1] for call in self.calls if call.module is first)

    def rewind(self, counts: Sequence[int]) -> None:
        """Give each row the state after counts[b] of the tokens since it was settled, and settle there. Rows that keep as many
        go together."""
        total = self.fed
        groups = {count: [row for row, n in enumerate(counts) if n == count] for count in dict.fromkeys(counts)}
        parts = [self._after(count, total, rows, len(counts)) for count, rows in groups.items()]
        if len(parts) == 1:
            self.cache = parts[0]
        else:
            places = [row for rows in groups.values() for row in rows]
            order = mx.array(sorted(range(len(places)), key=places.__getitem__), dtype=mx.int32)
            sizes = [len(rows) for rows in groups.values()]
            slots = [piled([part[slot] for part in parts], sizes) for slot in range(len(self.cache))]
            self.cache = [None if slot is None else slot[order] for slot in slots]
        self.settle()

    def _after(self, count: int, total: int, rows: list[int], batch: int) -> list[mx.array | None]:
        if count == total:
            return picked(self.cache, rows, batch)
        again = ArraysCache(len(self.cache))
        again.cache = picked(self.settled, rows, batch)
        if count:
            modules = {id(call.module): call.module for call in self.calls}
            for module in modules.values():
                _call_again([call for call in self.calls if call.module is module], again, rows, batch, count)
        return again.cache

    def join(self, others: Sequence[StateLayer], counts: Sequence[int]) -> None:
        """Put other layers' rows below this one's; counts: rows of each. Rows that have read nothing begin with zeros."""
        self.cache = [piled(slot, counts) for slot in zip(self.cache, *(other.cache for other in others), strict=True)]
        self.settle()

    def keep(self, rows: Sequence[int], batch: int) -> None:
        """Keep these of `batch` rows, in this order."""
        self.cache = picked(self.cache, rows, batch)
        self.settle()


class Recording:
    """Put before the class of a module that takes a cache: notes each call that carries a StateLayer with the innermost such
    module, the one that changes it."""

    def __call__(self, *positional: object, **named: object) -> object:
        """Call the module, and append the call to the StateLayer among its arguments unless a module inside it did so."""
        held = next((a for a in (*positional, *named.values()) if isinstance(a, StateLayer)), None)
        before = 0 if held is None else len(held.calls)
        out = cast("Any", super()).__call__(*positional, **named)
        if held is not None and len(held.calls) == before:
            held.calls.append(Call(cast("nn.Module", self), positional, named))
        return out


def record(model: nn.Module) -> None:
    """Let a model's modules note what they do to states, in place; names, arrays and results stay what they are."""
    if isinstance(model, Recording):
        return
    for module in model.modules():
        kind = type(module)
        if not issubclass(kind, Recording) and "cache" in signature(kind.__call__).parameters:
            module.__class__ = _recording(kind)


@cache
def _recording(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (Recording, kind), {"__module__": kind.__module__})


def _call_again(calls: Sequence[Call], state: ArraysCache, rows: list[int], batch: int, count: int) -> None:
    """Feed a module the first `count` tokens of what it was fed in these calls, for some rows. Only its state is of interest,
    and only that is ever computed."""
    sizes = [call.fed.shape[1] for call in calls]

    def shorter(values: Sequence[object]) -> object:
        first = values[0]
        if isinstance(first, StateLayer):
            return state
        if not isinstance(first, mx.array) or first.ndim == 0 or first.shape[0] != batch:
            return first
        arrays = cast("list[mx.array]", values)
        if first.ndim > 1 and all(a.shape[1] == size for a, size in zip(arrays, sizes, strict=True)):
            first = (first if len(arrays) == 1 else mx.concatenate(arrays, axis=1))[:, :count]
        return first if len(rows) == batch else first[mx.array(rows, dtype=mx.int32)]

    positional = [shorter(values) for values in zip(*(call.positional for call in calls), strict=True)]
    named = {name: shorter([call.named[name] for call in calls]) for name in calls[0].named}
    cast("Any", calls[0].module)(*positional, **named)


def picked(slots: Sequence[mx.array | None], rows: Sequence[int], batch: int) -> list[mx.array | None]:
    """Some rows of each array, in this order."""
    if list(rows) == list(range(batch)):
        return list(slots)
    index = mx.array(list(rows), dtype=mx.int32)
    return [None if slot is None else slot[index] for slot in slots]


def piled(parts: Sequence[mx.array | None], sizes: Sequence[int]) -> mx.array | None:
    """Arrays of so many rows one above the other, zeros for those that are not there; None when none is."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    filled = [
        mx.zeros((size, *like.shape[1:]), dtype=like.dtype) if part is None else part
        for part, size in zip(parts, sizes, strict=True)
        if size
    ]
    return filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)
