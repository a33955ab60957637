"""A draft that reads the target's hidden states, before it has learnt anything: started from the target's last layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from service.core import ModelError
from service.learning.prune import counted, save
from service.models.eagle import ARCHITECTURE, Model, ModelArgs
from service.models.hidden_states import HiddenStateCapture
from service.models.pair import Loaded

_LITTLE = 0.02
"""Standard deviation of weights that begin at chance."""
_KEPT = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_traditional",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "bos_token_id",
    "eos_token_id",
    "quantization",
)
"""What the head's config.json has from the target's."""


def usual(depth: int) -> list[int]:
    """The layers to read of a target of so many: the second, the middle one and the fourth from last (EAGLE-3's); fewer of a
    target where these coincide."""
    return sorted({min(1, depth - 1), max(depth // 2 - 1, 0), max(depth - 4, 0)})


def sprout(target: Loaded, layers: Sequence[int] | None, folder: Path) -> list[int]:
    """Write the folder of a draft that reads these layers of the target (indices, negative ones from the end; None: the usual).

    It begins as the target's last layer over its deepest feature and a little of everything else. Returns the layers counted
    from the first. Raises ModelError when an index is out of range, or where the target's last layer is not a Llama's.
    """
    depth = len(cast("list[object]", getattr(target.model, "layers", [])))
    taps = usual(depth) if layers is None and depth else counted(layers or (), depth)
    config = {name: target.config[name] for name in _KEPT if name in target.config}
    config |= {"model_type": "llama", "architectures": [ARCHITECTURE], "num_hidden_layers": 1, "taps": taps}
    head = Model(ModelArgs.from_dict(config))
    weights = dict(_named(head))
    width = int(config["hidden_size"])
    HiddenStateCapture(target.model, taps, width).take()
    mx.random.seed(0)
    beside = mx.random.normal((width, width * len(taps))) * _LITTLE
    weights["project.weight"] = beside + mx.pad(mx.eye(width), [(0, 0), (width * (len(taps) - 1), 0)])
    weights["model.layers.0.fuse.weight"] = mx.concatenate(
        [mx.random.normal((width, width)) * _LITTLE, mx.eye(width)], axis=1
    )
    last = cast("list[nn.Module]", target.model.layers)[-1]
    _take(weights, "model.layers.0.", dict(_dense(last)))
    owner = cast("Any", target.model)
    precision = owner.model.norm.weight.dtype
    weights = {name: array.astype(precision) for name, array in weights.items()}
    for name, module in (("model.norm.", owner.model.norm), ("model.embed_tokens.", owner.model.embed_tokens)):
        weights |= {f"{name}{leaf}": array for leaf, array in _named(module)}
    if not config.get("tie_word_embeddings", True):
        weights |= {f"lm_head.{leaf}": array for leaf, array in _named(owner.lm_head)}
    mx.eval(weights)
    folder.mkdir(parents=True, exist_ok=True)
    save(weights, config, target.folder, folder)
    return taps


def _take(weights: dict[str, mx.array], prefix: str, layer: dict[str, mx.array]) -> None:
    for name in [name for name in weights if name.startswith(prefix) and ".fuse." not in name]:
        own = layer.get(name.removeprefix(prefix))
        if own is None or own.shape != weights[name].shape:
            raise ModelError(
                f"the target's last layer is no Llama block: it has no {name.removeprefix(prefix)} of that shape"
            )
        weights[name] = own


def _dense(layer: nn.Module) -> list[tuple[str, mx.array]]:
    """A layer's weights, quantised ones as what they stand for."""
    found: list[tuple[str, mx.array]] = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.QuantizedLinear):
            held = cast("Any", module)
            whole = mx.dequantize(
                held.weight, held.scales, held.get("biases"), held.group_size, held.bits, mode=held.mode
            )
            found.append((f"{name}.weight", whole))
        elif not module.children():
            found += [(f"{name}.{leaf}", array) for leaf, array in _named(module)]
    return found


def _named(module: nn.Module) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))
