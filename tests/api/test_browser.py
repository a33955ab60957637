"""A page of another origin in a real browser tries every way to send requests to the server; all are refused."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.echo_engine import EchoServer

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

PAGE = """<form id=urlencoded action="http://127.0.0.1:%(port)s/adapters/rollback" method=post target=a><input name=x></form>
<form id=multipart action="http://localhost:%(port)s/train" method=post enctype="multipart/form-data" target=b></form>
<form id=plain action="http://127.0.0.1:%(port)s/adapters/2/activate" method=post enctype="text/plain" target=c></form>
<iframe name=a></iframe><iframe name=b></iframe><iframe name=c></iframe>
<iframe sandbox="allow-scripts" srcdoc="<script>
  fetch('http://127.0.0.1:%(port)s/train', {method: 'POST', mode: 'no-cors'})
</script>"></iframe>
<img src="http://127.0.0.1:%(port)s/metrics">
<script>(async () => {
  const post = (url, asked) => fetch(url, {method: 'POST', ...asked}).catch(() => {});
  await post('http://127.0.0.1:%(port)s/train', {mode: 'no-cors'});
  await post('http://127.0.0.1:%(port)s/generate', {mode: 'no-cors', body: '{"prompt": "a"}'});
  await post('http://127.0.0.1:%(port)s/generate', {headers: {'content-type': 'application/json'}, body: '{"prompt": "a"}'});
  await post('http://rebound.test:%(port)s/train', {mode: 'no-cors'});
  await fetch('http://127.0.0.1:%(port)s/adapters').catch(() => {});
  navigator.sendBeacon('http://127.0.0.1:%(port)s/train', '');
  urlencoded.submit(); multipart.submit(); plain.submit();
})()</script>"""


@contextmanager
def page(text: str) -> Generator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class RecordingServer(EchoServer):
    """Records every request's method, path and status."""

    @property
    def app(self) -> ASGIApp:  # pyright: ignore[reportIncompatibleMethodOverride]
        inner = super().app
        self.seen: set[tuple[str, str, int]] = set()

        async def recording(scope: Scope, receive: Receive, send: Send) -> None:
            async def record(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self.seen.add((scope["method"], scope["path"], message["status"]))
                await send(message)

            await inner(scope, receive, record)

        return recording


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_a_page_of_another_origin_reaches_nothing(tmp_path: Path) -> None:
    server = RecordingServer()
    with server.served() as address, page(PAGE % {"port": urlsplit(address).port}) as url:
        command = [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            "--host-resolver-rules=MAP rebound.test 127.0.0.1",
            f"--user-data-dir={tmp_path}",
            *("--virtual-time-budget=15000", "--dump-dom", url),
        ]
        subprocess.run(command, capture_output=True, timeout=120, check=True)
    posts = ("/train", "/generate", "/adapters/rollback", "/adapters/2/activate")
    assert server.seen >= {("POST", path, 403) for path in posts} | {
        ("GET", "/adapters", 403),
        ("OPTIONS", "/generate", 403),
    }
    assert {status for _, _, status in server.seen} == {403}
    assert (server.operator.known_runs, len(server.operator.known), server.engine.tickets) == ([], 2, [])
