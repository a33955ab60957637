"""A server that never had a key: recorded texts are for the user who has its token, and a proxy gets nothing."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from service.api.access import ROUTES
from service.core import Access
from service.store.access.key_ring import KeyRing
from service.store.access.keys import Keys
from service.store.access.local_token import make_token
from service.store.database import Database, upgrade
from tests.support.echo_engine import EchoServer
from tests.support.log_lines import logged
from tests.support.store_rows import url_of

TEXTS = {("GET", "/cases"), ("GET", "/requests"), ("DELETE", "/requests/{id}"), ("DELETE", "/generations")}
"""Routes that show what was recorded or is asked now, or end it."""
FORWARDED = {"x-forwarded-for": "203.0.113.7"}


@dataclass
class Keyless:
    """A server on a database without keys, and what its home folder's token is."""

    url: str
    http: httpx.Client
    token: str
    keys: Keys
    ring: KeyRing
    server: EchoServer

    @property
    def owned(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}


@contextmanager
def keyless(folder: Path) -> Generator[Keyless]:
    upgrade(url_of(folder / "redraft.db"))
    database = Database(url_of(folder / "redraft.db"))
    keys, token = Keys(database), make_token(folder)
    ring = KeyRing(keys)
    ring.accept_token(token)
    server = EchoServer(keeper=ring)
    with server.served() as url, httpx.Client(base_url=url, timeout=60) as http:
        yield Keyless(url, http, token, keys, ring, server)
    database.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Generator[Keyless]:
    with keyless(tmp_path_factory.mktemp("keyless")) as made:
        yield made


