"""No input makes a 500: arbitrary bytes, arbitrary JSON, and requests that are almost right."""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.api.errors import GENERATING
from tests.support.echo_engine import LIMITS, EchoEngine, EchoServer

JSON = {"content-type": "application/json"}
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
EXAMPLES = pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.nightly)])

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
paths = st.sampled_from(sorted(GENERATING))
text = st.text(st.characters(codec=None), max_size=30)
like_json = st.text(alphabet='{}[]":,0123456789eE+-.ntfu\\ "prompt"', max_size=60).map(str.encode)
number = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, 2**63 - 1, 10**400, -0.0, 1e-320, 5e-324])
message = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]) | text, "content": text})
nearly = st.fixed_dictionaries(
    {},
    optional={
        "prompt": text,
        "messages": st.lists(message, max_size=4),
        "chat_template": st.booleans() | anything,
        "max_tokens": number,
        "temperature": number,
        "top_p": number,
        "top_k": number,
        "min_p": number,
        "seed": number,
        "stop": text | st.lists(text, max_size=3) | anything,
        "stream": st.booleans(),
        "domain": text,
        "client": text,
        "store": st.booleans() | anything,
        "return_tokens": st.booleans(),
        "num_draft_tokens": number,
    },
)


@cache
def app() -> FastAPI:
    """One application for all requests: building it takes longer than answering."""
    return EchoServer(engine=EchoEngine()).app


def ask(
    method: str, path: str, content: bytes, headers: dict[str, str], *, on: FastAPI | None = None
) -> httpx.Response:
    async def sent() -> httpx.Response:
        transport = httpx.ASGITransport(on or app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(sent())


def assert_answered(response: httpx.Response) -> None:
    assert response.status_code in {200, 400, 413}, response.text
    if response.status_code != 200:
        assert sorted(response.json()["error"]) == ["code", "message", "param", "type"]


@EXAMPLES
@pytest.mark.promise(25)
def test_any_bytes(examples: int) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(paths, st.binary(max_size=200) | like_json)
    def check(path: str, body: bytes) -> None:
        assert_answered(ask("POST", path, body, JSON))

    check()


@EXAMPLES
@pytest.mark.promise(25)
def test_any_json(examples: int) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(paths, anything)
    def check(path: str, value: Any) -> None:
        assert_answered(ask("POST", path, json.dumps(value).encode(), JSON))

    check()


@EXAMPLES
@pytest.mark.promise(25)
def test_requests_that_are_almost_right(examples: int) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(nearly)
    def check(asked: dict[str, Any]) -> None:
        response = ask("POST", "/generate", json.dumps(asked).encode(), JSON)
        assert_answered(response)
        if response.status_code == 200 and not asked.get("stream"):
            prompt = asked.get("prompt") or "".join(turn["content"] for turn in asked["messages"])
            assert prompt.startswith(response.json()["text"])

    check()


@settings(SETTINGS, max_examples=30)
@given(st.sampled_from(["GET", "POST"]), st.text(string.printable + "é\u2028\x00", max_size=12), st.text(max_size=40))
@pytest.mark.promise(25)
def test_any_path_and_key(method: str, part: str, key: str) -> None:
    quoted = quote(part)
    headers = {"Idempotency-Key": key.encode("ascii", "ignore").decode().translate(dict.fromkeys(range(32)))}
    own = EchoServer(engine=EchoEngine()).app  # a run that is under way would refuse the next
    for path in (f"/{quoted}", f"/train/{quoted}", "/train", f"/adapters/{quoted}/activate"):
        response = ask(method, path, b"", headers, on=own if path == "/train" else None)
        # "/train/." is "/train" to the client.
        under_way = {409} if path == "/train/." else set()
        assert response.status_code in {200, 202, 400, 404, 405} | under_way, response.text
        if response.status_code >= 400:
            assert sorted(response.json()["error"]) == ["code", "message", "param", "type"]


MARK = "no-such-name"
"""In every hostile name, so that a path that was made of one is recognised."""
opened: list[str] = []


@cache
def watch_paths() -> None:
    """Note every path of this process that a name went into. Audit hooks stay for ever."""

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(("open", "os.", "shutil.", "glob.", "pathlib.")):
            opened.extend(path for path in map(str, arguments) if MARK in path)

    sys.addaudithook(note)


def hostile_name(rng: random.Random) -> str:
    parts = [
        "..",
        ".",
        "/",
        "\\",
        "%2e%2e",
        "%2f",
        "%00",
        "\x00",
        "~",
        "C:",
        "//",
        "file:",
        "etc",
        "passwd",
        "\u202e",
        "é",
        " ",
    ]
    chosen = rng.choices(parts, k=rng.randint(1, 6))
    return "".join(
        [*chosen, rng.choice(["", "/"]), MARK, *rng.choices(["", ".js", "/..", "\x00.js", ".safetensors"], k=1)]
    )


@pytest.mark.parametrize("names", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
@pytest.mark.promise(28)
def test_hostile_names_never_reach_a_path(names: int, tmp_path: Path) -> None:
    watch_paths()
    opened.clear()
    with pytest.raises(FileNotFoundError):
        (tmp_path / MARK).read_text()
    assert opened, "a path would be noticed"
    opened.clear()
    rng = random.Random(28)
    routes = ["/page/{}", "/adapters/{}/activate", "/runs/{}", "/requests/{}", "/v1/models/{}", "/train/{}", "/{}"]

    async def ask_all() -> None:
        transport = httpx.ASGITransport(app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for _ in range(names):
                name = hostile_name(rng)
                # As it is where HTTP allows that, and quoted.
                path = rng.choice(routes).format(quote(name, safe=rng.choice(["", "/%.~:"])))
                answer = await client.request(rng.choice(["GET", "POST", "DELETE"]), f"http://localhost{path}")
                # A path that goes up again may be another route's.
                assert 400 <= answer.status_code < 500 or MARK not in answer.url.path, (path, answer.status_code)
                body = {"prompt": "a", "max_tokens": 1, rng.choice(["domain", "client", "model"]): name[:64]}
                assert (await client.post("/generate", json=body)).status_code in {200, 400}

    asyncio.run(ask_all())
    assert not opened


def test_the_limit_itself_is_served_and_one_byte_more_is_not() -> None:
    body = json.dumps({"prompt": "a"}).encode().ljust(LIMITS.max_body_bytes)
    assert ask("POST", "/generate", body, JSON).status_code == 200
    assert ask("POST", "/generate", body + b" ", JSON).status_code == 413
