"""Puts a LoRA adapter into a draft's weights, for serving and for the gate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from service.engine import device
from service.engine.strategy import current
from service.models.heads import cut, shallow_copy


def fold(model: nn.Module) -> Iterator[None]:
    """Replace every LoRALinear by its fused linear layer, in place; yields after each layer.

    Quantised weights become unquantised ones in their scales' dtype, or stay as they are with the adapter beside them in that
    dtype, where they are large (`Strategy.most_folded`; docs/decisions.md, "An adapter is folded in").
    """
    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    # Other modes have scales of 8 bits.
    quantised = [each for _, module in adapted if isinstance(each := module.linear, nn.QuantizedLinear)]
    quantised = [each for each in quantised if each.mode == "affine"]
    size = sum(each.weight.size * 32 // each.bits * each.scales.itemsize for each in quantised)
    beside = (most := current().most_folded) is not None and size > most * len(quantised)
    for name, module in adapted:
        if beside and any(module.linear is each for each in quantised):
            kind = cast("nn.QuantizedLinear", module.linear)["scales"].dtype
            module.lora_a, module.lora_b = module.lora_a.astype(kind), module.lora_b.astype(kind)
            device.wait(module.lora_a, module.lora_b)
        else:
            folded = module.fuse(dequantize=True)
            device.wait(folded.parameters())
            _replace(model, name, folded)
        yield None


def as_served(model: nn.Module, ids: Sequence[int] | None) -> nn.Module:
    """A copy of a model as the engine serves it: LoRA layers folded, head cut to the reduced vocabulary `ids` (None: whole).

    The model itself does not change. Raises ModelError for ids that it does not have.
    """
    folded = shallow_copy(model)
    deque(fold(folded), maxlen=0)
    if ids is not None:
        cut(folded, ids)
    return folded


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    *path, leaf = name.split(".")
    node: Any = model
    for part in path:
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    setattr(node, leaf, module)
