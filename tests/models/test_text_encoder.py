"""Text to token ids: errors name the field, threads do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from service.core import BadRequest
from service.models.text import TextEncoder

MakeModel = Callable[..., Path]


def test_messages_need_a_chat_template(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m", template=None)))
    with pytest.raises(BadRequest, match="no chat template") as caught:
        encoder.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_what_the_template_refuses_is_a_bad_request(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m")))
    with pytest.raises(BadRequest, match="unknown role") as caught:
        encoder.encode_chat([{"role": "wizard", "content": "hi"}])
    assert caught.value.field == "messages"


def test_many_threads_get_what_one_gets(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m")))
    chats = [[{"role": "user", "content": f"question {number} " * (number % 7 + 1)}] for number in range(200)]
    alone = [encoder.encode_chat(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(encoder.encode_chat, chats))
    assert together == alone
