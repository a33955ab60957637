"""A whole server behind a real nginx: every route, by the way that a request takes and what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from service.api.access import ROUTES
from service.cli.root import app
from tests.support.nginx import NGINX, nginx
from tests.support.tiny_server import generate, in_process_server, write_pair
from tests.support.waiting import until

ACCESS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
FORWARDING = (
    "proxy_set_header Host $host; proxy_set_header X-Real-IP $remote_addr; proxy_set_header X-Forwarded-Proto $scheme; "
    "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;"
)
BODIES = {
    ("POST", "/generate"): {"prompt": "a", "max_tokens": 2},
    ("POST", "/v1/chat/completions"): {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    ("POST", "/v1/completions"): {"prompt": "a", "max_tokens": 2},
    ("POST", "/v1/responses"): {"input": "a", "max_output_tokens": 2},
    ("POST", "/v1/messages"): {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    ("POST", "/v1/messages/count_tokens"): {"messages": [{"role": "user", "content": "a"}]},
    ("DELETE", "/generations"): {"client": "nobody"},
    ("PUT", "/practice"): {"on": False},
    ("POST", "/session"): {"key": "rd-nothing"},
}
NAMED = {"model": "alias"}
"""In the bodies of the routes of others."""


def codes(address: str, headers: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """The status of every route."""
    found: dict[tuple[str, str], int] = {}
    with httpx.Client(base_url=address, headers=headers, timeout=60, trust_env=False) as http:
        for method, path in ROUTES:
            body = BODIES.get((method, path))
            sent = body if body is None or "/v1" not in path else body | NAMED
            shown = path.replace("{id:path}", "alias").replace("{id}", "999").replace("{name}", "page.js")
            # GET /events never ends.
            with http.stream(method, shown, json=sent) as answer:
                found[method, path] = answer.status_code
                if answer.status_code == 403:
                    answer.read()
                    assert answer.json()["error"]["code"] == "forbidden"
            http.cookies.clear()
    return found


def documented() -> dict[str, list[str]]:
    """The table of docs/operations.md: who -> a cell for each way."""
    lines = ACCESS.read_text(encoding="utf-8").partition("| without keys, routes of |")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {row[0].partition(":")[0]: row[1:] for row in rows}


@pytest.mark.nightly
@pytest.mark.skipif(NGINX is None, reason="no nginx on this machine (Debian: apt install nginx-light)")
def test_every_route_directly_and_through_nginx(tmp_path: Path) -> None:
    server = in_process_server(tmp_path, write_pair(tmp_path), server={"model_aliases": ["alias"]})
    server.start()
    try:
        generate(server, "a text that is recorded")
        until(lambda: httpx.get(f"{server.url}/cases", headers=server.owned).json()["cases"] != [])
        with nginx(tmp_path / "nginx", server.url, {"default": "", "forwarding": FORWARDING}) as ways:
            token = server.owned
            columns = {
                "direct": codes(server.url, {}),
                "direct, token": codes(server.url, token),
                "default": codes(ways["default"], {}),
                "default, token": codes(ways["default"], token),
                "forwarding": codes(ways["forwarding"], {}),
                "forwarding, token": codes(ways["forwarding"], token),
            }
            refused = httpx.get(f"{ways['forwarding']}/generate", trust_env=False).json()["error"]
            assert "make a key first" in refused["message"] and refused["param"].startswith("x-")
            words = ["keys", "create", "me", "--role", "operator", "--config", str(server.config)]
            key = {"authorization": f"Bearer {CliRunner().invoke(app, words).stdout.strip()}"}
            until(lambda: httpx.get(f"{server.url}/adapters").status_code == 401)
            addresses = [server.url, *ways.values()]
            keyed = [codes(address, key) for address in addresses]
            without = [codes(address, token) for address in addresses]
            assert keyed[0] == keyed[1] == keyed[2] and without[0] == without[1] == without[2]
            columns |= {"operator's key": keyed[0], "keys, but the token": without[0]}
    finally:
        server.stop()
    print("| route |", " | ".join(columns), "|")
    for method, path in ROUTES:
        print(f"| {method} {path} |", " | ".join(str(column[method, path]) for column in columns.values()), "|")
    cells = documented()
    assert cells.keys() == {access.role for access in ROUTES.values()}
    for (method, path), access in ROUTES.items():
        found = [column[method, path] for column in columns.values()]
        # A log-in with a key that opens nothing is refused by the route itself.
        shown = ["open" if code not in {401, 403} or path == "/session" else str(code) for code in found]
        assert shown == cells[access.role], (method, path)
