"""Recurrent states of a batch that can be restored to before a rejected token.

A recurrent state cannot be truncated by position. But the state before a verification call is still available as an array, and
a layer's new state depends only on that array and the layer's input. The modules that update a state therefore record their
inputs. To keep only some of a row's tokens, these modules, not the whole model, run again on those tokens.
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
    """A recorded call: the module and its arguments."""

    module: nn.Module
    positional: tuple[object, ...]
    named: Mapping[str, object]

    @property
    def inputs(self) -> mx.array:
        """Token ids (B, N) or hidden states (B, N, hidden): the first array argument in every model family."""
        return next(a for a in (*self.positional, *self.named.values()) if isinstance(a, mx.array))


class StateLayer(ArraysCache):
    """The recurrent state of one layer: an array (B, ...) in each slot, None before the first token.

    `cache`: the state after all tokens so far. `committed`: the state before the recorded `calls`. In a ragged call, the
    padding after a row's tokens enters its state until `truncate` removes it.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.commit()

    def commit(self) -> None:
        """Commit the current state. It can no longer be restored to an earlier one."""
        self.committed: list[mx.array | None] = list(self.cache)
        self.calls: list[Call] = []

    @property
    def uncommitted(self) -> int:
        """Tokens of each row since the last commit. Raises PairError if no module of the layer recorded them."""
        if not self.calls:
            if any(now is not then for now, then in zip(self.cache, self.committed, strict=True)):
                raise PairError(
                    "no module takes its recurrent state as an argument, so the state cannot be rolled back"
                )
            return 0
        first = self.calls[0].module
        return sum(call.inputs.shape[1] for call in self.calls if call.module is first)

    def truncate(self, counts: Sequence[int]) -> None:
        """Restore row b to the state after counts[b] of its uncommitted tokens, and commit. Rows that keep the same number of
        tokens are computed together."""
        total = self.uncommitted
        groups = {count: [row for row, n in enumerate(counts) if n == count] for count in dict.fromkeys(counts)}
        parts = [self._state_after(count, total, rows, len(counts)) for count, rows in groups.items()]
        if len(parts) == 1:
            self.cache = parts[0]
        else:
            places = [row for rows in groups.values() for row in rows]
            order = mx.array(sorted(range(len(places)), key=places.__getitem__), dtype=mx.int32)
            sizes = [len(rows) for rows in groups.values()]
            slots = [stack_rows([part[slot] for part in parts], sizes) for slot in range(len(self.cache))]
            self.cache = [None if slot is None else slot[order] for slot in slots]
        self.commit()

    def _state_after(self, count: int, total: int, rows: list[int], batch: int) -> list[mx.array | None]:
        """The state of some rows after `count` of `total` uncommitted tokens."""
        if count == total:
            return select_rows(self.cache, rows, batch)
        state = ArraysCache(len(self.cache))
        state.cache = select_rows(self.committed, rows, batch)
        if count:
            modules = {id(call.module): call.module for call in self.calls}
            for module in modules.values():
                _replay([call for call in self.calls if call.module is module], state, rows, batch, count)
        return state.cache

    def join(self, others: Sequence[StateLayer], counts: Sequence[int]) -> None:
        """Append the rows of other layers and commit. counts: rows of each, this one first. Rows without tokens start with a
        state of zeros."""
        slots = zip(self.cache, *(other.cache for other in others), strict=True)
        self.cache = [stack_rows(slot, counts) for slot in slots]
        self.commit()

    def clear(self) -> None:
        """Drop the state after its rows have joined another batch."""
        self.cache = [None] * len(self.cache)
        self.commit()

    def keep(self, rows: Sequence[int], batch: int) -> None:
        """Keep these of `batch` rows, in this order, and commit."""
        self.cache = select_rows(self.cache, rows, batch)
        self.commit()


class RecordingModule:
    """Mixin placed before a module's class. It records each call that has a StateLayer among its arguments in that StateLayer.
    In nested modules, only the innermost one, which updates the state, records the call."""

    def __call__(self, *positional: object, **named: object) -> object:
        """Call the module, and record the call unless a nested module did."""
        layer = next((a for a in (*positional, *named.values()) if isinstance(a, StateLayer)), None)
        before = 0 if layer is None else len(layer.calls)
        out = cast("Any", super()).__call__(*positional, **named)
        if layer is not None and len(layer.calls) == before:
            layer.calls.append(Call(cast("nn.Module", self), positional, named))
        return out


def record_calls(model: nn.Module) -> None:
    """Make a model's modules record their calls with a StateLayer, in place. Parameter names, arrays and results do not
    change."""
    if isinstance(model, RecordingModule):
        return
    for module in model.modules():
        kind = type(module)
        if not issubclass(kind, RecordingModule) and "cache" in signature(kind.__call__).parameters:
            module.__class__ = _recording_class(kind)


@cache
def _recording_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (RecordingModule, kind), {"__module__": kind.__module__})


def _replay(calls: Sequence[Call], state: ArraysCache, rows: list[int], batch: int, count: int) -> None:
    """Run a module again on the first `count` tokens of these calls, for some rows of `batch`, to update `state`. Lazy: the
    module's output is never computed."""
    sizes = [call.inputs.shape[1] for call in calls]

    def argument(values: Sequence[object]) -> object:
        """One argument of the new call, cut to these tokens and rows from its values in the recorded calls."""
        first = values[0]
        if isinstance(first, StateLayer):
            return state
        if not isinstance(first, mx.array) or first.ndim == 0 or first.shape[0] != batch:
            return first
        arrays = cast("list[mx.array]", values)
        if first.ndim > 1 and all(a.shape[1] == size for a, size in zip(arrays, sizes, strict=True)):
            first = (first if len(arrays) == 1 else mx.concatenate(arrays, axis=1))[:, :count]
        return first if len(rows) == batch else first[mx.array(rows, dtype=mx.int32)]

    positional = [argument(values) for values in zip(*(call.positional for call in calls), strict=True)]
    named = {name: argument([call.named[name] for call in calls]) for name in calls[0].named}
    cast("Any", calls[0].module)(*positional, **named)


def select_rows(slots: Sequence[mx.array | None], rows: Sequence[int], batch: int) -> list[mx.array | None]:
    """These of `batch` rows of each array (B, ...), in this order."""
    if list(rows) == list(range(batch)):
        return list(slots)
    index = mx.array(list(rows), dtype=mx.int32)
    return [None if slot is None else slot[index] for slot in slots]


def stack_rows(parts: Sequence[mx.array | None], sizes: Sequence[int]) -> mx.array | None:
    """Concatenate arrays of sizes[i] rows, with zeros for those that are None. Returns None if all are None."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    filled = [
        mx.zeros((size, *like.shape[1:]), dtype=like.dtype) if part is None else part
        for part, size in zip(parts, sizes, strict=True)
        if size
    ]
    return filled[0] if len(filled) == 1 else mx.concatenate(filled, axis=0)
