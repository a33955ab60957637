"""Text to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import cast

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from service.core import BadRequest


class TextEncoder:
    """core.Encoder over an mlx-lm tokenizer. No MLX calls; a lock keeps threads apart that would set it up anew."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Messages of `role` and `content`, through the model's chat template with the assistant's turn opened.

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
        """Plain text, as a completion prompt (with the tokenizer's own leading special tokens)."""
        with self._lock:
            return tuple(cast("list[int]", self._tokenizer.encode(text)))
