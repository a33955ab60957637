"""Converts a GGUF file to a folder in the standard MLX/HF layout, which mlx-lm loads.

Supports the Llama family with a byte-level BPE tokenizer, as written by llama.cpp's converter. Anything else is refused by
name, because a misread tensor or pre-tokenizer would give a slightly worse model instead of an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from service.core import ModelError

_GROUP = 32
"""Weights per scale in the block formats that MLX reads as quantised (Q4_0, Q4_1, Q8_0)."""

_CONTROL, _USER_DEFINED = 3, 4
"""llama.cpp's token types: special tokens, and ordinary tokens that are matched before BPE."""

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>[a-z_]+)\.weight")


@dataclass(frozen=True, slots=True)
class _Metadata:
    """A GGUF's key-value pairs. Missing keys raise ModelError naming the file."""

    values: Mapping[str, object]
    file: Path

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if not isinstance(value, mx.array):
            raise ModelError(f"{self.file.name} does not say {key}")
        return float(cast("float", value.item()))

    def integer(self, key: str, default: int | None = None) -> int:
        if default is not None and key not in self.values:
            return default
        return int(self.number(key))

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise ModelError(f"{self.file.name} does not say {key}")
        return cast("list[str]", value)


def convert(gguf: Path, folder: Path) -> None:
    """Write `gguf` to the existing `folder` as config.json, tokenizer files and model.safetensors.

    Weights become float32, which holds the product of a float16 scale and a 4- or 8-bit integer exactly; 16-bit formats do
    not. Uses MLX. Raises ModelError for what is not supported.
    """
    try:
        # mlx's stubs declare the metadata of a GGUF as strings only.
        loaded = cast(
            "tuple[dict[str, mx.array], dict[str, object]]", mx.load(str(gguf), format="gguf", return_metadata=True)
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelError(f"{gguf} cannot be read as GGUF: {error}") from error
    tensors, metadata = loaded[0], _Metadata(loaded[1], gguf)
    config = _config(metadata, tensors)
    weights = _weights(tensors, config, gguf)
    _write_tokenizer(metadata, folder, cast("int", config["max_position_embeddings"]))
    _write_json(folder / "config.json", config)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _config(metadata: _Metadata, tensors: Mapping[str, mx.array]) -> dict[str, object]:
    family = metadata.text("general.architecture")
    if family != "llama":
        raise ModelError(
            f"{metadata.file.name} holds a model of the family {family}; only llama is converted from GGUF"
        )
    hidden, heads = metadata.integer("llama.embedding_length"), metadata.integer("llama.attention.head_count")
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv", heads),
        "head_dim": metadata.integer("llama.rope.dimension_count", hidden // heads),
        # Stored as float32: 1e-5 is read as 9.999999747e-06, as llama.cpp reads it.
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("llama.rope.freq_base"),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "vocab_size": len(metadata.strings("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _weights(tensors: Mapping[str, mx.array], config: Mapping[str, object], file: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for key in tensors:
        if key.endswith((".scales", ".biases")):
            continue
        parts = _TENSOR.fullmatch(key)
        names = _GLOBAL_NAMES if parts is None or parts["layer"] is None else _LAYER_NAMES
        if parts is None or parts["name"] not in names:
            raise ModelError(f"{file.name} holds the tensor {key}, which the llama converter does not know")
        value = _float32(tensors, key)
        if parts["name"] == "attn_q":
            value = _unpermute(value, cast("int", config["num_attention_heads"]))
        elif parts["name"] == "attn_k":
            value = _unpermute(value, cast("int", config["num_key_value_heads"]))
        prefix = f"model.layers.{parts['layer']}." if parts["layer"] is not None else ""
        weights[f"{prefix}{names[parts['name']]}.weight"] = value
    return weights


def _float32(tensors: Mapping[str, mx.array], key: str) -> mx.array:
    """A tensor as float32, dequantised on the CPU so that the result is the same on every machine."""
    value = tensors[key]
    stem = key.removesuffix(".weight")
    scales = tensors.get(f"{stem}.scales")
    if scales is None:
        return value.astype(mx.float32, stream=mx.cpu)
    bits = value.shape[-1] * 32 // (scales.shape[-1] * _GROUP)
    return mx.dequantize(
        value,
        scales.astype(mx.float32, stream=mx.cpu),
        tensors[f"{stem}.biases"].astype(mx.float32, stream=mx.cpu),
        group_size=_GROUP,
        bits=bits,
        stream=mx.cpu,
    )


def _unpermute(weight: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's permutation of query and key rows, shape (heads * head_dim, inputs).

    It interleaves the halves of each head, for a RoPE over neighbouring pairs; HF's RoPE pairs the halves.
    """
    rows, inputs = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, inputs, stream=mx.cpu).swapaxes(1, 2, stream=mx.cpu)
    return mx.contiguous(halves.reshape(rows, inputs, stream=mx.cpu), stream=mx.cpu)


def _write_tokenizer(metadata: _Metadata, folder: Path, context: int) -> None:
    kind, splitting = metadata.text("tokenizer.ggml.model"), metadata.text("tokenizer.ggml.pre")
    if (kind, splitting) != ("gpt2", "smollm"):
        raise ModelError(
            f"{metadata.file.name} has a tokenizer of kind {kind}/{splitting}; only gpt2/smollm is converted"
        )
    tokens = metadata.strings("tokenizer.ggml.tokens")
    pairs = [tuple(merge.split(" ", 1)) for merge in metadata.strings("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=cast("list[tuple[str, str]]", pairs))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = cast("Sequence[int]", cast("mx.array", metadata.values["tokenizer.ggml.token_type"]).tolist())
    whole = [(token, type) for token, type in zip(tokens, types, strict=True) if type in {_CONTROL, _USER_DEFINED}]
    tokenizer.add_tokens(
        [AddedToken(token, special=type == _CONTROL, normalized=False) for token, type in whole],
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "model_max_length": context,
    }
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for name, setting in named.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata.values:
            settings[setting] = tokens[metadata.integer(key)]
    if template := metadata.text("tokenizer.chat_template"):
        settings["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
