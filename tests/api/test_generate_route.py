"""POST /generate over real HTTP: JSON and streams, refusals, and clients that disconnect."""

from __future__ import annotations

import json
import logging
import select
import socket
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from service.core import Sampling
from service.metrics import CODES
from tests.support.echo_engine import LIMITS, Codepoints, EchoEngine, EchoServer, FailingEncoder
from tests.support.http_answers import assert_refused, events
from tests.support.panicking import panic
from tests.support.waiting import until

# ------------------------------------------------------------------------------------------------------------ answers


def test_a_json_answer_carries_text_usage_and_timings(server: EchoServer, http: httpx.Client) -> None:
    asked = {"prompt": "grüße 🌍", "seed": 5, "temperature": 0.5, "stop": "\n", "domain": "sql", "store": False}
    response = http.post("/generate", json=asked)
    assert response.status_code == 200
    answer = response.json()
    prompt = server.engine.tickets[-1].prompt
    assert answer["text"] == "grüße 🌍"
    assert answer["model"] == "echo"
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}
    assert answer["timings"]["adapters"] == [0, 3]
    assert answer["timings"]["prompt_ms"] == 500.0
    assert (answer["timings"]["prompt_n"], answer["timings"]["cache_n"]) == (5, 4)
    speeds = {"prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"}
    assert speeds < set(answer["timings"])
    assert [answer["timings"][name] for name in ("draft_n", "draft_n_accepted", "rounds")] == [7, 3, 7]
    assert "tokens" not in answer
    assert prompt.sampling == Sampling(temperature=0.5, seed=5, stop=("\n",))
    assert (prompt.domain, prompt.client, prompt.store, prompt.first_user) == ("sql", None, False, "grüße 🌍")


def test_a_seed_may_be_any_number(server: EchoServer, http: httpx.Client) -> None:
    assert http.post("/generate", json={"prompt": "a", "seed": 2**63 + 5, "temperature": 1}).status_code == 200
    assert server.engine.tickets[-1].prompt.sampling.seed == 5


def test_a_whole_number_may_be_written_as_a_float(http: httpx.Client) -> None:
    assert http.post("/generate", json={"prompt": "abc", "max_tokens": 2.0}).json()["text"] == "ab"


def test_tokens_come_when_asked_for(http: httpx.Client) -> None:
    answer = http.post("/generate", json={"prompt": "abc", "max_tokens": 2, "return_tokens": True}).json()
    assert answer["tokens"] == [97, 98]
    assert answer["finish_reason"] == "length"


def test_a_stream_carries_the_same_as_the_json_answer(http: httpx.Client) -> None:
    asked: dict[str, Any] = {"prompt": 'tab\tline\nquote" \u2028 snow☃', "return_tokens": True}
    whole = http.post("/generate", json=asked).json()
    response = http.post("/generate", json={**asked, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, last, done = events(response.text)
    assert done == ("message", "[DONE]")
    parts = [json.loads(data) for _, data in deltas]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [flag for part in parts for flag in part["drafted"]][:4] == [False, True, False, True]
    ended = json.loads(last[1])
    assert sorted(ended) == sorted(set(whole) - {"text"})
    assert (ended["usage"], ended["finish_reason"]) == (whole["usage"], whole["finish_reason"])


def test_a_stream_without_tokens_has_text_alone(http: httpx.Client) -> None:
    *deltas, last, _ = events(http.post("/generate", json={"prompt": "ab", "stream": True}).text)
    assert [json.loads(data) for _, data in deltas] == [{"text": "a"}, {"text": "b"}]
    assert "tokens" not in json.loads(last[1])


def test_prompts_and_messages_are_encoded_correctly(server: EchoServer, http: httpx.Client) -> None:
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "second"},
    ]
    assert http.post("/generate", json={"messages": turns}).status_code == 200
    assert server.engine.tickets[-1].prompt.tokens == server.encoder.encode_chat(turns).tokens
    assert server.engine.tickets[-1].prompt.first_user == "first"
    assert http.post("/generate", json={"prompt": "plain", "chat_template": False}).status_code == 200
    assert server.engine.tickets[-1].prompt.tokens == server.encoder.encode_text("plain")
    assert http.post("/generate", json={"prompt": "turn"}).status_code == 200
    assert (
        server.engine.tickets[-1].prompt.tokens
        == server.encoder.encode_chat([{"role": "user", "content": "turn"}]).tokens
    )


def test_without_max_tokens_the_answer_fills_the_context(server: EchoServer, http: httpx.Client) -> None:
    assert http.post("/generate", json={"prompt": "x" * 3_900}).status_code == 200
    prompt = server.engine.tickets[-1].prompt
    assert len(prompt.tokens) + prompt.sampling.max_tokens == LIMITS.max_context


