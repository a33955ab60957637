"""Captures the hidden states of chosen layers during a normal forward pass (EAGLE-3's feature layers)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from service.core import PairError


class Captured:
    """The hidden states (B, N, width) of one layer's last call; None before the first call and after
    `HiddenStateCapture.take`."""

    states: mx.array | None = None


class CapturingLayer:
    """Mixin placed before a layer's class that captures the layer's output."""

    def __call__(self, *positional: object, **named: object) -> object:
        """Call the layer, capture its output and return it unchanged."""
        out = cast("Any", super()).__call__(*positional, **named)
        cast("Any", self)._captured.states = out
        return out


class HiddenStateCapture:
    """Captures the outputs of `layers` (indices) of a model, in place. Parameter names, arrays and results do not change.

    A deep copy of an object that refers to it refers to the same capture, because the model is not copied either. Raises
    PairError if the model has no such layers in one list, or if their output is not (B, N, width).
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], width: int) -> None:
        self.model = model
        blocks = cast("list[nn.Module]", getattr(model, "layers", []))
        if not layers or max(layers) >= len(blocks) or min(layers) < 0:
            raise PairError(f"the draft reads layers {list(layers)} of its target, which has {len(blocks)}")
        self.captured = [_capture(blocks[index]) for index in layers]
        model(mx.zeros((1, 2), dtype=mx.int32), cache=make_prompt_cache(model))
        shapes = {getattr(layer.states, "shape", None) for layer in self.captured}
        if shapes != {(1, 2, width)}:
            raise PairError(f"the draft reads hidden states of width {width}, the target's layers produce {shapes}")
        self.take()

    def take(self) -> list[mx.array]:
        """Each layer's output (B, N, width) of the model's last call, in the order of `layers`. Releases the arrays."""
        taken = [cast("mx.array", layer.states) for layer in self.captured]
        for layer in self.captured:
            layer.states = None
        return taken

    def __deepcopy__(self, memo: dict[int, object]) -> HiddenStateCapture:
        return self


def _capture(block: nn.Module) -> Captured:
    if not isinstance(block, CapturingLayer):
        block.__class__ = _capturing_class(type(block))
        cast("Any", block)._captured = Captured()
    return cast("Captured", cast("Any", block)._captured)


@cache
def _capturing_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (CapturingLayer, kind), {"__module__": kind.__module__})
