"""What of the Hugging Face hub's API a download asks, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789" * 4


@contextmanager
def hub_of(repositories: Mapping[str, Mapping[str, bytes]]) -> Generator[tuple[str, list[str]]]:
    """The address of a hub with these repositories (name -> file -> content), each with one commit, and the files that were
    downloaded from it, as "repository/file"."""
    downloaded: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            words = self.path.partition("?")[0].strip("/").split("/")
            headers: dict[str, str] = {}
            content: bytes | None = None
            if words[:2] == ["api", "models"]:
                if (files := repositories.get("/".join(words[2:4]))) is not None:
                    tree = [{"type": "file", "path": n, "size": len(c), "oid": _etag(c)} for n, c in files.items()]
                    info = {"id": "/".join(words[2:4]), "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
                    content = json.dumps(tree if words[4] == "tree" else info).encode()
            elif words[2:4] == ["resolve", COMMIT]:
                name = "/".join(words[:2])
                content = repositories.get(name, {}).get(words[4])
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(content or b"")}"'}
                if self.command == "GET":
                    downloaded.append(f"{name}/{words[4]}")
            self.send_response(404 if content is None else 200)
            if content is None:
                content, headers = b"", {"X-Error-Code": "RepoNotFound"}
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloaded
    finally:
        server.shutdown()
        thread.join(10.0)
        server.server_close()


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
