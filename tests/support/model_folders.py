"""Tiny models as folders that mlx-lm loads."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from service.models import eagle


def save_model(model: Model | eagle.Model, folder: Path, **more: object) -> Path:
    """Weights, config and a tokenizer with one word for every id. more: further entries of config.json."""
    folder.mkdir(parents=True)
    args: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": model.args.hidden_size,
        "num_hidden_layers": model.args.num_hidden_layers,
        "intermediate_size": model.args.intermediate_size,
        "num_attention_heads": model.args.num_attention_heads,
        "num_key_value_heads": model.args.num_key_value_heads,
        "rms_norm_eps": model.args.rms_norm_eps,
        "vocab_size": model.args.vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }
    if isinstance(model, eagle.Model):
        args |= {"architectures": [eagle.ARCHITECTURE], "taps": list(model.args.taps)}
    (folder / "config.json").write_text(json.dumps(args | more))
    words = {f"w{i}": i for i in range(model.args.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "bos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder
