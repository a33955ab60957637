"""Models in the layout of Qwen2.5, Qwen3 and Qwen3.5: their tokenizer files, and tiny weights that have learnt to call tools.

Run as a script to look at the files: `python -m tests.support.qwen FOLDER`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Adam
from mlx_lm.models.llama import Model
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tests.support.oracle import tiny_llama
from tests.support.typed import as_float, leaves

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Added tokens that Qwen flags as special."""
PLAIN = ("<think>", "</think>")
"""Added tokens that it does not flag, beside those around a call."""
MARKERS = ("<tool_call>", "</tool_call>")

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer a call as JSON between <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""ChatML with Hermes's calls."""
XML_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool.function.name }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for name, value in tool_call.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
"""ChatML with the calls of Qwen3.5 and Qwen3-Coder."""

CORPUS = (
    '{"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object", "properties": ',
    '{"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false}, "strict": true}}',
    'You may call these functions:\nAnswer a call as JSON between . What is the weather in Paris? Say hello. "arguments": {',
    "system user assistant tool name city Paris Hello there, how are you? <tool_call> </tool_call> tool_call call",
)


class Format(StrEnum):
    """How a model writes calls, which mlx-lm takes from the chat template."""

    JSON = "JSON"
    XML = "tags"

    @property
    def template(self) -> str:
        """The chat template."""
        return TEMPLATE if self is Format.JSON else XML_TEMPLATE

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a call, as the template writes it."""
        if self is Format.JSON:
            inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n"
        else:
            texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
            tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
            inner = f"<function={name}>\n{tags}</function>\n"
        return f"<tool_call>\n{inner}</tool_call>"


class Layout(StrEnum):
    """What the markers around a call are in a vocabulary."""

    SPECIAL = "one special token"
    ADDED = "one added token that is not special"
    TEXT = "several ordinary tokens"


def write_tokenizer(
    folder: Path,
    layout: Layout = Layout.ADDED,
    markers: Sequence[str] = MARKERS,
    *,
    template: str = TEMPLATE,
    **settings: object,
) -> None:
    """Write tokenizer.json and tokenizer_config.json. markers: texts around a call. settings: more of tokenizer_config.json."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    if layout is not Layout.TEXT:
        flagged = layout is Layout.SPECIAL
        tokenizer.add_tokens([AddedToken(name, special=flagged, normalized=False) for name in markers if name])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in PLAIN])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = json.loads((folder / "tokenizer.json").read_text())
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    config = {
        "added_tokens_decoder": {
            str(token["id"]): {flag: token[flag] for flag in flags} for token in written["added_tokens"]
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings, indent=2))


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STRICT: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
QUESTION, CALL = "What is the weather in Paris?", ("weather", {"city": "Paris"})
GREETING, REPLY = "Say hello.", "Hello there, how are you?"
ORDER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "order",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer", "minimum": 1},
                "price": {"type": "number"},
                "gift": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "item": {"$ref": "#/$defs/Item"},
                "size": {"type": "string", "enum": ["small", "large"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "string"},
                "left_out": {"type": "string"},
            },
            "required": ["text", "count", "price", "gift", "tags", "item", "size", "note", "code"],
            "additionalProperties": False,
            "$defs": {
                "Item": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer"},
                        "inner": {"anyOf": [{"$ref": "#/$defs/Item"}, {"type": "null"}]},
                    },
                    "required": ["id", "inner"],
                    "additionalProperties": False,
                }
            },
        },
    },
}
"""A strict tool with parameters of every type."""
ORDERED = (
    "order",
    {
        "text": 'a <b> & "c"\n\nx</parameter> <parameter=',
        "count": 2,
        "price": 0.5,
        "gift": True,
        "tags": ["x", "<y>"],
        "item": {"id": 1, "inner": {"id": 2, "inner": None}},
        "size": "large",
        "note": None,
        "code": "5",
    },
)
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
"""A tool without parameters."""
KNOWN = 0.3
"""Loss of the hardest token, in nats, once a model knows every answer by heart."""
ORDERING, ASKING = "Order it.", "What time is it?"


def write_pair(root: Path, layout: Layout = Layout.ADDED, format: Format = Format.JSON) -> tuple[Path, Path]:
    """Folders of a target that answers QUESTION by CALL and GREETING by REPLY, and of a draft that has learnt less. With tags
    the target also answers ORDERING by ORDERED, and ASKING by a call of NOW."""
    write_tokenizer(root / "target", layout, template=format.template)
    write_tokenizer(root / "draft", layout, template=format.template)
    tokenizer = load_tokenizer(root / "target")
    call, greeting = (QUESTION, format.call(*CALL)), (GREETING, REPLY)
    # However a request describes the tool, and without tools.
    described = ([WEATHER], [STRICT], []) if format is Format.JSON else ([WEATHER], [])
    turns: list[tuple[Sequence[Mapping[str, Any]], tuple[str, str]]] = [
        (tools, turn) for tools in described for turn in (call, greeting)
    ]
    if format is Format.XML:
        turns += [([ORDER], (ORDERING, format.call(*ORDERED))), ([NOW], (ASKING, format.call("now", {})))]
    texts: list[tuple[list[int], int]] = []
    for tools, (question, reply) in turns:
        extra: Mapping[str, Any] = {"tools": tools} if tools else {}
        chat = [{"role": "user", "content": question}]
        prompt: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **extra)
        answer: list[int] = tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        texts.append(([*prompt, *answer], len(prompt)))
    model = tiny_llama(0, vocabulary=len(tokenizer) + 7, hidden=64, sharpness=1.0)
    _learn(model, texts, 60, 60)
    _save(model, root / "draft", tokenizer.eos_token_id)
    _learn(model, texts, 90, 2000)
    _save(model, root / "target", tokenizer.eos_token_id)
    return root / "target", root / "draft"


def _learn(model: Model, texts: Sequence[tuple[list[int], int]], steps: int, limit: int) -> None:
    """Train on the answers of (tokens, length of the prompt) for `steps` steps, and on until they are known by heart, at most
    `limit` in all."""
    width = max(len(tokens) for tokens, _ in texts)
    rows = mx.array([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in texts])
    positions = np.arange(width - 1)
    answers = [(positions >= start - 1) & (positions < len(tokens) - 1) for tokens, start in texts]
    weight = mx.array(np.stack(answers).astype(np.float32))

    def loss(model: Model) -> tuple[mx.array, mx.array]:
        each = weight * nn.losses.cross_entropy(model(rows[:, :-1]).astype(mx.float32), rows[:, 1:])
        return each.sum() / weight.sum(), each.max()

    optimiser, step = Adam(learning_rate=4e-3), nn.value_and_grad(model, loss)
    for done in range(limit):
        (_, hardest), gradients = step(model)
        if done >= steps and as_float(hardest) < KNOWN:
            return
        optimiser.update(model, gradients)
        mx.eval(model.parameters(), optimiser.state)


def _save(model: Model, folder: Path, eos: int) -> None:
    names = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
        "tie_word_embeddings",
    )
    config = {name: getattr(model.args, name) for name in names}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048, "eos_token_id": eos}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(leaves(model.parameters())))


if __name__ == "__main__":
    write_pair(Path(sys.argv[1]))
