"""Who is told how well the draft guessed: with several keys that says something about what others asked."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from service.core import Access
from service.store.access.key_ring import KeyRing
from service.store.access.keys import Keys
from service.store.database import Database, upgrade
from tests.support.echo_engine import EchoServer
from tests.support.http_answers import events
from tests.support.store_rows import url_of

USER = [{"role": "user", "content": "abcdef"}]
BODIES: dict[str, dict[str, object]] = {
    "/generate": {"prompt": "abcdef", "return_tokens": True},
    "/v1/chat/completions": {"messages": USER, "n": 2},
    "/v1/completions": {"prompt": "abcdef"},
    "/v1/responses": {"input": "abcdef"},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}
COUNTS = {
    *("draft_n", "draft_n_accepted", "rounds", "drafted", "num_draft_tokens", "num_accepted_draft_tokens"),
    *("num_spec_steps", "mean_acceptance_length", "draft_acceptance_rate"),
}


@contextmanager
def served(folder: Path, *names: str, revoked: tuple[str, ...] = (), **more: Any) -> Generator[dict[str, httpx.Client]]:
    """Clients of a server with keys of these names; that of "operator" is one."""
    upgrade(url_of(folder / "redraft.db"))
    database = Database(url_of(folder / "redraft.db"))
    keys = Keys(database)
    secrets = {name: keys.create(name, Access.OPERATOR if name == "operator" else Access.CLIENT) for name in names}
    for name in revoked:
        keys.revoke(name)
    with EchoServer(keeper=KeyRing(keys), **more).served() as address, ExitStack() as opened:
        headers = {name: {"authorization": f"Bearer {secret}"} for name, secret in secrets.items()}
        yield {
            name: opened.enter_context(httpx.Client(base_url=address, headers=each, timeout=60))
            for name, each in headers.items()
        }
    database.close()


def counted(value: object) -> set[str]:
    """Names of counts of the draft that have a value, anywhere in an answer."""
    if isinstance(value, list):
        return set().union(*map(counted, value))
    if not isinstance(value, dict):
        return set()
    found = {name for name in COUNTS & value.keys() if value[name] is not None}
    return found.union(*map(counted, value.values()))


def told(http: httpx.Client) -> set[str]:
    """Counts of the draft in answers of every route, whole and streamed."""
    found: set[str] = set()
    for path, body in BODIES.items():
        whole = http.post(path, json={"model": "echo", **body})
        stream = http.post(path, json={"model": "echo", **body, "stream": True})
        assert (whole.status_code, stream.status_code) == (200, 200)
        own = counted(whole.json()) | counted([json.loads(data) for _, data in events(stream.text) if data[0] == "{"])
        assert not found or bool(own) == bool(found), path
        found |= own
        assert "predicted_n" in whole.text and "predicted_n" in stream.text
    return found


def test_with_several_keys_only_operators_are_told_how_well_the_draft_guessed(tmp_path: Path) -> None:
    with served(tmp_path, "ada", "bob", "operator") as clients:
        assert [told(clients[name]) for name in ("ada", "bob")] == [set(), set()]
        assert told(clients["operator"]) == COUNTS


def test_who_is_alone_is_told(tmp_path: Path) -> None:
    with served(tmp_path, "ada") as clients:
        assert told(clients["ada"]) == COUNTS


def test_the_draft_remembers_what_revoked_keys_asked(tmp_path: Path) -> None:
    with served(tmp_path, "ada", "bob", revoked=("bob",)) as clients:
        assert told(clients["ada"]) == set()


def test_a_setting_tells_clients_too(tmp_path: Path) -> None:
    with served(tmp_path, "ada", "bob", draft_counts=True) as clients:
        assert told(clients["ada"]) == COUNTS


def test_without_keys_everybody_is_told() -> None:
    with EchoServer().served() as address, httpx.Client(base_url=address, timeout=60) as http:
        assert told(http) == COUNTS
