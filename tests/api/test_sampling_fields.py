"""Fields that change how an answer is sampled and where it ends: what of them reaches the engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.core import Sampling
from tests.support.echo_engine import EchoServer

CHAT = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 50}
ROUTES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 50}),
    ("/generate", {"prompt": "abc", "max_tokens": 50}),
]
ASKED = {
    "repetition_penalty": 1.2,
    "presence_penalty": -0.5,
    "frequency_penalty": 2,
    "min_tokens": 3,
    "ignore_eos": True,
    "stop_token_ids": [7, 9],
    "include_stop_str_in_output": True,
    "bad_words": ["no", " way"],
}
REACHES = Sampling(
    max_tokens=50,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=2.0,
    min_tokens=3,
    ignore_eos=True,
    stop_token_ids=(7, 9),
    include_stop=True,
    bad_words=tuple(tuple(map(ord, word)) for word in ("no", " no", "way", " way")),
)


def sampling_of(server: EchoServer) -> Sampling:
    return server.engine.tickets[-1].prompt.sampling


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_what_is_asked_reaches_the_engine(
    server: EchoServer, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    assert http.post(path, json=body | ASKED).status_code == 200
    assert sampling_of(server) == REACHES
    assert server.engine.tickets[-1].prompt.bent
    assert http.post(path, json=body).status_code == 200
    assert sampling_of(server) == Sampling(max_tokens=50)
    assert not server.engine.tickets[-1].prompt.bent


@pytest.mark.parametrize(("path", "body"), ROUTES[:2])
def test_null_and_what_is_neutral_change_nothing(
    server: EchoServer, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    neutral = {
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "bad_words": [],
        "best_of": 1,
    }
    neutral = {name: value for name, value in neutral.items() if name != "best_of" or "prompt" in body}
    for asked in (neutral, dict.fromkeys(neutral)):
        assert http.post(path, json=body | asked).status_code == 200
        assert sampling_of(server) == Sampling(max_tokens=50)
        assert not server.engine.tickets[-1].prompt.bent


@pytest.mark.parametrize(
    ("asked", "bent"),
    [
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"bad_words": ["x"]}, True),
        ({"min_tokens": 1}, True),
        ({"ignore_eos": True}, True),
        ({"logit_bias": {"5": 1}}, True),
        ({"stop_token_ids": [5], "include_stop_str_in_output": True, "stop": "x", "top_p": 0}, False),
    ],
)
def test_only_answers_that_say_what_the_target_says_are_recorded(
    server: EchoServer, http: httpx.Client, asked: dict[str, Any], bent: bool
) -> None:
    """They may be cached all the same."""
    assert http.post("/v1/chat/completions", json=CHAT | asked).status_code == 200
    prompt = server.engine.tickets[-1].prompt
    assert (prompt.bent, prompt.store) == (bent, True)


def test_the_model_s_own_penalty_is_used_and_recorded() -> None:
    server = EchoServer(defaults=Sampling(temperature=0.7, repetition_penalty=1.1))
    with server.served() as address:
        for path, body in [*ROUTES[:2], ("/v1/responses", {"input": "abc"}), ("/v1/messages", CHAT)]:
            assert httpx.post(address + path, json=body).status_code == 200
            prompt = server.engine.tickets[-1].prompt
            assert prompt.sampling.repetition_penalty == 1.1 and not prompt.bent, path
        for given, bent in ((1.1, False), (1.0, False), (1.2, True)):
            asked = CHAT | {"repetition_penalty": given}
            assert httpx.post(address + "/v1/chat/completions", json=asked).status_code == 200
            prompt = server.engine.tickets[-1].prompt
            assert (prompt.sampling.repetition_penalty, prompt.bent) == (given, bent)


@pytest.mark.parametrize(
    ("path", "body"),
    [*ROUTES, ("/v1/responses", {"input": "abc"}), ("/v1/messages", CHAT)],
)
def test_top_p_0_is_greedy(server: EchoServer, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert http.post(path, json=body | {"top_p": 0, "temperature": 1}).status_code == 200
    assert sampling_of(server).greedy


def test_as_many_answers_as_rows_and_queue_hold(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT | {"n": 12}).json()
    assert len(answer["choices"]) == 12
    for path, asked in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": ["a", "b"]})):
        refused = http.post(path, json={**asked, "n": 13})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"
        assert "exceed the 12 that can run and wait at once" in refused.json()["error"]["message"]


def test_what_is_no_token_is_refused() -> None:
    server = EchoServer()
    server.encoder.MARK, server.encoder.vocabulary = 99, 100
    with server.served() as address:
        url = address + "/v1/chat/completions"
        assert httpx.post(url, json=CHAT | {"stop_token_ids": [99]}).status_code == 200
        refused = httpx.post(url, json=CHAT | {"stop_token_ids": [99, 100]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_token_ids")
        # Never said anyway: "a" is token 97, "z" token 122.
        assert httpx.post(url, json=CHAT | {"bad_words": ["a", "az"]}).status_code == 200
        assert server.engine.tickets[-1].prompt.sampling.bad_words == ((97,), (32, 97))
