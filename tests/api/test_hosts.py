"""Host and Origin checks: clients that name this server are served, pages of other sites are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from service.api.errors import Forbidden
from service.api.hosts import Hosts
from service.core import BadRequest
from service.settings import load_settings
from tests.support.echo_engine import EchoServer

EVIL = "https://evil.example"
POSTS = ("/generate", "/train", "/adapters/2/activate", "/adapters/rollback")
GETS = (
    *("/train/1", "/adapters", "/health/live", "/health/ready", "/metrics", "/openapi.json", "/nothing-here"),
    *("/", "/page/page.js", "/events", "/history", "/cases"),
)

# Requests that a page may send without a preflight: forms, and fetch with what a form could send.
BOUNDARY = "----WebKitFormBoundary7MA4YWxkTrZu0gW"
PART = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="prompt"\r\n\r\na\r\n--{BOUNDARY}--\r\n'
SIMPLE: list[tuple[str | None, bytes]] = [
    (None, b""),
    ("application/x-www-form-urlencoded", b""),
    ("application/x-www-form-urlencoded", b"prompt=a"),
    (f"multipart/form-data; boundary={BOUNDARY}", PART.encode()),
    ("text/plain", b'{"prompt": "a"}'),
    ("text/plain;charset=UTF-8", b"{}"),
    # Needs a preflight in a browser; refused without one too.
    ("application/json", b'{"prompt": "a"}'),
]


@pytest.fixture(scope="module")
def place(server: EchoServer) -> Iterator[str]:
    """host:port of a real server."""
    with server.served() as address:
        yield urlsplit(address).netloc


def send(
    place: str, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", host: str | None = ""
) -> tuple[int, dict[str, Any]]:
    """One request with only these headers. host: "" sends the server's own, None no Host header."""
    connection = HTTPConnection(place, timeout=60)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    if host is not None:
        connection.putheader("Host", host or place)
    for name, value in headers.items():
        connection.putheader(name, value)
    if method == "POST":
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body or None)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else {}


def assert_forbidden(answer: tuple[int, dict[str, Any]], field: str) -> None:
    status, body = answer
    assert status == 403, body
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert (body["error"]["code"], body["error"]["param"]) == ("forbidden", field)
    assert "server.allowed_hosts" in body["error"]["message"]


@pytest.mark.parametrize(("media", "body"), SIMPLE, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("path", POSTS)
def test_a_page_of_another_site_is_refused_whatever_it_posts(
    server: EchoServer, place: str, path: str, media: str | None, body: bytes
) -> None:
    headers = {"Origin": EVIL} | ({"Content-Type": media} if media else {})
    assert_forbidden(send(place, "POST", path, headers, body), "Origin")
    assert (server.operator.known_runs, len(server.operator.known), server.engine.tickets) == ([], 2, [])


@pytest.mark.parametrize("path", GETS)
def test_no_route_answers_a_page_of_another_site(place: str, path: str) -> None:
    assert_forbidden(send(place, "GET", path, {"Origin": EVIL}), "Origin")
    # Requests for images and scripts of a page carry no Origin.
    assert_forbidden(send(place, "GET", path, {"Sec-Fetch-Site": "cross-site"}), "Sec-Fetch-Site")


def test_a_preflight_request_is_refused(place: str) -> None:
    asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    assert_forbidden(send(place, "OPTIONS", "/train", asked), "Origin")


@pytest.mark.parametrize(
    "origin",
    [
        EVIL,
        "null",
        "",
        "http://",
        "file://",
        "http://localhost",
        "http://localhost:1",
        "http://localhost.evil.example:{port}",
        "http://evil.example:{port}",
        "http://evil.example@{own}",
        "http://{own}.evil.example",
        "http://{own}/",
        "ftp://{own}",
        "{own}",
        "http://{own} http://evil.example",
    ],
)
def test_an_origin_that_is_not_the_server_s_own_is_refused(place: str, origin: str) -> None:
    written = origin.format(own=place, port=place.partition(":")[2])
    assert_forbidden(send(place, "POST", "/train", {"Origin": written}), "Origin")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
def test_a_cross_site_sec_fetch_site_header_is_refused(place: str, site: str) -> None:
    """For a browser another port is the same site but another origin."""
    assert_forbidden(send(place, "POST", "/train", {"Sec-Fetch-Site": site}), "Sec-Fetch-Site")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "localhost.evil.example:{port}",
        "127.0.0.1.evil.example:{port}",
        "evil.localhost:{port}",
        "127.0.0.1:{port}:1",
        "127.0.0.1:port",
        "evil.example@127.0.0.1:{port}",
        "127.0.0.1/evil",
        "[::1",
        "::1",
        "[::2]:{port}",
        "0.0.0.0:{port}",
        "192.168.0.1:{port}",
        "localhost..:{port}",
        ":{port}",
    ],
)
def test_a_host_that_is_not_one_of_the_server_s_names_is_refused(place: str, host: str) -> None:
    """With DNS rebinding a page's own host name resolves to this server, so its requests are same-origin to the browser."""
    written = host.format(port=place.partition(":")[2])
    rebound = {"Origin": f"http://{written}", "Sec-Fetch-Site": "same-origin"}
    for path in POSTS:
        assert_forbidden(send(place, "POST", path, rebound, b"", written), "Host")
    assert_forbidden(send(place, "GET", "/adapters", {}, b"", written), "Host")


