"""Puts a LoRA adapter into a draft, for serving and for the gate."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear

from service.engine import device
from service.engine.low_rank import SIBLINGS, add_low_rank, padded_rank
from service.models.arrays import named_arrays
from service.models.heads import cut, shallow_copy


def fold(model: nn.Module) -> Iterator[None]:
    """Replace every LoRALinear by the layer that serves, in place. Yields after each layer or group of sibling layers.

    The adapter is added to unquantised weights. Quantised weights stay unchanged, with the adapter's matrices kept separately
    (`LowRankQuantizedLinear`).
    """
    groups: dict[object, list[tuple[str, LoRALinear]]] = {}
    kind = _float_dtype(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            groups.setdefault(_group(name, module, kind), []).append((name, module))
    for group in groups.values():
        linear = [module.linear for _, module in group]
        quantised = [layer for layer in linear if isinstance(layer, nn.QuantizedLinear)]
        if quantised:
            used = _adapter_dtype(quantised[0], kind)
            down = [module.lora_a.astype(used) for _, module in group]
            up = [(module.scale * module.lora_b).astype(used) for _, module in group]
            device.wait(add_low_rank(quantised, down, up))
        else:
            # The only layer of its group.
            linear = [group[0][1].fuse()]
            device.wait(linear[0].parameters())
        for (name, _), layer in zip(group, linear, strict=True):
            _replace(model, name, layer)
        yield None


def _group(name: str, module: LoRALinear, kind: mx.Dtype) -> object:
    """Equal for quantised layers that get the same input and whose adapters have the same dtype."""
    parent, _, leaf = name.rpartition(".")
    family = next((names for names in SIBLINGS if leaf in names), None)
    if family is None or not isinstance(module.linear, nn.QuantizedLinear):
        return name
    return parent, family, module.lora_a.shape, _adapter_dtype(module.linear, kind)


def _adapter_dtype(linear: nn.QuantizedLinear, kind: mx.Dtype) -> mx.Dtype:
    # Scales of modes other than affine have 8 bits.
    return linear["scales"].dtype if linear.mode == "affine" else kind


def _float_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype in which a model computes: that of its first unquantised weights."""
    kinds = (array.dtype for name, array in named_arrays(model.parameters()) if not name.endswith(("lora_a", "lora_b")))
    return next((kind for kind in kinds if mx.issubdtype(kind, mx.floating)), mx.float32)


def adapter_bytes(model: nn.Module, rank: int) -> int:
    """Bytes that an adapter of all linear layers in the model's blocks adds to the weights in memory, from shapes only."""
    modules = [module for block in cast("list[nn.Module]", model.layers) for _, module in block.named_modules()]
    return sum(_added_bytes(module, rank) for module in modules)


def as_served(model: nn.Module, ids: Sequence[int] | None) -> nn.Module:
    """A copy of a model as the engine serves it: LoRA layers replaced (`fold`), head cut to the reduced vocabulary `ids` (None:
    not cut).

    The model is not changed. Raises ModelError for ids that it does not have.
    """
    folded = shallow_copy(model)
    deque(fold(folded), maxlen=0)
    if ids is not None:
        cut(folded, ids)
    return folded


def _added_bytes(module: nn.Module, rank: int) -> int:
    if isinstance(module, nn.QuantizedLinear):
        outputs, inner = module["weight"].shape[0], module["weight"].shape[1] * 32 // module.bits
        return padded_rank(rank) * (inner + outputs) * max(module["scales"].itemsize, 2)
    # A folded matrix is a copy.
    return module["weight"].nbytes if isinstance(module, nn.Linear) else 0


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    *path, leaf = name.split(".")
    node: Any = model
    for part in path:
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    setattr(node, leaf, module)
