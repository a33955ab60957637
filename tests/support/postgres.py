"""A private PostgreSQL for tests: a server in a temporary folder, from the binaries of a package such as Debian's."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from sqlalchemy import make_url

START_SECONDS = 60.0
# What would make it safe against a power cut only makes tests slower.
SETTINGS = (
    "fsync=off",
    "full_page_writes=off",
    "shared_buffers=32MB",
    "deadlock_timeout=100ms",
    "listen_addresses=127.0.0.1",
)
INITDB = ("initdb", "-D", "data", "-U", "redraft", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
GUARDED = "guarded"
"""The one user who needs a password."""
# When this process ends, however it ends, its line to the shell does: PostgreSQL and its folder go with it.
KEEPER = """
"$@" </dev/null & child=$!
read -r word
kill -QUIT $child 2>/dev/null
wait $child
[ "$word" = keep ] || rm -rf "$PWD"
"""


def missing() -> str | None:
    """Why there can be no server here; None: there can."""
    if _binaries() is None:
        return "no PostgreSQL here: install Debian's package postgresql, or put initdb and postgres on the PATH"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return "PostgreSQL does not run as root, and there is no user postgres"
    return None


class PostgresServer:
    """A server of its own, where `missing` finds nothing. As root it runs as the user postgres: it refuses root."""

    def __init__(self) -> None:
        binaries = _binaries()
        assert binaries is not None
        self._binaries = binaries
        self._user = "postgres" if os.geteuid() == 0 else None
        # Not pytest's folder, which no other user may enter. Short, for a socket's path has 107 characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="redraft-pg-", dir=_fast_folder()))
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count()
        done = subprocess.run(self._command(*INITDB), cwd=self.folder, capture_output=True, text=True, user=self._user)
        if done.returncode:
            shutil.rmtree(self.folder)
            raise RuntimeError(f"initdb failed: {done.stderr}")
        hba = self.folder / "data" / "pg_hba.conf"
        hba.write_text(f"host all {GUARDED} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")

    def start(self) -> None:
        """Returns when it answers."""
        settings = (*SETTINGS, f"unix_socket_directories={self.folder}", f"port={self.port}")
        command = self._command("postgres", "-D", "data", *(word for each in settings for word in ("-c", each)))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ("/bin/sh", "-c", KEEPER, "sh", *command),
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                user=self._user,
            )
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self.execute("SELECT 1")
                return
            except psycopg.OperationalError:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise
                time.sleep(0.02)

    def stop(self) -> None:
        """As a crash ends it: all connections break, and what was committed is there again after `start`."""
        if self._process is not None:
            self._process.communicate(b"keep\n")
            self._process = None

    @contextmanager
    def away(self) -> Generator[None]:
        """Stopped meanwhile."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def close(self) -> None:
        """Stop it and remove its folder."""
        self.stop()
        shutil.rmtree(self.folder)

    def url(self, database: str) -> str:
        """The URL of one of its databases, by the socket: half of TCP's time a statement."""
        return f"postgresql+psycopg://redraft@/{database}?host={self.folder}&port={self.port}"

    def tcp_url(self, url: str, *, user: str = "redraft", port: int | None = None) -> str:
        """The same database by TCP. port: of a line to the server."""
        return f"postgresql+psycopg://{user}@127.0.0.1:{port or self.port}/{make_url(url).database}"

    def execute(self, *statements: str, database: str = "postgres") -> None:
        """Run statements, each in a transaction of its own."""
        where = f"host={self.folder} port={self.port} user=redraft dbname={database}"
        with psycopg.connect(where, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def create(self, options: str = "") -> str:
        """The URL of a new database."""
        name = f"test_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0 {options}")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Remove a database, whoever is connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {make_url(url).database} WITH (FORCE)")

    def _command(self, name: str, *arguments: str) -> tuple[str, ...]:
        return (str(self._binaries / name), *arguments)


class Wire:
    """A TCP line to a server which breaks when `text` crosses it towards the server: after it was passed on
    (`delivered`), or before."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._text, self._delivered = b"", False
        self.breaks, self._closed = 0, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def break_at(self, text: bytes, *, delivered: bool) -> None:
        """Break the next connection on which this crosses, once."""
        self._delivered, self._text = delivered, text

    def close(self) -> None:
        """Take no further connection."""
        self._closed = True
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._closed:  # while it waited for one
                client.close()
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, watched: bool) -> None:
        with source, sink, suppress(OSError):
            while data := source.recv(65536):
                if watched and self._text and self._text in data:
                    self._text = b""
                    self.breaks += 1
                    # Nobody hears the answer: the way back is closed first.
                    source.shutdown(socket.SHUT_RDWR)
                    if self._delivered:
                        sink.sendall(data)
                        time.sleep(0.1)  # the server acts on it before it sees that the line is gone
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)


def _binaries() -> Path | None:
    """The folder of initdb and postgres, the newest version's; None where there are none."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda folder: int(folder.parent.name))
    return Path(initdb).resolve().parent if (initdb := shutil.which("initdb")) else None


def _fast_folder() -> str | None:
    """In memory where there is room for it: a database is a thousand files."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 2**31 else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