@pytest.mark.parametrize(
    "hosts", [[b"localhost", b"evil.example"], [b"evil.example", b"localhost"], [b"localhost"] * 2]
)
def test_a_request_with_two_hosts_is_refused(hosts: list[bytes]) -> None:
    """Proxies and servers differ in which of them counts. h11 lets none through, other parsers of uvicorn do."""
    known = Hosts(["localhost"])
    known.check_host({"type": "http", "headers": [(b"host", b"localhost")]})
    with pytest.raises(Forbidden, match="does not name this server"):
        known.check_host({"type": "http", "headers": [(b"host", host) for host in hosts]})


def test_a_request_without_a_host_is_refused(place: str) -> None:
    # HTTP/1.1 requires a Host header; HTTP/1.0 does not, but no browser sends it.
    assert send(place, "GET", "/adapters", {}, host=None)[0] == 400
    assert [without_host(place, path) for path in ("/adapters", "/health/live")] == [403, 200]


def without_host(place: str, path: str) -> int:
    connection = HTTPConnection(place, timeout=60)
    connection._http_vsn_str = "HTTP/1.0"  # pyright: ignore[reportAttributeAccessIssue]
    connection.putrequest("GET", path, skip_host=True)
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_health_answers_probes_by_any_name(place: str, path: str) -> None:
    for host in ("10.42.0.17:8321", "lb.example", "a_b", "[fe80::1]"):
        assert send(place, "GET", path, {}, b"", host)[0] == 200
        assert_forbidden(send(place, "GET", path, {"Origin": EVIL}, b"", host), "Origin")
    assert_forbidden(send(place, "GET", "/healthy", {}, b"", "lb.example"), "Host")


def test_an_unknown_key_protects_nothing(place: str) -> None:
    """A page whose name was made to resolve to this machine may send any key."""
    assert_forbidden(send(place, "GET", "/adapters", {"Authorization": "Bearer rd-no"}, b"", "evil.example"), "Host")


def test_containers_of_this_machine_may_call_by_its_names() -> None:
    allowed = load_settings().server.allowed_hosts
    server = EchoServer(allowed_hosts=tuple(allowed))
    with server.served() as address:
        place = urlsplit(address).netloc
        for host in ("host.docker.internal", "host.containers.internal", "localhost"):
            assert send(place, "GET", "/v1/models", {}, b"", f"{host}:8321")[0] == 200
        assert_forbidden(send(place, "GET", "/v1/models", {}, b"", "evil.docker.internal"), "Host")


@pytest.mark.parametrize(
    "host",
    [
        "localhost:{port}",
        "LocalHost:{port}",
        "localhost.:{port}",
        "localhost",
        "127.0.0.1:{port}",
        "[::1]:{port}",
        "[0:0:0:0:0:0:0:1]:{port}",
        "[::1]",
    ],
)
def test_clients_without_an_origin_and_pages_of_the_server_itself_pass(place: str, host: str) -> None:
    written = host.format(port=place.partition(":")[2])
    assert send(place, "GET", "/adapters", {}, b"", written)[0] == 200
    for origin in (f"http://{written}", f"HTTP://{written.upper()}"):
        assert send(place, "GET", "/adapters", {"Origin": origin}, b"", written)[0] == 200
    for site in ("same-origin", "none"):
        assert send(place, "GET", "/adapters", {"Sec-Fetch-Site": site}, b"", written)[0] == 200


def test_allowed_hosts_are_configurable() -> None:
    server = EchoServer(allowed_hosts=("Chat.Example", "[2001:DB8:0::1]"))
    with server.served() as address:
        place = urlsplit(address).netloc
        for host in ("chat.example", "chat.example:8443", "[2001:db8::1]:80"):
            assert send(place, "GET", "/adapters", {}, b"", host)[0] == 200
        # Behind a TLS proxy that passes the Host header unchanged.
        assert send(place, "GET", "/adapters", {"Origin": "https://chat.example"}, b"", "chat.example")[0] == 200
        assert send(place, "GET", "/adapters", {"Origin": "https://chat.example:443"}, b"", "chat.example")[0] == 200
        assert_forbidden(
            send(place, "GET", "/adapters", {"Origin": "https://chat.example"}, b"", "chat.example:1"), "Origin"
        )
        assert_forbidden(send(place, "GET", "/adapters", {}, b"", "localhost"), "Host")


def test_refusals_are_counted(server: EchoServer, place: str) -> None:
    before = server.value('redraft:requests_refused_total{code="forbidden"}')
    send(place, "POST", "/generate", {"Origin": EVIL}, b"{}")
    send(place, "POST", "/train", {"Origin": EVIL})
    assert server.value('redraft:requests_refused_total{code="forbidden"}') == before + 1


@pytest.mark.parametrize(
    "name", ["", "*", "*.example", "http://chat.example", "chat.example:80", "[::1]:80", "a b", "a/b"]
)
def test_a_setting_that_names_no_host_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="allowed_hosts"):
        load_settings(flags={"server.allowed_hosts": [name]})
    allowed = ["chat.example", "::1", "[::1]", "10.0.0.7"]
    assert load_settings(flags={"server.allowed_hosts": allowed}).server.allowed_hosts == allowed
