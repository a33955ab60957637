"""Several real servers and a trainer on one PostgreSQL database, on tiny pairs, with one folder of adapters."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.core import python_command
from service.evaluation.server_process import LocalServer
from tests.support.postgres import PostgresServer
from tests.support.tiny_server import generate, prompts, settings_of, write_pair
from tests.support.waiting import until

TRAINING = {"enabled": False, "epochs": 1, "cooldown_seconds": 0.0}


class FleetServer(LocalServer):
    """A server of the fleet. environment: added to its process's."""

    def __init__(
        self, folder: Path, tree: Mapping[str, Mapping[str, object]], home: Path, url: str, adapters: Path
    ) -> None:
        super().__init__(folder, tree, home, url)
        self.config.write_text(self.config.read_text().replace(str(folder / "adapters"), str(adapters)))

    @property
    def serving(self) -> int:
        """The adapter that its engine drafts with, whatever the rows say."""
        lines = self.request("GET", "/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith("redraft:adapter_info{"))
        return int(line.split('adapter="')[1].split('"')[0])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """As kill -9 ends it."""
        os.kill(self.pid, signal.SIGKILL)
        super().stop()


class TrainerProcess:
    """`redraft trainer` with the settings of a server."""

    def __init__(self, config: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.config, self.log = folder / "trainer.toml", folder / "trainer.log"
        self.config.write_text(config.read_text())
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it trains."""
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                python_command("-m", "service.cli", "trainer", "--config", str(self.config)), stdout=log, stderr=log
            )
        until(lambda: "redraft trains" in self.log.read_text()[before:], self.log.read_text)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        if self._process is None:
            return None
        if self._process.poll() is None:
            self.send(number)
        return self._process.wait(60.0)


class Fleet:
    """servers: `count` of them, not started. training: settings of all; those with `idle` leave runs to others."""

    def __init__(self, root: Path, url: str, count: int, *, idle: bool = False, **training: object) -> None:
        self.pair = write_pair(root)
        self.url, self.adapters = url, root / "adapters"
        tree = settings_of(self.pair, training=TRAINING | training | ({"run_here": False} if idle else {}))
        self.servers = [
            FleetServer(root / f"server-{i}", tree, root / "home", url, self.adapters) for i in range(count)
        ]
        self.trainer = TrainerProcess(self.servers[0].config, root / "trainer")
        text = self.trainer.config.read_text()
        self.trainer.config.write_text(text.replace("run_here = false", "run_here = true"))

    def start(self) -> None:
        """All servers at once."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            for started in [pool.submit(server.start) for server in self.servers]:
                started.result()

    def stop(self) -> None:
        self.trainer.stop()
        for server in self.servers:
            server.stop()

    def traffic(self, count: int = 20, seed: int = 0) -> None:
        """Requests to all servers in turn."""
        for i, line in enumerate(prompts(count, seed)):
            generate(self.servers[i % len(self.servers)], line.prompt)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Pooler:
    """PgBouncer in transaction mode in front of a server. Skips the test where there is none."""

    def __init__(self, server: PostgresServer) -> None:
        found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if found is None:
            pytest.skip("no PgBouncer here: install Debian's package pgbouncer")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        config = server.folder / "pgbouncer.ini"
        config.write_text(
            f"""[databases]
* = host={server.folder} port={server.port} user=redraft
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
auth_type = any
pool_mode = transaction
default_pool_size = 10
max_client_conn = 500
unix_socket_dir =
"""
        )
        command = [found, "-q", *(["-u", "postgres"] if os.geteuid() == 0 else []), str(config)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
