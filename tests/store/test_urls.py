"""Which databases there may be, and what is shown of their URLs."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

from service.core import StoreError
from service.store.backends.backend import parsed, shown, sqlite_path
from service.store.database import Database, revision, upgrade

SECRET = "s3cr-t"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgresql_is_reached_through_psycopg_3(scheme: str) -> None:
    found = parsed(f"{scheme}://me:{SECRET}@db.example:5433/redraft?sslmode=require")
    assert found.render_as_string(hide_password=False) == (
        f"postgresql+psycopg://me:{SECRET}@db.example:5433/redraft?sslmode=require"
    )
    assert sqlite_path(f"{scheme}://me@db.example/redraft") is None


def test_sqlite_is_a_file() -> None:
    assert sqlite_path("sqlite:////there/redraft.db") == Path("/there/redraft.db")
    assert shown("sqlite:////there/redraft.db") == "/there/redraft.db"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"mysql://me:{SECRET}@db.example/redraft", "sqlite:// or postgresql://, not mysql://"),
        (f"postgresql+psycopg2://me:{SECRET}@db.example/redraft", r"not postgresql\+psycopg2://"),
        (f"postgresql://me:x@{SECRET}@db.example/redraft", "as %40"),
        (f"postgresql://me:{SECRET}@db.example:port/redraft", "is not one"),
        (f"no URL {SECRET}", "is not one"),
        ("sqlite://", "a file"),
    ],
)
def test_other_urls_are_refused_without_their_passwords(url: str, message: str) -> None:
    for use in (shown, revision, upgrade, Database):
        with pytest.raises(StoreError, match=message) as refused:
            use(url)
        assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_passwords_are_not_shown() -> None:
    url = f"postgres://me:{SECRET}@db.example/redraft?sslmode=require&sslpassword={SECRET}&password={SECRET}"
    assert shown(url) == "postgresql+psycopg://me:***@db.example/redraft?sslmode=require"


def test_a_missing_driver_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for use in (revision, upgrade, Database):
        with pytest.raises(StoreError, match=r"pip install 'redraft\[postgres\]'"):
            use("postgresql://me@db.example/redraft")