# ------------------------------------------------------------------------------------------------------------- refusals

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": "\ud800"}, "body"),
    ({"prompt": "x" * 4_000}, "prompt"),
    ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
    ({"messages": []}, "prompt"),
    ({"messages": [{"role": "user", "content": "x" * 4_000}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "b"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "b"}], "chat_template": False}, "chat_template"),
    ({"prompt": "a", "chat_template": 1}, "chat_template"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**400}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "a", "temperature": -0.1}, "temperature"),
    ({"prompt": "a", "temperature": 10.1}, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "top_p": -0.1}, "top_p"),
    ({"prompt": "a", "top_p": 1.01}, "top_p"),
    ({"prompt": "a", "top_k": -1}, "top_k"),
    ({"prompt": "a", "top_k": 2**31}, "top_k"),
    ({"prompt": "a", "min_p": 1.01}, "min_p"),
    ({"prompt": "a", "seed": -1}, "seed"),
    ({"prompt": "a", "stop": ["b", "x" * 257]}, "stop.1"),
    ({"prompt": "a", "stop": ["b"] * 17}, "stop"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "stream": "yes"}, "stream"),
    ({"prompt": "a", "store": 0}, "store"),
    ({"prompt": "a", "domain": "a\x00b"}, "domain"),
    ({"prompt": "a", "client": "x" * 129}, "client"),
    ({"prompt": "a", "return_tokens": "yes"}, "return_tokens"),
    ({"prompt": "a", "\ud800": 1}, "body"),
]


def refusals(server: EchoServer) -> dict[str, float]:
    """Requests refused, by code."""
    values = server.values()
    return {code: values[f'redraft:requests_refused_total{{code="{code}"}}'] for code in CODES}


@pytest.mark.parametrize(("asked", "field"), WRONG, ids=lambda value: str(value)[:50].encode("unicode_escape").decode())
def test_a_wrong_field_is_named(server: EchoServer, http: httpx.Client, asked: dict[str, Any], field: str) -> None:
    before = len(server.engine.tickets)
    counts = refusals(server)
    response = http.post("/generate", content=json.dumps(asked), headers={"content-type": "application/json"})
    code = "context_length_exceeded" if "context" in response.json()["error"]["message"] else "bad_request"
    assert_refused(response, 400, code, field)
    assert refusals(server) == {**counts, code: counts[code] + 1}
    assert len(server.engine.tickets) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"prompt"',
        b'{"prompt": "\xff"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": ' + b"[" * 9_000 + b"]" * 9_000 + b"}",
        b'{"prompt": ' + b'{"a": [' * 70 + b"]}" * 70 + b"}",
        b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
    ],
    ids=lambda body: body[:25].decode("ascii", "backslashreplace"),
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post("/generate", content=body, headers={"content-type": "application/json"})
    assert_refused(response, 400, "bad_request", "body")


def test_numbers_too_large_for_a_float_are_refused(http: httpx.Client) -> None:
    body = b'{"prompt": "a", "temperature": 1e400}'
    response = http.post("/generate", content=body, headers={"content-type": "application/json"})
    assert_refused(response, 400, "bad_request", "temperature")


def test_a_key_given_twice_is_refused(http: httpx.Client) -> None:
    body = b'{"prompt": "a", "seed": 1, "seed": 2}'
    response = http.post("/generate", content=body, headers={"content-type": "application/json"})
    assert_refused(response, 400, "bad_request", "seed")


def test_only_json_is_read(http: httpx.Client) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "nonsense"):
        response = http.post("/generate", content=b'{"prompt": "a"}', headers={"content-type": content_type})
        assert_refused(response, 415, "unsupported_media_type", None)


def test_a_query_is_refused(http: httpx.Client) -> None:
    assert_refused(http.post("/generate?seed=1", json={"prompt": "a"}), 400, "bad_request", "seed")


