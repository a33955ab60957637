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
    """Fuse every LoRALinear into a linear layer, in place; yields after each.

    A quantised matrix becomes an unquantised one in its scales' dtype. A large one stays as it is, with its LoRA layer unfused
    in that dtype (`Strategy.most_folded`; docs/decisions.md, "An adapter is folded in").
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            if _stays_unfused(module.linear):
                kind = module.linear["scales"].dtype
                module.lora_a, module.lora_b = module.lora_a.astype(kind), module.lora_b.astype(kind)
                device.wait(module.lora_a, module.lora_b)
            else:
                folded = module.fuse(dequantize=True)
                device.wait(folded.parameters())
                _replace(model, name, folded)
            yield None


def folded_bytes(model: nn.Module) -> int:
    """Bytes of the matrices that are folded of an adapter for all linear layers in the model's blocks, from shapes alone."""
    modules = [module for block in cast("list[nn.Module]", model.layers) for _, module in block.named_modules()]
    linear = [module for module in modules if isinstance(module, nn.Linear | nn.QuantizedLinear)]
    return sum(_unquantised_bytes(module) for module in linear if not _stays_unfused(module))


def _stays_unfused(linear: nn.Module) -> bool:
    most = current().most_folded
    # The scales of other modes have 8 bits.
    if most is None or not isinstance(linear, nn.QuantizedLinear) or linear.mode != "affine":
        return False
    return _unquantised_bytes(linear) > most


def _unquantised_bytes(linear: nn.Module) -> int:
    if not isinstance(linear, nn.QuantizedLinear):
        return linear["weight"].nbytes
    # In their scales' dtype; those of some modes have 8 bits.
    return linear["weight"].size * 32 // linear.bits * max(linear["scales"].itemsize, 2)


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
