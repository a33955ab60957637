"""Tiny real models on disk, with a real tokenizer, for the tests of service/models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<s>{{ message['role'] }} {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}

MakeModel = Callable[..., Path]


def byte_vocabulary() -> dict[str, int]:
    """</s>, <s>, and the 256 byte characters."""
    tokens = ["</s>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {token: id for id, token in enumerate(tokens)}


def write_tokenizer(
    folder: Path,
    vocabulary: dict[str, int],
    *,
    eos: str = "</s>",
    special: tuple[str, ...] = ("</s>", "<s>"),
    template: str | None = TEMPLATE,
) -> None:
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def build(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """A random model of any mlx-lm family, as mlx-lm builds it from a config.json, with logits of ordinary size."""
    model_class, arguments = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(arguments.from_dict(config))
    model.apply(lambda value: mx.random.normal(value.shape) * 0.3 if mx.issubdtype(value.dtype, mx.floating) else value)
    return model.eval()


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """make_model(name, seed=0, vocabulary=…, dtype=…, eos=…, bits=…, **config) -> its folder."""

    def make(
        name: str,
        *,
        seed: int = 0,
        vocabulary: dict[str, int] | None = None,
        dtype: mx.Dtype = mx.float16,
        bits: int | None = None,
        eos: str = "</s>",
        special: tuple[str, ...] = ("</s>", "<s>"),
        template: str | None = TEMPLATE,
        **config: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        vocabulary = vocabulary or byte_vocabulary()
        config = {"vocab_size": len(vocabulary)} | LLAMA | config
        write_tokenizer(folder, vocabulary, eos=eos, special=special, template=template)
        model = build(config, seed)
        model.set_dtype(dtype)
        if bits is not None:
            nn.quantize(model, group_size=32, bits=bits)
            config["quantization"] = {"group_size": 32, "bits": bits}
        mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def small_llama() -> Callable[..., tuple[nn.Module, dict[str, Any]]]:
    """small_llama(**config) -> a random model and its configuration."""

    def make(**changes: Any) -> tuple[nn.Module, dict[str, Any]]:
        config = LLAMA | changes
        return build(config), config

    return make


@pytest.fixture
def build_family() -> Callable[[dict[str, Any]], nn.Module]:
    """build_family(config) -> a random model of the family that config["model_type"] names."""
    return build