@pytest.mark.promise(26)
def test_a_body_beyond_the_limit_is_refused_declared_or_chunked(server: EchoServer, http: httpx.Client) -> None:
    size = 5 * LIMITS.max_body_bytes
    headers = {"content-type": "application/json"}
    assert_refused(http.post("/generate", content=b" " * size, headers=headers), 413, "body_too_large", None)
    chunks = (b" " * 1_000 for _ in range(size // 1_000))
    assert_refused(http.post("/generate", content=chunks, headers=headers), 413, "body_too_large", None)
    just = json.dumps({"prompt": "a"}).encode().ljust(LIMITS.max_body_bytes)
    assert http.post("/generate", content=iter([just[:7], just[7:]]), headers=headers).status_code == 200
    assert_refused(http.post("/generate", content=just + b" ", headers=headers), 413, "body_too_large", None)
    assert server.value('redraft:requests_refused_total{code="body_too_large"}') == 3


@pytest.mark.promise(26)
def test_a_body_that_never_ends_is_given_up() -> None:
    with EchoServer(limits=replace(LIMITS, request_timeout=0.3)).served() as address:
        connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
        connection.putrequest("POST", "/generate")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", "100")
        connection.endheaders(b'{"prompt"')
        answer = connection.getresponse()
        assert answer.status == 408
        assert json.loads(answer.read())["error"]["code"] == "timeout"
        connection.close()


@pytest.mark.promise(26)
def test_a_body_that_drips_has_no_more_time_than_any_other() -> None:
    with EchoServer(limits=replace(LIMITS, request_timeout=0.3)).served() as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
            head = f"POST /generate HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: 100\r\n\r\n".encode())
            sent = 0
            while sent < 100 and not select.select([connection], [], [], 0.05)[0]:
                connection.sendall(b" ")
                sent += 1
            assert connection.recv(64).startswith(b"HTTP/1.1 408 ")
            assert sent < 100, "each byte came in time, the body did not"


def test_a_full_queue_is_503_with_retry_after() -> None:
    server = EchoServer(engine=EchoEngine(full=True))
    with server.served() as address:
        for stream in (False, True):
            response = httpx.post(f"{address}/generate", json={"prompt": "a", "stream": stream})
            assert_refused(response, 503, "overloaded", None)
            assert response.headers["retry-after"] == "7"
    assert server.value('redraft:requests_refused_total{code="overloaded"}') == 2


# ----------------------------------------------------------------------------------------------------- aborted requests


def test_an_engine_that_stops_midway_is_an_error_in_either_mode() -> None:
    server = EchoServer(engine=EchoEngine(break_after=2))
    with server.served() as address:
        response = httpx.post(f"{address}/generate", json={"prompt": "abcdef"})
        assert_refused(response, 503, "unavailable", None)
        streamed = events(httpx.post(f"{address}/generate", json={"prompt": "abcdef", "stream": True}).text)
    assert [kind for kind, _ in streamed] == ["message", "message", "error"]
    assert json.loads(streamed[-1][1]) == response.json()
    assert server.value('redraft:requests_failed_total{code="unavailable"}') == 2
    assert server.value('redraft:requests_refused_total{code="unavailable"}') == 0


def test_a_silent_stream_is_kept_alive() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.35), limits=replace(LIMITS, keepalive_seconds=0.1))
    with server.served() as address:
        streamed = events(httpx.post(f"{address}/generate", json={"prompt": "ab", "stream": True}).text)
    kinds = [kind for kind, _ in streamed]
    assert kinds.count(":") >= 4
    assert kinds[-1] == "message" and streamed[-1][1] == "[DONE]"
    assert "".join(json.loads(data).get("text", "") for kind, data in streamed[:-1] if kind == "message") == "ab"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause", [0.02, 30.0], ids=["decoding", "queued"])
@pytest.mark.promise(23)
def test_a_disconnected_client_frees_its_row_at_once(stream: bool, pause: float) -> None:
    server = EchoServer(engine=EchoEngine(pause=pause))
    with server.served() as address:
        connection = HTTPConnection(urlsplit(address).netloc, timeout=60)
        body = json.dumps({"prompt": "x" * 2_000, "stream": stream, "max_tokens": 1_000})
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        until(lambda: server.engine.tickets)
        ticket = server.engine.tickets[0]
        assert not ticket.cancelled.wait(0.2)
        connection.close()
        assert ticket.cancelled.wait(1.0)
        until(lambda: server.value('redraft:request_success_total{finished_reason="abort"}') == 1)
    assert server.engine.ended[ticket.id] == "cancelled"


@pytest.mark.promise(23)
def test_a_hundred_aborted_streams_leave_no_request_running() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.01))
    with server.served() as address, httpx.Client(base_url=address) as client:
        for number in range(100):
            asked = {"prompt": "x" * 2_900, "stream": True, "max_tokens": 1_000}
            with client.stream("POST", "/generate", json=asked) as response:
                assert response.status_code == 200
                if number % 2:
                    next(response.iter_raw())
        until(lambda: server.engine.status().rows == 0)
        assert len(server.engine.tickets) == 100
        assert client.post("/generate", json={"prompt": "ab"}).json()["text"] == "ab"


