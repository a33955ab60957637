"""Answers of a server as tests read them."""

from __future__ import annotations

import httpx


def events(text: str) -> list[tuple[str, str]]:
    """(kind, data) of every server-sent event; a comment has the kind ":"."""
    found: list[tuple[str, str]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            found.append((":", block))
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", "message"), fields["data"]))
    return found


def assert_refused(response: httpx.Response, status: int, code: str, field: str | None) -> None:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["code"], error["param"]) == (code, field)
    assert error["message"]
