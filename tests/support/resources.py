"""What a server's process holds of its machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CONNECTIONS = 16
"""To the database at most (store/backends/sqlite.py): the pool opens one more whenever threads meet, and keeps eight."""
ALIKE = 2
"""Files, or threads, that one reading may have more than another: pools of threads end those that were idle for a while."""


@dataclass(frozen=True, slots=True)
class Resources:
    """memory: resident, in bytes. files: open ones, sockets included, without the database's. connections: to the database."""

    memory: int
    files: int
    threads: int
    connections: int

    @classmethod
    def of(cls, process: psutil.Process) -> Resources:
        """As they are now."""
        paths = [Path(file.path) for file in process.open_files()]
        database = [path for path in paths if path.name.startswith("redraft.db")]
        return cls(
            process.memory_info().rss,
            process.num_fds() - len(database),
            process.num_threads(),
            sum(path.name == "redraft.db" for path in database),
        )

    def check_alike(self, other: Resources) -> None:
        """Fail where files or threads are others, or connections too many."""
        assert abs(self.files - other.files) <= ALIKE, (self, other)
        assert abs(self.threads - other.threads) <= ALIKE, (self, other)
        assert max(self.connections, other.connections) <= CONNECTIONS, (self, other)