def test_requests_are_counted_as_they_end(server: EchoServer, http: httpx.Client) -> None:
    started = server.value("redraft:requests_started_total")
    stopped = server.value('redraft:request_success_total{finished_reason="stop"}')
    first = server.value("redraft:time_to_first_token_seconds_count")
    later = server.value("redraft:inter_token_latency_seconds_count")
    prompt = server.value("redraft:request_prompt_tokens_sum")
    for stream in (False, True):
        assert http.post("/generate", json={"prompt": "abcd", "stream": stream}).status_code == 200
    assert server.value("redraft:requests_started_total") == started + 2
    assert server.value('redraft:request_success_total{finished_reason="stop"}') == stopped + 2
    assert server.value("redraft:time_to_first_token_seconds_count") == first + 2
    assert server.value("redraft:inter_token_latency_seconds_count") == later + 6
    assert server.value("redraft:request_prompt_tokens_sum") == prompt + 12
    assert server.value('redraft:request_success_total{finished_reason="abort"}') == 0


@pytest.mark.promise(30)
def test_no_prompt_text_in_errors_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "xyzzy-canary"
    server = EchoServer(encoder=FailingEncoder())
    with server.served() as address:
        broken = httpx.post(f"{address}/generate", json={"prompt": canary})
        assert_refused(broken, 500, "internal_error", None)
        wrong = httpx.post(f"{address}/generate", json={"prompt": [canary], "domain": f"{canary}\n", "seed": canary})
        assert_refused(wrong, 400, "bad_request", "prompt")
    assert canary not in broken.text + wrong.text
    assert canary not in caplog.text
    assert "ValueError" in caplog.text
    assert server.value('redraft:requests_refused_total{code="internal_error"}') == 1


# ------------------------------------------------------------------------------------------------------- early refusals


class CountingEncoder(Codepoints):
    """Counts tokenised prompts, and the places in the queue reserved meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = EchoEngine()
        self.held: list[int] = []

    def encode_text(self, text: str) -> tuple[int, ...]:
        self.held.append(self.engine.reserved)
        return super().encode_text(text)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_tokenised_while_the_queue_is_full(stream: bool) -> None:
    encoder = CountingEncoder()
    with EchoServer(engine=EchoEngine(full=True), encoder=encoder).served() as address:
        refused = httpx.post(f"{address}/generate", json={"prompt": "x" * 3_000, "stream": stream})
        assert_refused(refused, 503, "overloaded", None)
        # Before the body is parsed, too.
        broken = httpx.post(f"{address}/generate", content=b"{", headers={"content-type": "application/json"})
        assert_refused(broken, 503, "overloaded", None)
    assert encoder.held == []


def test_a_place_is_held_while_a_prompt_is_tokenised_and_given_back_whatever_happens() -> None:
    encoder = CountingEncoder()
    with EchoServer(engine=encoder.engine, encoder=encoder).served() as address:
        for asked, status in [
            ({"prompt": "ab"}, 200),
            ({"prompt": "ab", "stream": True}, 200),
            ({"prompt": "x" * 4_000}, 400),
            ({"prompt": "x" * 3_500, "max_tokens": 600, "min_tokens": 600}, 400),
            ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400),
        ]:
            assert httpx.post(f"{address}/generate", json=asked).status_code == status
            assert encoder.engine.reserved == 0
    assert encoder.held == [1, 1, 1, 1]
    with EchoServer(engine=encoder.engine, encoder=FailingEncoder()).served() as address:
        assert httpx.post(f"{address}/generate", json={"prompt": "ab"}).status_code == 500
    assert encoder.engine.reserved == 0


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"prompt": "ü" * 51}, 400),
        ({"prompt": "ü" * 50}, 200),
        ({"prompt": " " * 50 + "ü" * 50 + "\n" * 50}, 200),
        ({"prompt": "ü" * 51, "chat_template": False}, 400),
        ({"messages": [{"role": "user", "content": "x" * 60}, {"role": "user", "content": "x" * 41}]}, 400),
        ({"messages": [{"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "x" * 41}]}, 200),
    ],
)
@pytest.mark.promise(26)
def test_a_prompt_that_cannot_fit_by_its_bytes_is_refused_untokenised(asked: dict[str, Any], status: int) -> None:
    """Only text that every chat template keeps is counted."""
    encoder = CountingEncoder()
    with EchoServer(
        engine=encoder.engine, encoder=encoder, limits=replace(LIMITS, max_prompt_bytes=100)
    ).served() as address:
        response = httpx.post(f"{address}/generate", json=asked)
    assert response.status_code == status
    if status == 400:
        assert_refused(response, 400, "context_length_exceeded", next(iter(asked)))
        assert "bytes" in response.json()["error"]["message"]
    assert bool(encoder.held) == (status == 200)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_panic_of_a_library_has_the_shape_of_every_error(path: str) -> None:
    class Panicking(Codepoints):
        def encode_text(self, text: str) -> tuple[int, ...]:
            panic(text)

    server = EchoServer(encoder=Panicking())
    with server.served() as address:
        assert_refused(httpx.post(f"{address}{path}", json={"prompt": "ab"}), 500, "internal_error", None)
        assert httpx.get(f"{address}/health/live").status_code == 200
