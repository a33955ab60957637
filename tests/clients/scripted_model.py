"""A model that follows scripts, for clients whose prompts no small model answers with a call of their tools.

Its tokenizer is another model's, so that prompts have as many tokens as there, with tokens of its own for the pieces of the
scripts. Its weights know which token follows which: behind `<go-NAME>`, which the chat template puts before the answer, the
pieces of the script of that name, and then the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer

HEAD = 64
"""Width of an attention head."""
WORD = "Paris"
"""What the model says in strings that a grammar asks for."""
STRINGS = (('Ġ"', WORD), ('["', WORD), ('"', WORD), (WORD, '"'))
"""Tokens of JSON, and what follows them. A quotation mark may also end a string: an object then ends if it may."""
CHOICE = """\
{%- if add_generation_prompt %}{% set chosen = namespace(script='answer') %}
{%- if messages[-1].role != 'tool' and 'summary' not in messages[-1].content %}{% for tool in tools or [] %}
{%- if tool.function.name in NAMES %}{% set chosen.script = tool.function.name %}{% endif %}{% endfor %}
{%- for name in NAMES %}{% if messages[-1].content.startswith(name + ':') %}{% set chosen.script = name %}{% endif %}
{%- endfor %}{% endif %}
{{- '<|im_start|>assistant\\n<go-' + chosen.script + '>' }}{% endif %}
"""
"""The end of a chat template: calls the tool that a script is named after, or follows the script whose name and a colon begin
the last message, and answers behind a tool's result, or where a summary is asked for."""


def write_scripted(
    source: Path, scripts: Mapping[str, Sequence[str]], template: str, folder: Path, context: int
) -> Path:
    """Write the model to a new folder. source: of the model whose tokenizer it has. scripts: pieces by name, "answer" among
    them; no piece in two of them. template: of chats, without the beginning of an answer. context: tokens of a prompt and its
    answer."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokenizer.add_special_tokens([AddedToken(f"<go-{name}>", special=True) for name in scripts])
    pieces = [piece for script in scripts.values() for piece in script]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    follows, vocabulary = dict[int, int](), tokenizer.get_vocab()
    for name, script in scripts.items():
        texts = (f"<go-{name}>", *script, settings["eos_token"])
        follows |= dict(pairwise(vocabulary[text] for text in texts))
    # Where a grammar asks for JSON: strings are one word, objects end as soon as they may.
    follows |= {vocabulary[before]: vocabulary[after] for before, after in STRINGS}
    rows, width = tokenizer.get_vocab_size(), -(-(len(follows) + 1) // HEAD) * HEAD
    embedding, head = np.zeros((rows, width), np.float32), np.zeros((rows, width), np.float32)
    embedding[:, -1] = 1
    for liked, text in enumerate(('"', WORD, "}", settings["eos_token"]), 1):
        head[vocabulary[text], -1] = liked
    for place, (token, following) in enumerate(follows.items()):
        embedding[token, -1] = 0
        embedding[token, place], head[following, place] = 1, 2
    head[vocabulary["}"], list(follows).index(vocabulary['"'])] = 1
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": np.ones(width)}
    layer = "model.layers.0."
    weights |= {f"{layer}{name}_layernorm.weight": np.ones(width) for name in ("input", "post_attention")}
    weights |= {f"{layer}self_attn.{name}_proj.weight": np.zeros((width, width)) for name in "qkvo"}
    weights |= {f"{layer}mlp.{name}_proj.weight": np.zeros((HEAD, width)) for name in ("gate", "up")}
    weights[f"{layer}mlp.down_proj.weight"] = np.zeros((width, HEAD))
    arrays = {name: mx.array(value.astype(np.float32)) for name, value in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "intermediate_size": HEAD,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD,
        "vocab_size": rows,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": context,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = json.dumps([name for name in scripts if name != "answer"])
    settings |= {"chat_template": template + CHOICE.replace("NAMES", names), "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
