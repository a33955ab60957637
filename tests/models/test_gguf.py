"""Small GGUF files written by the test: the loaded model computes the same as the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load
from tokenizers import pre_tokenizers

from service.core import ModelError
from service.models.gguf import convert

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _permute(weight: mx.array, heads: int) -> mx.array:
    """llama.cpp's convert_hf_to_gguf.py, LlamaModel.permute."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _write(file: Path, weights: dict[str, mx.array], config: dict[str, Any], **metadata: Any) -> None:
    tensors: dict[str, mx.array] = {}
    for key, value in weights.items():
        stem = key.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if stem.endswith("q_proj"):
            value = _permute(value, config["num_attention_heads"])
        elif stem.endswith("k_proj"):
            value = _permute(value, config["num_key_value_heads"])
        tensors[f"{prefix}{_NAMES[stem]}.weight"] = mx.contiguous(value)
    tokens = ["</s>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "Ġab"]
    number = lambda value: mx.array(value, dtype=mx.uint32)  # noqa: E731
    facts: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": number(config["hidden_size"]),
        "llama.block_count": number(config["num_hidden_layers"]),
        "llama.feed_forward_length": number(config["intermediate_size"]),
        "llama.attention.head_count": number(config["num_attention_heads"]),
        "llama.attention.head_count_kv": number(config["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"], dtype=mx.float32),
        "llama.rope.freq_base": mx.array(config["rope_theta"], dtype=mx.float32),
        "llama.context_length": number(config["max_position_embeddings"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b", "Ġ ab"],
        "tokenizer.ggml.token_type": mx.array([3, 3] + [1] * (len(tokens) - 2), dtype=mx.int32),
        "tokenizer.ggml.bos_token_id": number(1),
        "tokenizer.ggml.eos_token_id": number(0),
    }
    mx.save_gguf(str(file), tensors, facts | metadata)


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_is_the_original(tmp_path: Path, small_llama: Any, tied: bool) -> None:
    model, config = small_llama(vocab_size=260, tie_word_embeddings=tied)
    _write(tmp_path / "small.gguf", dict(tree_flatten(model.parameters())), config)
    folder = tmp_path / "out"
    folder.mkdir()
    convert(tmp_path / "small.gguf", folder)
    loaded, tokenizer = load(str(folder))[:2]
    tokens = mx.array([[1, 5, 77, 200, 258, 3]])
    assert mx.allclose(loaded(tokens), model(tokens), rtol=1e-5, atol=1e-5).item()
    assert tokenizer.encode("ab ab") == [258, 259]
    assert tokenizer.decode(tokenizer.encode("zwölf 12")) == "zwölf 12"
    assert tokenizer.eos_token_ids == {0}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "qwen2"}, "qwen2"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "llama-bpe"),
        ({"tokenizer.ggml.model": "llama"}, "llama"),
    ],
)
def test_other_kinds_are_refused_by_name(
    tmp_path: Path, small_llama: Any, metadata: dict[str, str], named: str
) -> None:
    model, config = small_llama(vocab_size=260)
    _write(tmp_path / "small.gguf", dict(tree_flatten(model.parameters())), config, **metadata)
    with pytest.raises(ModelError, match=named):
        convert(tmp_path / "small.gguf", tmp_path)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path, small_llama: Any) -> None:
    model, config = small_llama(vocab_size=260)
    file = tmp_path / "small.gguf"
    _write(file, dict(tree_flatten(model.parameters())), config)
    stored = mx.load(str(file), return_metadata=True)
    tensors, metadata = cast("tuple[dict[str, mx.array], dict[str, Any]]", stored)
    mx.save_gguf(str(tmp_path / "odd.gguf"), tensors | {"rope_freqs.weight": mx.ones(8)}, metadata)
    with pytest.raises(ModelError, match="rope_freqs"):
        convert(tmp_path / "odd.gguf", tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        convert(file, tmp_path)
