"""A draft from some of its target's layers, with the target's embeddings and output head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from service.core import ModelError
from service.learning.export import save_model_folder
from service.models.arrays import named_arrays
from service.models.pair import Loaded

DEFAULT_LAYERS = (0, 1, -2, -1)
_LAYER = re.compile(r"^(?P<head>.*\blayers\.)\d+\.")


def prune(target: Loaded, layers: Sequence[int], folder: Path) -> list[int]:
    """Writes a model folder with `layers` of the target (indices, negative ones from the end), dequantised, and
    everything else unchanged.

    Returns the layers counted from the first. Raises ModelError when an index is out of range or the family's layers
    are not in one list.
    """
    depth = target.config.get("num_hidden_layers")
    if not isinstance(depth, int) or len(cast("list[object]", target.model.layers)) != depth:
        raise ModelError(f"cannot prune {target.folder.name}: its layers are not one list of num_hidden_layers")
    selected = resolve_layers(layers, depth)
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = {}
    heads = set[str]()
    for name, array in named_arrays(target.model.parameters()):
        match = _LAYER.match(name)
        if match is None:
            weights[name] = array
        else:
            heads.add(match["head"])
    blocks = cast("list[nn.Module]", target.model.layers)
    for head in heads:
        for i, index in enumerate(selected):
            # Quantised weights cannot be trained.
            weights |= {f"{head}{i}.{name}": array for name, array in dequantised(blocks[index])}
    save_model_folder(weights, _pruned_config(target.config, selected, depth), target.folder, folder)
    return selected


def resolve_layers(layers: Sequence[int], depth: int) -> list[int]:
    """Indices into `depth` layers, counted from the first; negative ones count from the end. Raises ModelError when
    they are out of range or not ascending."""
    found = [index + depth if index < 0 else index for index in layers]
    if not found or sorted(set(found)) != found or found[0] < 0 or found[-1] >= depth:
        raise ModelError(f"--layers must name layers 0..{depth - 1} in ascending order, each once: got {list(layers)}")
    return found


def dequantised(block: nn.Module) -> list[tuple[str, mx.array]]:
    """A block's weights by name, those of quantised linear layers dequantised."""
    found: list[tuple[str, mx.array]] = []
    for name, module in block.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            linear = cast("Any", module)
            weight = mx.dequantize(
                linear.weight, linear.scales, linear.get("biases"), linear.group_size, linear.bits, mode=linear.mode
            )
            found.append((f"{name}.weight", weight))
            if "bias" in linear:
                found.append((f"{name}.bias", linear.bias))
        elif not module.children():
            found += [(f"{name}.{leaf}", array) for leaf, array in named_arrays(module.parameters())]
    return found


def _pruned_config(config: Mapping[str, Any], selected: Sequence[int], depth: int) -> dict[str, Any]:
    """config.json of the pruned model: the layer count and every per-layer list (such as layer_types), reduced to the
    selected layers."""
    return {
        name: [value[i] for i in selected] if isinstance(value, list) and len(value) == depth else value
        for name, value in config.items()
    } | {"num_hidden_layers": len(selected)}
