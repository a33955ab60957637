"""A real server under penalties, bad words and ends of a client's own: texts of the naive decoder, and a sound log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from service.core import Generation, Sampling, Selection
from service.evaluation.server_process import LocalServer
from service.models.pair import load_model
from service.settings import load_settings
from service.store.stores import Stores, open_stores
from tests.support.oracle import naive
from tests.support.tiny_server import in_process_server, write_pair
from tests.support.waiting import until

EOS = frozenset({0})
GREEDY: dict[str, Any] = {"chat_template": False, "max_tokens": 40, "return_tokens": True}
OWN = 1.15


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pair = write_pair(tmp_path_factory.mktemp("pair"))
    (pair[0] / "generation_config.json").write_text(json.dumps({"do_sample": False, "repetition_penalty": OWN}))
    return pair


@pytest.fixture(scope="module")
def target(pair: tuple[Path, Path]) -> nn.Module:
    return load_model(pair[0]).model


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    made = in_process_server(tmp_path_factory.mktemp("server"), pair)
    made.start()
    yield made
    assert made.stop() == 0


def ids(text: str, target: tuple[Path, Path]) -> list[int]:
    return list(load_model(target[0]).tokenizer.encode(text))


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"repetition_penalty": 1.3}, Sampling(repetition_penalty=1.3)),
        ({"frequency_penalty": 0.5, "presence_penalty": 1}, Sampling(frequency_penalty=0.5, presence_penalty=1.0)),
        (
            {"presence_penalty": 1.5, "temperature": 0.8, "seed": 3, "top_k": 40},
            Sampling(presence_penalty=1.5, temperature=0.8, seed=3, top_k=40),
        ),
        ({"ignore_eos": True, "min_tokens": 40}, Sampling(ignore_eos=True, min_tokens=40)),
        ({"top_p": 0, "temperature": 2}, Sampling()),
    ],
)
def test_answers_are_the_naive_decoder_s(
    server: LocalServer, pair: tuple[Path, Path], target: nn.Module, asked: dict[str, Any], sampling: Sampling
) -> None:
    prompt = "the same the same the same "
    answer = server.request("POST", "/generate", {"prompt": prompt, **GREEDY, **asked})
    assert answer.status_code == 200, answer.text
    tokens = ids(prompt, pair)
    assert answer.json()["tokens"] == naive(target, tokens, replace(sampling, max_tokens=40), EOS)


def recorded(stores: Stores) -> list[Generation]:
    return stores.generations.by_ids(stores.generations.names(Selection(everything=True)))


def complete(server: LocalServer, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "abcabcabc", "max_tokens": 30, "temperature": 0, **body}
    answer = server.request("POST", "/v1/completions", asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_words_that_are_banned_are_not_said(server: LocalServer) -> None:
    free = complete(server)["text"]
    pairs = [free[at : at + 2] for at in range(0, 12, 3) if free[at : at + 2].isascii() and free[at : at + 2].strip()]
    assert pairs
    text = complete(server, bad_words=pairs)["text"]
    assert not any(word.lstrip() in text for word in pairs)


def test_where_an_answer_ends(server: LocalServer, pair: tuple[Path, Path]) -> None:
    free = complete(server, repetition_penalty=1)["text"]
    at = next(i for i in range(2, 20) if free[i].isascii() and free[i] not in free[:i])
    token = ids(free[at], pair)[-1]
    ended = complete(server, stop_token_ids=[token], repetition_penalty=1)
    assert (ended["text"], ended["finish_reason"]) == (free[:at], "stop")
    ended = complete(server, stop_token_ids=[token], include_stop_str_in_output=True, repetition_penalty=1)
    assert ended["text"] == free[: at + 1]
    ended = complete(server, stop=free[at], include_stop_str_in_output=True, repetition_penalty=1)
    assert (ended["text"], ended["finish_reason"]) == (free[: at + 1], "stop")


def test_the_model_s_own_penalty_holds_and_is_learnt_from(
    server: LocalServer, pair: tuple[Path, Path], target: nn.Module
) -> None:
    prompt = ids("learn from this this this", pair)
    wanted = naive(target, prompt, Sampling(max_tokens=30, repetition_penalty=OWN), EOS)
    assert wanted != naive(target, prompt, Sampling(max_tokens=30), EOS)
    complete(server, prompt=prompt, presence_penalty=1.0)
    complete(server, prompt=prompt, ignore_eos=True)
    complete(server, prompt=prompt)
    complete(server, prompt=prompt, repetition_penalty=1, stop_token_ids=[1])
    stores = open_stores(load_settings(server.config))
    try:
        until(lambda: any(g.prompt.sampling.stop_token_ids for g in recorded(stores)))
        logged = [g for g in recorded(stores) if g.prompt.tokens == tuple(prompt)]
    finally:
        stores.close()
    found = {g.prompt.sampling.repetition_penalty: g for g in logged}
    assert len(logged) == 2 and set(found) == {1.0, OWN}, "bent answers were recorded"
    assert list(found[OWN].output) == wanted
    assert found[1.0].prompt.sampling.stop_token_ids == (1,)
