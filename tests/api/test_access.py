"""Keys: which routes they open, for whom, and what a browser may do with a session."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute, _IncludedRouter
from sqlalchemy import update

from service.api.access import ROUTES, check_routes
from service.core import Access, BadRequest, Conflict, NotFound
from service.settings import load_settings
from service.store.access.key_ring import KeyRing
from service.store.access.keys import CONFIGURED, MAX_SESSIONS, Keys
from service.store.database import Database, upgrade
from service.store.tables import page_sessions
from tests.support.echo_engine import EchoServer
from tests.support.store_rows import url_of

EVIL = "https://evil.example"
PUBLIC = [
    "GET /", "GET /page/{name}", "GET /health", "GET /health/live", "GET /health/ready", "GET /session", "POST /session",
    "DELETE /session",
]  # fmt: skip
CLIENT = [
    "POST /generate", "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages",
    "POST /v1/messages/count_tokens", "GET /v1/models", "GET /v1/models/{id:path}", "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
]  # fmt: skip
LOCAL = [
    "GET /metrics", "POST /train", "GET /train/{id}", "GET /adapters", "DELETE /adapters/{id}/files",
    "POST /adapters/{id}/activate", "POST /adapters/rollback",
    "GET /runs", "GET /runs/{id}", "DELETE /runs/{id}", "GET /events", "GET /history",
    "GET /learning", "GET /gains", "GET /practice", "PUT /practice",
]  # fmt: skip
OPERATOR = ["DELETE /generations", "GET /requests", "DELETE /requests/{id}", "GET /cases"]
TABLE = {name: access for access, names in enumerate((PUBLIC, CLIENT, LOCAL, OPERATOR)) for name in names}


class Place:
    """A server with keys of its own in a real database. secrets: by role; "own" is that of the settings."""

    def __init__(self, folder: Path) -> None:
        url = url_of(folder / "redraft.db")
        upgrade(url)
        self.database = Database(url)
        self.keys = Keys(self.database)
        self.secrets = {role: self.keys.create(role, Access[role.upper()]) for role in ("client", "operator")}
        self.secrets |= {"own": "a-key-of-the-settings", "mine": "an-operator-s-key"}
        self.ring = KeyRing(self.keys, {Access.CLIENT: self.secrets["own"], Access.OPERATOR: self.secrets["mine"]})
        self.server = EchoServer(keeper=self.ring)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("keys"))
    yield made
    made.database.close()


@pytest.fixture(scope="module")
def http(place: Place) -> Iterator[httpx.Client]:
    with place.server.served() as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def call(http: httpx.Client, name: str, headers: dict[str, str]) -> int:
    method, path = name.split()
    path = path.replace("{id}", "1").replace("{id:path}", "echo").replace("{name}", "index.html")
    body = {} if method == "POST" and "/v1" in path else None
    # GET /events never ends.
    with http.stream(method, path, headers=headers, json=body) as answer:
        return answer.status_code


@pytest.mark.promise(27)
def test_every_route_is_in_the_table_and_a_new_one_without_an_entry_cannot_be_served(place: Place) -> None:
    routers = [each.original_router for each in place.server.app.routes if isinstance(each, _IncludedRouter)]
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    assert {f"{method} {route.path}" for route in routes for method in route.methods or ()} == set(TABLE)
    assert {f"{method} {path}": access for (method, path), access in ROUTES.items() if path != "/openapi.json"} == TABLE
    routers[0].add_api_route("/new", lambda: None, methods=["GET"])
    with pytest.raises(LookupError):
        check_routes(routers[0])


@pytest.mark.parametrize("who", ["nobody", "wrong", "client", "own", "operator", "mine"])
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.promise(27)
def test_codes_of_every_route_for_every_key_and_page(http: httpx.Client, place: Place, name: str, who: str) -> None:
    has = {"nobody": 0, "wrong": 0, "client": 1, "own": 1, "operator": 3, "mine": 3}[who]
    headers = {} if who == "nobody" else bearer(place.secrets.get(who, "rd-nothing"))
    through = has >= TABLE[name]
    expected = None if through else 403 if has else 401
    own = f"http://{http.base_url.netloc.decode()}"
    # DELETE and POST /session answer 400 or 204 without a body of theirs: whatever is let through is no 401 or 403.
    for more in ({}, {"origin": own}):
        found = call(http, name, headers | more)
        assert found == expected if expected else found not in {401, 403}, more
    assert call(http, name, headers | {"origin": EVIL}) == 403
    # Another site may have a link to the page, which shows nothing by itself.
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (call(http, name, headers | link) == 403) is (name != "GET /")
    assert call(http, name, headers | link | {"sec-fetch-mode": "cors"}) == 403
    # A server with keys may be called by any name: who shows none, or a wrong one, hears of keys and not of hosts.
    found = call(http, name, headers | {"host": "other.example"})
    assert found == expected if expected else found not in {401, 403}


@pytest.mark.parametrize(("host", "origin"), [("@", "http://@"), ("@", "http://#"), ("a:b", "https://")])
def test_what_names_no_host_is_nobody_s_own_origin(http: httpx.Client, place: Place, host: str, origin: str) -> None:
    key = bearer(place.secrets["client"])
    assert http.get("/v1/models", headers=key | {"host": host}).status_code == 200
    assert http.get("/v1/models", headers=key | {"host": host, "origin": origin}).status_code == 403


def test_no_path_ends_with_a_line(http: httpx.Client, place: Place) -> None:
    """The router would take the path without it, which another key opens."""
    for name in TABLE:
        method, path = name.split()
        path = path.replace("{id}", "1").replace("{id:path}", "echo").replace("{name}", "index.html")
        for key in ("client", "operator"):
            asked = http.request(method, f"{path}%0A", headers=bearer(place.secrets[key]))
            assert asked.status_code == 404, name


def test_the_two_headers_for_keys(http: httpx.Client, place: Place) -> None:
    client = place.secrets["client"]
    for headers in (bearer(client), {"authorization": f"bearer  {client}"}, {"x-api-key": client}):
        assert http.get("/v1/models", headers=headers).status_code == 200
    assert http.get("/v1/models", headers=bearer(client) | {"x-api-key": client}).status_code == 200
    refused = http.get("/v1/models", headers=bearer(client) | {"x-api-key": place.secrets["operator"]})
    assert refused.status_code == 401 and "two different keys" in refused.text
    for one, other in ((client, "sk-ant-oat-of-another"), ("sk-ant-oat-of-another", client)):
        assert http.get("/v1/models", headers=bearer(one) | {"x-api-key": other}).status_code == 200
    refused = http.get("/v1/models", headers=bearer("rd-nothing") | {"x-api-key": "rd-nothing-either"})
    assert refused.status_code == 401 and "not valid here" in refused.text
    for header in ("Basic " + client, client, "Bearer", "Bearer " + client[:-1]):
        refused = http.get("/v1/models", headers={"authorization": header})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
    # What has no route asks for a key too.
    assert [http.get("/nothing", headers=h).status_code for h in ({}, bearer(client))] == [401, 404]


def test_allow_names_every_method_of_a_path(http: httpx.Client, place: Place) -> None:
    key = bearer(place.secrets["operator"])
    for path, allowed in (("/session", "DELETE, GET, POST"), ("/runs/1", "DELETE, GET"), ("/generate", "POST")):
        refused = http.put(path, headers=key)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


def test_refused_keys_are_counted_where_they_would_generate(http: httpx.Client, place: Place) -> None:
    sample = 'redraft:requests_refused_total{code="invalid_api_key"}'
    before = place.server.value(sample)
    http.post("/generate", json={"prompt": "a"})
    http.get("/v1/models")
    assert place.server.value(sample) == before + 1


def test_a_key_opens_and_is_revoked_while_the_server_runs(tmp_path: Path) -> None:
    """Once there was a key, a server never opens again."""
    url = url_of(tmp_path / "redraft.db")
    upgrade(url)
    database = Database(url)
    keys, server = Keys(database), EchoServer(keeper=(ring := KeyRing(Keys(database))))
    with server.served() as address, httpx.Client(base_url=address, timeout=60) as http:
        # Clients of other servers send a key whether one is asked for or not.
        assert [http.get("/adapters", headers=h).status_code for h in ({}, bearer("none"))] == [200, 200]
        secret = keys.create("ada", Access.OPERATOR)
        ring.refresh()
        assert [http.get("/adapters", headers=h).status_code for h in ({}, bearer("none"), bearer(secret))] == [
            401,
            401,
            200,
        ]
        with pytest.raises(Conflict):
            keys.create("ada", Access.CLIENT)
        assert keys.revoke("ada").revoked_at == keys.revoke("ada").revoked_at
        ring.refresh()
        assert [http.get("/adapters", headers=h).status_code for h in ({}, bearer(secret))] == [401, 401]
        with pytest.raises(Conflict):
            keys.create("ada", Access.CLIENT)
    for name in CONFIGURED.values():
        with pytest.raises(Conflict, match="settings"):
            keys.create(name, Access.CLIENT)
    with pytest.raises(NotFound):
        keys.revoke("bob")
    for name in ("", "a b", "../a", "a/b", "ä", "a" * 65, "-a"):
        with pytest.raises(BadRequest):
            keys.create(name, Access.CLIENT)
    database.close()


@pytest.mark.promise(27)
def test_the_database_holds_no_key_and_no_session(tmp_path: Path) -> None:
    url = url_of(tmp_path / "redraft.db")
    upgrade(url)
    database = Database(url)
    keys = Keys(database)
    secret = keys.create("ada", Access.CLIENT)
    session = KeyRing(keys).log_in(secret)
    assert session is not None and len({secret, session, keys.create("bob", Access.CLIENT)}) == 3
    database.close()
    contents = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"ada" in contents
    for each in (secret, session):
        assert each.encode() not in contents and each[5:].encode() not in contents


def test_what_was_known_stays_where_the_database_does_not_answer(tmp_path: Path) -> None:
    url = url_of(tmp_path / "redraft.db")
    upgrade(url)
    database = Database(url)
    ring, secret = KeyRing(keys := Keys(database)), keys.create("ada", Access.CLIENT)
    ring.refresh()
    database.close()
    ring.refresh()
    caller = ring.by_key(secret)
    assert caller is not None and caller.key == "ada"


# ----------------------------------------------------------------------------------------------------------- sessions


def log_in(http: httpx.Client, secret: str, **headers: str) -> httpx.Response:
    return http.post("/session", json={"key": secret}, headers=headers)


def cookie_of(answer: httpx.Response) -> dict[str, str]:
    return {"cookie": answer.headers["set-cookie"].partition(";")[0]}


@pytest.mark.parametrize(("who", "role"), [("client", "client"), ("operator", "operator"), ("own", "client")])
def test_a_session_is_worth_what_its_key_is(http: httpx.Client, place: Place, who: str, role: str) -> None:
    own = f"http://{http.base_url.netloc.decode()}"
    answer = log_in(http, place.secrets[who], origin=own)
    http.cookies.clear()
    assert answer.status_code == 204
    (morsel,) = SimpleCookie(answer.headers["set-cookie"]).values()
    assert morsel["httponly"] and morsel["samesite"] == "strict" and not morsel["secure"] and morsel["path"] == "/"
    assert morsel.value not in place.secrets.values()
    cookie = cookie_of(answer)
    name = CONFIGURED[Access.CLIENT] if who == "own" else who
    assert http.get("/session", headers=cookie).json() == {"role": role, "key": name, "asks_for_key": True}
    for others in ('g_state={"i_l":0}', "flag", "a=b c"):
        # Of other programs on this host.
        beside = {"cookie": f"{others}; {cookie['cookie']}"}
        assert http.get("/session", headers=beside).json()["role"] == role, others
    adapters = 200 if role == "operator" else 403
    assert http.get("/adapters", headers=cookie).status_code == adapters
    # What changes something needs the Origin that a browser sends with it; another port is another origin.
    train = {202, 409} if role == "operator" else {403}
    assert http.post("/train", headers=cookie).status_code == 401
    assert http.post("/train", headers=cookie | {"origin": own}).status_code in train
    for other in (EVIL, "http://127.0.0.1:1", "null"):
        assert http.post("/train", headers=cookie | {"origin": other}).status_code == 403, other
    assert http.delete("/session", headers=cookie | {"origin": own}).status_code == 204
    assert http.get("/adapters", headers=cookie).status_code == 401


def test_a_wrong_key_opens_no_session(http: httpx.Client) -> None:
    answer = log_in(http, "rd-nothing")
    assert answer.status_code == 401 and "set-cookie" not in answer.headers
    assert http.get("/session").json() == {"role": "public", "key": None, "asks_for_key": True}


def test_a_session_ends_with_its_key_and_after_twelve_hours(place: Place, http: httpx.Client) -> None:
    secret = place.keys.create("short", Access.OPERATOR)
    place.ring.refresh()
    cookies = [cookie_of(log_in(http, secret)) for _ in range(2)]
    http.cookies.clear()
    assert [http.get("/adapters", headers=cookie).status_code for cookie in cookies] == [200, 200]
    known = place.keys.known().sessions
    ends = {ends for _, _, ends in known}
    assert all(abs(each - datetime.now(UTC) - timedelta(hours=12)) < timedelta(minutes=5) for each in ends)
    place.keys.revoke("short")
    place.ring.refresh()
    assert [http.get("/adapters", headers=cookie).status_code for cookie in cookies] == [401, 401]
    cookie = cookie_of(log_in(http, place.secrets["operator"]))
    http.cookies.clear()
    assert http.get("/adapters", headers=cookie).status_code == 200
    past = update(page_sessions).values(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    place.database.write(lambda connection: connection.execute(past)).result(60)
    place.ring.refresh()
    assert http.get("/adapters", headers=cookie).status_code == 401
    # Ended sessions are removed with the next that opens.
    log_in(http, place.secrets["operator"])
    assert len(place.keys.known().sessions) == 1


def test_sessions_of_a_key_are_bounded_and_the_oldest_ends(place: Place) -> None:
    secret = place.keys.create("many", Access.CLIENT)
    place.ring.refresh()
    other = place.ring.log_in(place.secrets["operator"])
    opened = [place.ring.log_in(secret) for _ in range(MAX_SESSIONS + 2)]
    callers = [place.ring.by_session(session or "") for session in opened]
    assert callers[:2] == [None, None] and {caller and caller.key for caller in callers[2:]} == {"many"}
    assert place.ring.by_session(other or "") is not None, "another key has its own"
    place.keys.revoke("many")
    place.ring.refresh()


def test_a_session_ends_in_time_where_the_database_does_not_answer(tmp_path: Path) -> None:
    url = url_of(tmp_path / "redraft.db")
    upgrade(url)
    database = Database(url)
    secret = (keys := Keys(database)).create("ada", Access.CLIENT)
    session = (ring := KeyRing(keys)).log_in(secret)
    assert session is not None
    ends = datetime.now(UTC) + timedelta(seconds=2)
    database.write(lambda connection: connection.execute(update(page_sessions).values(expires_at=ends))).result(60)
    ring.refresh()
    database.close()
    assert ring.by_session(session) is not None
    time.sleep(max((ends - datetime.now(UTC)).total_seconds(), 0.0) + 0.01)
    ring.refresh()
    assert ring.by_session(session) is None
    assert ring.by_key(secret) is not None, "the key is known on"


# ------------------------------------------------------------------------------------------------------- rates, CORS


@pytest.mark.promise(26)
def test_a_key_that_sends_too_much_waits_and_others_do_not(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.server.rate_limit = "3/second"
    with place.server.served() as address, httpx.Client(base_url=address, timeout=60) as http:

        def ask(who: str) -> httpx.Response:
            return http.post("/generate", json={"prompt": "a"}, headers=bearer(place.secrets[who]))

        answers = [ask("client") for _ in range(5)]
        assert [each.status_code for each in answers[:3]] == [200] * 3
        refused = answers[-1]
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 2
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert ask("operator").status_code == 200
        assert http.get("/v1/models", headers=bearer(place.secrets["client"])).status_code == 200
        time.sleep(int(refused.headers["retry-after"]))
        assert ask("client").status_code == 200

        def count() -> httpx.Response:
            body = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}
            return http.post("/v1/messages/count_tokens", json=body, headers=bearer(place.secrets["client"]))

        counts = [count().status_code for _ in range(5)]
        assert counts[:3] == [200] * 3 and counts[-1] == 429, "by themselves: clients count before they ask"
    assert place.server.value('redraft:requests_refused_total{code="rate_limit_exceeded"}') >= 1
    place.database.close()


def test_without_keys_an_address_has_one_rate_whatever_its_connections(tmp_path: Path) -> None:
    server = EchoServer(rate_limit="3/minute")
    with server.served() as address:
        # Each of these opens a connection, from another port.
        found = [httpx.post(f"{address}/generate", json={"prompt": "a"}, timeout=60).status_code for _ in range(4)]
    assert found == [200, 200, 200, 429]


def test_pages_of_named_origins_may_call(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.server.cors_origins = ["https://chat.example"]
    with place.server.served() as address, httpx.Client(base_url=address, timeout=60) as http:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        found = http.options("/generate", headers={"origin": "https://chat.example"} | asks)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert http.options("/generate", headers={"origin": EVIL} | asks).status_code == 403
        key = bearer(place.secrets["client"])
        body: dict[str, Any] = {"prompt": "a"}
        found = http.post("/generate", json=body, headers=key | {"origin": "https://chat.example"})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert http.post("/generate", json=body, headers=key | {"origin": EVIL}).status_code == 403
        # It has no use of our page's session.
        cookie = cookie_of(log_in(http, place.secrets["operator"]))
        http.cookies.clear()
        assert http.get("/adapters", headers=cookie | {"origin": "https://chat.example"}).status_code == 401
    place.database.close()


@pytest.mark.parametrize(
    "origin",
    [
        "app://obsidian.md", "tauri://localhost", "http://tauri.localhost", "vscode-webview://1q2w3e", "file://",
        "capacitor://localhost", "chrome-extension://abcdefghijkl", "moz-extension://0a1b-2c3d", "App://-",
    ],
)  # fmt: skip
def test_applications_with_a_scheme_of_their_own_may_call_with_a_key(
    http: httpx.Client, place: Place, origin: str
) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    page = {"origin": origin, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}
    found = http.options("/v1/chat/completions", headers=page | asks)
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, origin)
    assert found.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
    for headers in (bearer(place.secrets["client"]), {"x-api-key": place.secrets["client"]}):
        found = http.post("/generate", json={"prompt": "a"}, headers=page | headers)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, origin)
    # The application may read why it is refused.
    cookie = cookie_of(log_in(http, place.secrets["operator"]))
    http.cookies.clear()
    for headers in ({}, bearer("rd-nothing"), cookie):
        found = http.post("/generate", json={"prompt": "a"}, headers=page | headers)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (403, origin)


@pytest.mark.parametrize(
    "origin", ["null", "https://chat.example", "http://tauri.localhost.evil.example", "app:", "://a"]
)
def test_a_key_opens_nothing_to_pages_of_web_sites(http: httpx.Client, place: Place, origin: str) -> None:
    headers = bearer(place.secrets["client"]) | {"origin": origin}
    found = http.get("/v1/models", headers=headers)
    assert found.status_code == 403 and "access-control-allow-origin" not in found.headers
    asks = {"access-control-request-method": "GET"}
    assert http.options("/v1/models", headers={"origin": origin} | asks).status_code == 403


def test_origins_that_may_be_named() -> None:
    named = ["https://chat.example", "http://10.0.0.7:3000", "app://obsidian.md", "tauri://localhost", "file://"]
    assert load_settings(flags={"server.cors_origins": named}).server.cors_origins == named


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cors_origins", ["https://"]), ("cors_origins", ["null"]), ("cors_origins", ["app://a/b"]),
        ("cors_origins", ["*"]), ("cors_origins", ["https://a.example/path"]), ("cors_origins", ["a.example"]),
        ("rate_limit", "many"), ("api_key", "short"), ("api_key", "with a space in it, long"), ("ssl_certfile", "/cert.pem"),
    ],
)  # fmt: skip
def test_settings_that_would_not_do_what_they_seem_to_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadRequest, match="server"):
        load_settings(flags={f"server.{name}": value})


def test_a_thousand_checks_at_once(place: Place) -> None:
    """Looking a key up reads no row and blocks nobody."""
    reads = 0
    connect = place.database.backend.readers.connect

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal reads
        reads += 1
        return connect(*args, **named)

    lock = threading.Lock()
    found: list[object] = []

    def check() -> None:
        caller = place.ring.by_key(place.secrets["client"])
        with lock:
            found.append(caller)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as threads:
        patch.setattr(place.database.backend.readers, "connect", counted)
        for _ in range(1_000):
            threads.submit(check)
    assert len(found) == 1_000 and len(set(found)) == 1 and reads == 0
