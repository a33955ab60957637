"""A server over real HTTP whose engine sends prompts back."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.echo_engine import EchoServer


@pytest.fixture(scope="module")
def server() -> EchoServer:
    return EchoServer()


@pytest.fixture(scope="module")
def http(server: EchoServer) -> Iterator[httpx.Client]:
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client
