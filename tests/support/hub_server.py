"""What of the Hugging Face hub's API an upload asks, over real HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """public: what is there is. repositories: what was made, as it was asked. files: name to content, of the last
    commit. commits: how many there were."""

    def __init__(self, refusal: int | None = None, *, public: bool = False) -> None:
        self.refusal, self.public = refusal, public
        self.repositories: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.commits = 0

    @contextmanager
    def served(self) -> Generator[str]:
        """Its address."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"siblings": [], "sha": "0" * 40, "id": "me/it", "private": not hub.public})

            def do_POST(self) -> None:
                body = self.read_body()
                if hub.refusal is not None:
                    return self.answer({"error": "no"}, hub.refusal)
                if self.path == "/api/repos/create":
                    hub.repositories.append(json.loads(body))
                    return self.answer({"url": f"{address}/me/it"})
                if "/preupload/" in self.path:
                    files = [
                        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in json.loads(body)["files"]
                    ]
                    return self.answer({"files": files})
                if self.path == "/api/validate-yaml":
                    return self.answer({"errors": [], "warnings": []})
                hub.commits += 1
                for line in body.decode().splitlines():
                    item = json.loads(line)
                    if item["key"] == "file":
                        hub.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                return self.answer({"commitUrl": f"{address}/me/it/commit/{'1' * 40}", "commitOid": "1" * 40})

            def read_body(self) -> bytes:
                if self.headers["transfer-encoding"] != "chunked":
                    return self.rfile.read(int(self.headers["content-length"]))
                found = b""
                while size := int(self.rfile.readline(), 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return found

            def answer(self, body: dict[str, Any], status: int = 200) -> None:
                sent = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
