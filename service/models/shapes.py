"""Models without weights: their architecture from a config.json alone, to compute sizes before anything is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]

from service.core import ModelError
from service.models import eagle
from service.models.machine import folder_at_hand

_QUANTISED: dict[str, Any] = {"quantization": {"group_size": 64, "bits": 4}}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    **_QUANTISED,
}
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    **_QUANTISED,
}
_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def _qwen3_5(tied: bool, **sizes: int) -> dict[str, Any]:
    text = {**_QWEN3_5, **sizes, "tie_word_embeddings": tied}
    return {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": tied, **_QUANTISED}


KNOWN: dict[str, dict[str, Any]] = {
    "mlx-community/Qwen3-8B-4bit": {
        **_QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "mlx-community/Qwen3-0.6B-4bit": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "mlx-community/Llama-3.2-3B-Instruct-4bit": {
        **_LLAMA,
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    "mlx-community/Llama-3.2-1B-Instruct-4bit": {
        **_LLAMA,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
    },
    "mlx-community/Qwen3.5-9B-4bit": _qwen3_5(
        tied=False,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_value_heads=32,
        intermediate_size=12288,
    ),
    "mlx-community/Qwen3.5-0.8B-4bit": _qwen3_5(
        tied=True,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
        intermediate_size=3584,
    ),
}
"""By hub name, the relevant parts of the config.json of models that the documents recommend."""


def config_of(name: str, home: Path, revision: str | None = None) -> dict[str, Any] | None:
    """The config.json of a model: from this disk, or the KNOWN one; otherwise None."""
    if (folder := folder_at_hand(name, home, revision)) is not None:
        return cast("dict[str, Any]", json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return deepcopy(KNOWN.get(name))


def model_of(config: Mapping[str, Any], dtype: mx.Dtype) -> nn.Module:
    """A model of this architecture whose arrays have shapes but are never computed until evaluated. dtype: of unquantised
    weights and of scales. Raises ModelError if mlx-lm has no such model."""
    config = deepcopy(dict(config))
    if eagle.is_eagle_config(config):
        raise ModelError("the sizes of an EAGLE head are not known without its weights on this disk")
    try:
        model_class, arguments = _get_classes(config)
        model = cast("nn.Module", model_class(arguments.from_dict(config)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"mlx-lm has no model of this config.json: {error}") from error
    model.set_dtype(dtype)
    if quantised := cast("dict[str, Any] | None", config.get("quantization") or config.get("quantization_config")):
        if "bits" not in quantised:
            raise ModelError("the sizes of weights quantised in this way are not known: they have to be on this disk")
        _quantise(model, quantised)
    model.eval()
    return model


def context_of(config: Mapping[str, Any]) -> int | None:
    """Maximum tokens that the model reads; None if its config.json does not say."""
    parts = (config, cast("Mapping[str, Any]", config.get("text_config") or {}))
    limits = (part.get("max_position_embeddings") for part in parts)
    return next((limit for limit in limits if isinstance(limit, int)), None)


def _quantise(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Quantises like mlx-lm does when it loads. Entries under a layer's name are that layer's settings, or False."""

    def own(name: str, module: nn.Module) -> Any:
        if name in settings:
            return settings[name]
        weight = module.get("weight")
        fits = weight is not None and weight.shape[-1] % settings["group_size"] == 0
        return hasattr(module, "to_quantized") and fits

    nn.quantize(
        model,
        group_size=settings["group_size"],
        bits=settings["bits"],
        mode=settings.get("mode", "affine"),
        class_predicate=own,
    )
