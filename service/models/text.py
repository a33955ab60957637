"""Encodes chats and texts to token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, cast

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import pre_tokenizers

from service.core import BadRequest

LOSSLESS_STEPS = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Replace", "Split"}
"""Normalizers and pre-tokenizers (types of the tokenizers library) that drop no text. NFC may shorten it."""
NFC_SHRINKS = 3
"""NFC shortens UTF-8 at most by this factor (three Hangul letters of 3 bytes become one syllable of 3)."""


def bytes_per_token(tokenizer: TokenizerWrapper) -> int | None:
    """The largest number of UTF-8 bytes that one token stands for: a text of more than n times as many has more than n tokens.

    None where there is no such bound, because the tokenizer drops text or has one token for every unknown word.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts: dict[str, Any] = json.loads(backend.to_str())
    model, added = parts["model"], parts["added_tokens"]
    steps = [*_steps(parts["normalizer"]), *_steps(parts["pre_tokenizer"])]
    kinds = {step["type"] for step in steps}
    if model["type"] != "BPE" or not kinds <= LOSSLESS_STEPS or any(_drops(step) for step in steps):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocabulary: dict[str, int] = model["vocab"]
    if "ByteLevel" in kinds:
        # Byte-level BPE writes each byte as one character.
        complete = vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        longest = max(len(token) for token in vocabulary)
    else:
        complete = model["byte_fallback"] and vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
        longest = max(len(token.encode("utf-8", "replace")) for token in vocabulary)
    if not complete:
        return None
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    return longest * NFC_SHRINKS if "NFC" in kinds else longest


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    for part in step.get("normalizers", step.get("pretokenizers", ())):
        yield from _steps(part)


def _drops(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) != ({"String": " "}, "\u2581")
    return step["type"] == "Split" and step["behavior"] == "Removed"


class TextEncoder:
    """core.Encoder over an mlx-lm tokenizer. Makes no MLX calls. Thread-safe: the tokenizer is used under a lock."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a chat (messages of `role` and `content`) by the model's chat template, with the generation prompt.

        Raises BadRequest when the model has no chat template or the template refuses these messages.
        """
        if not self._tokenizer.has_chat_template:
            raise BadRequest("this model has no chat template: send a prompt instead of messages", field="messages")
        turns = [dict(message) for message in messages]
        try:
            with self._lock:
                tokens = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        except TemplateError as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", field="messages") from error
        return tuple(cast("list[int]", tokens))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a completion prompt, with the tokenizer's leading special tokens."""
        with self._lock:
            return tuple(cast("list[int]", self._tokenizer.encode(text)))