def call(place: Keyless, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """Status and message; "" where it is no error."""
    path = path.replace("{id:path}", "echo").replace("{id}", "1").replace("{name}", "page.js")
    body = {} if method == "POST" and "/v1" in path else None
    with place.http.stream(method, path, headers=headers, json=body) as answer:
        if answer.status_code < 400:
            return answer.status_code, ""  # GET /events never ends.
        answer.read()
        return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_what_each_route_wants(place: Keyless, method: str, path: str) -> None:
    public, texts = ROUTES[method, path] is Access.PUBLIC, (method, path) in TEXTS
    for name, headers in {
        "none": {},
        "another": {"authorization": "Bearer rd-another"},
        "two others": {"authorization": "Bearer rd-another", "x-api-key": "rd-a-third"},
        "a part": {"authorization": f"Bearer {place.token[:-1]}"},
        "no session": {"cookie": f"redraft_session={place.token}"},
    }.items():
        code, message = call(place, method, path, headers)
        assert (code == 403 and "home folder" in message) if texts else code not in {401, 403}, name
    for headers in (place.owned, {"x-api-key": place.token}, place.owned | {"x-api-key": "rd-another"}):
        assert call(place, method, path, headers)[0] not in {401, 403}
    for headers in (FORWARDED, FORWARDED | place.owned, FORWARDED | {"host": "llm.example"}):
        code, message = call(place, method, path, headers)
        if public:
            assert "create a key first" not in message
        else:
            assert code == 403 and "create a key first" in message and "redraft keys create" in message
    # Pages of other sites get nothing, whatever they know.
    assert call(place, method, path, place.owned | {"origin": "https://evil.example"})[0] == 403


@pytest.mark.parametrize(
    "name",
    [
        "Forwarded", "X-Forwarded", "X-Forwarded-For", "x-forwarded-host", "X-FORWARDED-PROTO",
        "X-Forwarded-Prefix", "X-Forwarded-Port", "X-Real-IP", "Via", "CF-Connecting-IP", "CF-Ray",
        "True-Client-IP", "X-Client-IP", "X-Cluster-Client-IP", "X-Original-For", "X-Original-URL",
        "X-Original-Host", "X-ProxyUser-Ip", "Fastly-Client-IP", "Fly-Client-IP", "X-Azure-ClientIP", "CDN-Loop",
        "X-Envoy-External-Address", "X-Appengine-User-IP", "Tailscale-User-Login", "X-Originating-IP",
        "WL-Proxy-Client-IP", "X_Forwarded_For", "Remote-Addr", "X-Remote-Addr",
    ],
)  # fmt: skip
def test_headers_that_proxies_add(place: Keyless, name: str) -> None:
    host = urlsplit(place.url).netloc
    for lines in ([f"{name}: x"], [f"{name}:"], ["Accept: */*", f"{name}: a", f"{name}: b"]):
        for version in ("1.0", "1.1"):
            head = [f"GET /adapters HTTP/{version}", f"Host: {host}", *lines, "Connection: close", "", ""]
            answer = raw(host, "\r\n".join(head))
            assert answer.startswith("HTTP/1.1 403 ") and "make a key first" in answer, (lines, version)


def raw(address: str, text: str) -> str:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(text.encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_headers_of_clients_are_no_proxy_s(place: Keyless) -> None:
    names = (
        "User-Agent", "Accept", "Accept-Encoding", "Accept-Language", "Referer", "Content-Type", "DNT", "Priority",
        "Traceparent", "X-Request-Id", "X-Stainless-Arch", "X-Stainless-Retry-Count", "OpenAI-Organization",
        "Anthropic-Version", "Anthropic-Beta", "Sec-Fetch-Mode", "Sec-CH-UA", "X-Title", "HTTP-Referer",
        "X-Amzn-Trace-Id", "Idempotency-Key", "Upgrade-Insecure-Requests",
    )  # fmt: skip
    assert place.http.get("/adapters", headers=dict.fromkeys(names, "x")).status_code == 200


def test_no_method_shows_texts(place: Keyless) -> None:
    for method in ("HEAD", "OPTIONS", "POST", "PUT", "PATCH"):
        for path in ("/cases", "/requests"):
            assert place.http.request(method, path).status_code == 405
            assert place.http.request(method, path, headers=FORWARDED).status_code == 403
    host = urlsplit(place.url).netloc
    ways = (
        "/cases/",
        "//cases",
        "/%63ases",
        "/cases%2F",
        "/Cases",
        "/./cases",
        "/x/../cases",
        "/cases;a",
        "/cases?",
        "/cases#",
    )
    for path in (*ways, f"http://{host}/cases"):
        answer = raw(host, f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        assert answer.split()[1] in {"400", "403", "404"}, path


def test_an_upgrade_is_forwarded_like_any_request(place: Keyless) -> None:
    host = urlsplit(place.url).netloc
    socket_headers = "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    for more, expected in (("", "403"), ("Via: 1.1 a\r\n", "403")):
        head = f"GET /cases HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade, close\r\n{socket_headers}\r\n{more}\r\n"
        assert raw(host, head).split()[1] == expected


def cookie_of(answer: httpx.Response) -> dict[str, str]:
    return {"cookie": answer.headers["set-cookie"].partition(";")[0]}


def test_the_page_trades_the_token_for_a_session(place: Keyless) -> None:
    http = place.http
    assert http.get("/session").json() == {"role": "local", "key": None, "asks_for_key": False}
    for wrong in ("rd-another", place.token + "x"):
        assert http.post("/session", json={"key": wrong}).status_code == 401
    opened = http.post("/session", json={"key": place.token}, headers={"origin": place.url})
    http.cookies.clear()
    assert opened.status_code == 204
    (morsel,) = SimpleCookie(opened.headers["set-cookie"]).values()
    assert morsel["httponly"] and morsel["samesite"] == "strict" and place.token not in morsel.value
    cookie = cookie_of(opened)
    assert http.get("/session", headers=cookie).json() == {"role": "operator", "key": None, "asks_for_key": False}
    assert http.get("/cases", headers=cookie).status_code == 200
    # What erases needs the Origin that browsers send with it.
    erase = {"json": {"client": "ada"}}
    codes = [
        http.request("DELETE", "/generations", headers=cookie | more, **erase).status_code  # pyright: ignore[reportArgumentType]
        for more in ({}, {"origin": "http://127.0.0.1:1"}, {"origin": place.url}, FORWARDED | {"origin": place.url})
    ]
    assert codes == [403, 403, 200, 403]
    assert http.get("/cases", headers=cookie | FORWARDED).status_code == 403
    assert http.get("/cases", headers=cookie | {"host": "rebound.example"}).status_code == 403
    assert http.delete("/session", headers=cookie | {"origin": place.url}).status_code == 204
    assert http.get("/cases", headers=cookie).status_code == 403


def test_from_the_first_key_on_the_token_opens_nothing(tmp_path: Path) -> None:
    with keyless(tmp_path) as place:
        http = place.http
        cookie = cookie_of(http.post("/session", json={"key": place.token}))
        http.cookies.clear()
        assert [http.get("/cases", headers=each).status_code for each in (place.owned, cookie)] == [200, 200]
        assert place.ring.accepts_token
        operator = {"authorization": f"Bearer {place.keys.create('me', Access.OPERATOR)}"}
        place.ring.refresh()
        assert [http.get("/cases", headers=each).status_code for each in (place.owned, cookie)] == [401, 401]
        assert http.get("/adapters", headers=place.owned).status_code == 401
        assert http.post("/session", json={"key": place.token}).status_code == 401
        assert http.get("/cases", headers=operator).status_code == 200
        # A proxy is welcome now.
        assert http.get("/cases", headers=operator | FORWARDED).status_code == 200
        assert http.get("/cases", headers=FORWARDED).status_code == 401
        place.keys.revoke("me")
        place.ring.refresh()
        assert http.get("/cases", headers=place.owned).status_code == 401
        assert not place.ring.accepts_token


def test_neither_the_database_nor_the_log_has_the_token(tmp_path: Path) -> None:
    with logged("json") as lines, keyless(tmp_path) as place:
        opened = place.http.post("/session", json={"key": place.token})
        place.http.get("/cases", headers=place.owned)
        place.http.get("/cases", headers=place.owned | FORWARDED)
        place.http.get("/cases", headers=FORWARDED)
        assert opened.status_code == 204
    assert lines.text.count('"forbidden"') == 2 and place.token not in lines.text
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.name != "token")
    assert place.token[3:].encode() not in stored
