"""A real nginx in front of a server (Debian's package nginx-light)."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def nginx(folder: Path, upstream: str, ways: Mapping[str, str]) -> Generator[dict[str, str]]:
    """Runs nginx. ways: name -> directives beside `proxy_pass upstream`. Yields the address of each way."""
    assert NGINX is not None
    ports = {name: free_port() for name in ways}
    places = "".join(f"{name}_temp_path {folder / name};\n" for name in TEMPORARY)
    servers = "".join(
        f"server {{ listen 127.0.0.1:{ports[name]}; location / {{ proxy_pass {upstream}; {directives} }} }}\n"
        for name, directives in ways.items()
    )
    folder.mkdir()
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\nmaster_process off;\npid {folder / 'pid'};\nevents {{}}\n"
        f"http {{\naccess_log off;\n{places}{servers}}}\n"
    )
    command = [NGINX, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        for port in ports.values():
            until(lambda port=port: process.poll() is not None or answers(port))
        assert process.poll() is None, (folder / "output").read_text() + (folder / "error.log").read_text()
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
