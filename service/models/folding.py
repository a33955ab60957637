"""An adapter folded into the weights it touches: what serves, and what the gate scores."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from service.models.heads import cut, twin


def fold(model: nn.Module) -> Iterator[None]:
    """Replace every LoRA layer, in place and a layer at a time, by a linear one of the same function: no cost per step.

    A quantised weight is held in its scales' precision from then on. Kept apart, the adapter would more than double the
    operations of a step; quantised again, four bits would round most of it away (docs/decisions.md).
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            folded = module.fuse(dequantize=True)
            mx.eval(folded.parameters())
            _replace(model, name, folded)
            yield None


def as_served(model: nn.Module, ids: Sequence[int] | None) -> nn.Module:
    """A model with or without LoRA layers as the engine would run it: folded, and able to propose `ids` alone (None:
    everything). The model itself stays as it is. Raises ModelError for ids it does not have."""
    built = twin(model)
    deque(fold(built), maxlen=0)
    if ids is not None:
        cut(built, ids)
    return built


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    *path, leaf = name.split(".")
    node: Any = model
    for part in path:
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    setattr(node, leaf, module)
