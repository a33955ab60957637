"""An untrained EAGLE-3 head (arXiv 2503.01840), initialised from the target's last layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from service.core import ModelError
from service.learning.export import save_model_folder
from service.learning.make.prune import dequantised, resolve_layers
from service.models.arrays import named_arrays
from service.models.eagle import ARCHITECTURE, Model, ModelArgs
from service.models.hidden_states import HiddenStateCapture
from service.models.pair import Loaded

_INIT_STD = 0.02
"""Standard deviation of randomly initialised weights."""
_CONFIG_KEYS = (
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
"""Keys of config.json that the head copies from the target."""


def default_feature_layers(depth: int) -> list[int]:
    """The feature layers for a target of `depth` layers, counted from the first: the second, the middle and the fourth
    from last, as in EAGLE-3; fewer for a small target where these coincide."""
    return sorted({min(1, depth - 1), max(depth // 2 - 1, 0), max(depth - 4, 0)})


def init_eagle_head(target: Loaded, layers: Sequence[int] | None, folder: Path) -> list[int]:
    """Writes the model folder of a head that reads these feature layers of the target (indices, negative ones from the
    end; None: `default_feature_layers`). Returns them counted from the first.

    The head computes the target's last layer over its deepest feature, plus a little noise from its other inputs.
    Raises ModelError when an index is out of range, when the target's hidden states cannot be captured, or when its
    last layer is not a Llama block.
    """
    depth = len(cast("list[object]", getattr(target.model, "layers", [])))
    feature_layers = default_feature_layers(depth) if layers is None and depth else resolve_layers(layers or (), depth)
    config = _head_config(target, feature_layers)
    width = int(config["hidden_size"])
    # Checks that its hidden states can be captured.
    HiddenStateCapture(target.model, feature_layers, width).take()
    weights = dict(_named(Model(ModelArgs.from_dict(config))))
    weights |= _initial_fusion(width, len(feature_layers))
    _copy_block(weights, "model.layers.0.", cast("list[nn.Module]", target.model.layers)[-1])
    owner = cast("Any", target.model)
    precision = owner.model.norm.weight.dtype
    weights = {name: array.astype(precision) for name, array in weights.items()}
    weights |= _shared_weights(owner, tied=config.get("tie_word_embeddings", True))
    mx.eval(weights)
    folder.mkdir(parents=True, exist_ok=True)
    save_model_folder(weights, config, target.folder, folder)
    return feature_layers


def _head_config(target: Loaded, feature_layers: Sequence[int]) -> dict[str, Any]:
    config = {name: target.config[name] for name in _CONFIG_KEYS if name in target.config}
    return config | {
        "model_type": "llama",
        "architectures": [ARCHITECTURE],
        "num_hidden_layers": 1,
        "taps": list(feature_layers),
    }


def _initial_fusion(width: int, layers: int) -> dict[str, mx.array]:
    """The matrices that fuse features and embeddings: noise, plus the identity for the deepest feature."""
    mx.random.seed(0)
    noise = mx.random.normal((width, width * layers)) * _INIT_STD
    embedding = mx.random.normal((width, width)) * _INIT_STD
    return {
        "project.weight": noise + mx.pad(mx.eye(width), [(0, 0), (width * (layers - 1), 0)]),
        "model.layers.0.fuse.weight": mx.concatenate([embedding, mx.eye(width)], axis=1),
    }


def _copy_block(weights: dict[str, mx.array], prefix: str, block: nn.Module) -> None:
    """Replaces the weights with this prefix by a target block's, except the fusion's. Raises ModelError."""
    found = dict(dequantised(block))
    for name in [name for name in weights if name.startswith(prefix) and ".fuse." not in name]:
        own = found.get(name.removeprefix(prefix))
        if own is None or own.shape != weights[name].shape:
            raise ModelError(
                f"the target's last layer is not a Llama block: it has no {name.removeprefix(prefix)} of that shape"
            )
        weights[name] = own


def _shared_weights(owner: Any, *, tied: bool) -> dict[str, mx.array]:
    """The target's final norm, embeddings and output head, in their stored form."""
    modules = {"model.norm.": owner.model.norm, "model.embed_tokens.": owner.model.embed_tokens}
    if not tied:
        modules["lm_head."] = owner.lm_head
    return {
        f"{name}{leaf}": array for name, module in modules.items() for leaf, array in named_arrays(module.parameters())
    }


def _named(module: nn.Module) -> list[tuple[str, mx.array]]:
    return named_arrays(module.parameters())
