"""What some layers of a model put out, noted while it runs as ever."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from service.core import PairError


class Note:
    """The last output of one layer."""

    value: mx.array | None = None


class Noting:
    """Put before the class of a layer: its output is noted."""

    def __call__(self, *positional: object, **named: object) -> object:
        """Call the layer, note its output and return it unchanged."""
        out = cast("Any", super()).__call__(*positional, **named)
        cast("Any", self)._note.value = out
        return out


class Taps:
    """The outputs of `layers` of a model, in place: names, arrays and results stay what they are. Copies of what holds it share
    it, for the model is not theirs to copy.

    Raises PairError where the model does not keep these layers in one list, or they put out anything but (B, N, width).
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], width: int) -> None:
        self.model = model
        blocks = cast("list[nn.Module]", getattr(model, "layers", []))
        if not layers or max(layers) >= len(blocks) or min(layers) < 0:
            raise PairError(f"the draft reads layers {list(layers)} of its target, which has {len(blocks)}")
        self.notes = [_noted(blocks[index]) for index in layers]
        model(mx.zeros((1, 2), dtype=mx.int32), cache=make_prompt_cache(model))
        shapes = {getattr(note.value, "shape", None) for note in self.notes}
        if shapes != {(1, 2, width)}:
            raise PairError(f"the draft reads hidden states of width {width}, the target's layers put out {shapes}")
        self.take()

    def take(self) -> list[mx.array]:
        """Each layer's output (B, N, width) of the last call, and forget it."""
        taken = [cast("mx.array", note.value) for note in self.notes]
        for note in self.notes:
            note.value = None
        return taken

    def __deepcopy__(self, memo: dict[int, object]) -> Taps:
        return self


def _noted(block: nn.Module) -> Note:
    if not isinstance(block, Noting):
        block.__class__ = _noting(type(block))
        cast("Any", block)._note = Note()
    return cast("Note", cast("Any", block)._note)


@cache
def _noting(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (Noting, kind), {"__module__": kind.__module__})
