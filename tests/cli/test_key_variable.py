"""The key in the environment: one name for the server that asks for it and for the commands that send it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.core import Access
from service.settings import Settings
from service.store.access.key_ring import KeyRing
from service.store.access.keys import Keys
from service.store.database import Database
from tests.support.command_line import Redraft, cells, one_sentence
from tests.support.databases import SqliteFiles

NAME, FORMER = "REDRAFT_API_KEY", "REDRAFT_SERVER__API_KEY"
KEY, OTHER = "rd-a-key-of-the-environment", "rd-another-key-of-somebody"


@pytest.mark.usefixtures("restored_process")
@pytest.mark.parametrize(
    ("variables", "flags", "expected", "notes"),
    [
        ({}, (), None, 0),
        ({NAME: ""}, (), None, 0),
        ({NAME: KEY}, (), KEY, 1),
        ({FORMER: KEY}, (), KEY, 1),
        ({NAME: KEY, FORMER: OTHER}, (), KEY, 2),
        ({NAME: OTHER}, ("--api-key", KEY), KEY, 1),
    ],
)
def test_the_server_asks_for_the_key_of_the_environment(
    variables: dict[str, str],
    flags: tuple[str, ...],
    expected: str | None,
    notes: int,
    tmp_path: Path,
    redraft: Redraft,
    settings_served: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = redraft("serve", *flags)
    assert (done.status, done.out) == (0, "")
    key = settings_served[0].server.api_key
    assert (None if key is None else key.get_secret_value()) == expected
    said = [line for line in done.err.splitlines() if NAME in line]
    assert len(said) == notes and KEY not in done.err and OTHER not in done.err
    assert (f"{FORMER} is {NAME} now" in done.err) is (FORMER in variables)


def test_a_key_that_is_too_short_is_one_sentence(redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "short")
    done = redraft("serve")
    one_sentence(done)
    assert "server.api_key" in done.err and "16 to 512" in done.err and "short" not in done.err


def test_where_the_key_is_from_is_shown_and_not_the_key(redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((FORMER, OTHER), (NAME, KEY)):
        monkeypatch.setenv(name, value)
        done = redraft("config", "show", "server.api_key")
        ((shown, hidden, origin),) = cells(done.out)
        assert (shown, set(hidden), origin) == ("server.api_key", {"*"}, "environment")


def test_a_key_of_the_database_keeps_its_role(sqlite_files: SqliteFiles, tmp_path: Path) -> None:
    """An operator's own, in the environment for the commands, when a server is started there."""
    database = Database(sqlite_files.empty(tmp_path))
    try:
        keys = Keys(database)
        operator, client = keys.create("me", Access.OPERATOR), keys.create("ada", Access.CLIENT)
        for secret, access in ((operator, Access.OPERATOR), (client, Access.CLIENT)):
            caller = KeyRing(keys, {Access.CLIENT: secret}).by_key(secret)
            assert caller is not None and caller.access is access
    finally:
        database.close()
