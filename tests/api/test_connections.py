"""Connections: idle ones are kept for the next request, half-sent requests are given up."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from service.connections import web_config
from service.settings import load_settings
from tests.support.echo_engine import LIMITS, EchoServer

GET = "GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
ARRIVAL, IDLE = 0.3, 1


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, int]]:
    """A server whose requests must arrive within 0.3 s and whose idle connections are kept for 1 s."""
    server = EchoServer(limits=replace(LIMITS, arrival_seconds=ARRIVAL), idle_seconds=IDLE)
    with server.served() as address:
        url = urlsplit(address)
        yield url.hostname or "", url.port or 0


@contextmanager
def connected(place: tuple[str, int]) -> Generator[socket.socket]:
    with socket.create_connection(place, timeout=20) as connection:
        yield connection


def read_answer(connection: socket.socket) -> str:
    """One answer whose length is declared."""
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(65536)
    head, _, body = text.partition(b"\r\n\r\n")
    (length,) = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(65536)
    return (head + b"\r\n\r\n" + body).decode()


def read_all(connection: socket.socket) -> tuple[str, float]:
    """What comes until the server closes, and after how many seconds it does."""
    began, text = time.monotonic(), b""
    while piece := connection.recv(65536):
        text += piece
    return text.decode(), time.monotonic() - began


def test_an_idle_connection_is_kept_and_says_for_how_long(place: tuple[str, int]) -> None:
    with connected(place) as connection:
        for _ in range(2):
            connection.sendall(GET.encode())
            answer = read_answer(connection)
            assert answer.startswith("HTTP/1.1 200") and f"keep-alive: timeout={IDLE}\r\n" in answer.lower()
            time.sleep(2 * ARRIVAL)
        text, seconds = read_all(connection)
    assert text == "" and 0.2 < seconds < IDLE + 0.5


def test_connections_are_kept_for_75_seconds() -> None:
    web = load_settings().server
    config = web_config(EchoServer().app, idle_seconds=web.idle_seconds, arrival_seconds=web.arrival_seconds)
    assert config.timeout_keep_alive == 75


@pytest.mark.parametrize("sent", ["G", GET[:-2], "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_half_sent_head_is_given_up(place: tuple[str, int], sent: str, before: int) -> None:
    """before: requests on the connection that were answered."""
    with connected(place) as connection:
        for _ in range(before):
            connection.sendall(GET.encode())
            read_answer(connection)
        connection.sendall(sent.encode())
        text, seconds = read_all(connection)
    assert text.startswith("HTTP/1.1 408 ") and "connection: close" in text.lower()
    assert ARRIVAL - 0.1 < seconds < ARRIVAL + 0.5


def test_a_head_that_drips_has_no_more_time_than_any_other(place: tuple[str, int]) -> None:
    began = time.monotonic()
    with connected(place) as connection:
        connection.settimeout(0.05)
        text, sent = b"", 0
        while not text and sent < len(GET) - 3:
            connection.sendall(GET[sent].encode())
            sent += 1
            try:
                text = connection.recv(65536)
            except TimeoutError:
                continue
    assert text.startswith(b"HTTP/1.1 408 ") and time.monotonic() - began < 3 * ARRIVAL


def test_a_connection_without_a_byte_is_closed_like_an_idle_one(place: tuple[str, int]) -> None:
    with connected(place) as connection:
        text, seconds = read_all(connection)
    assert text == "" and IDLE - 0.2 < seconds < IDLE + 0.5


def test_a_body_may_not_pause(place: tuple[str, int]) -> None:
    head = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    with connected(place) as connection:
        connection.sendall(head.encode())
        connection.sendall(b"{")
        began = time.monotonic()
        answer = read_answer(connection)
        assert (
            answer.startswith("HTTP/1.1 408 ") and json.loads(answer.split("\r\n\r\n")[1])["error"]["code"] == "timeout"
        )
        assert ARRIVAL - 0.1 < time.monotonic() - began < ARRIVAL + 0.5


def test_the_rest_of_a_body_that_was_answered_is_given_up_however_it_drips(place: tuple[str, int]) -> None:
    """The answer, here that there is no such path, does not wait for the body."""
    with connected(place) as connection:
        connection.sendall(b"PUT /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert read_answer(connection).startswith("HTTP/1.1 404 ")
        began, closed = time.monotonic(), False
        while not closed and time.monotonic() - began < 10:
            try:
                connection.sendall(b" ")
            except OSError:
                closed = True
            time.sleep(0.05)
        assert closed and time.monotonic() - began < 3 * ARRIVAL


def test_a_connection_whose_body_came_after_its_answer_is_kept(place: tuple[str, int]) -> None:
    with connected(place) as connection:
        connection.sendall(b"PUT /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\n{")
        assert read_answer(connection).startswith("HTTP/1.1 404 ")
        connection.sendall(b" }")
        time.sleep(2 * ARRIVAL)
        connection.sendall(GET.encode())
        assert read_answer(connection).startswith("HTTP/1.1 200 ")


def test_an_answer_may_take_longer_than_its_request(place: tuple[str, int]) -> None:
    server = EchoServer(limits=replace(LIMITS, arrival_seconds=0.1), idle_seconds=1)
    server.engine.pause = 0.2
    with server.served() as address:
        url = urlsplit(address)
        body = json.dumps({"prompt": "abcdefgh", "chat_template": False})
        head = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with connected((url.hostname or "", url.port or 0)) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            assert '"abcdefgh"' in read_answer(connection)
