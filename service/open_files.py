"""The process's limit of open files (RLIMIT_NOFILE).

Importing mlx-lm sets it: `mlx_lm.utils` calls `setrlimit(RLIMIT_NOFILE, (2048, 4096))`. That lowers a higher limit for good,
and raises ValueError where the hard limit is below 4,096. `keep_open_files_limit` prevents it, whichever module is imported
first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import resource
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

MAX_SOFT_LIMIT = 65_536
"""A server's soft limit is raised no further: some libraries close or poll every possible descriptor."""
_OPEN_MAX = 10_240
"""macOS's OPEN_MAX: older versions refuse a higher soft limit even where the hard limit is infinite."""
_SETS_LIMIT = "mlx_lm.utils"


@dataclass(frozen=True, slots=True)
class OpenFilesLimit:
    """Numbers of open files. hard: None without a limit."""

    soft: int | None
    hard: int | None


def open_files_limit() -> OpenFilesLimit:
    """This process's limit."""
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    return OpenFilesLimit(soft, hard)


def raise_open_files_limit() -> OpenFilesLimit:
    """Raise the soft limit to the hard limit, at most to MAX_SOFT_LIMIT, and return what applies now. Never lowers it."""
    for wanted in (MAX_SOFT_LIMIT, _OPEN_MAX):
        soft, hard = _limits()
        reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= reachable:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        except (ValueError, OSError):
            continue  # macOS: above kern.maxfilesperproc or OPEN_MAX.
        break
    return open_files_limit()


def keep_open_files_limit() -> None:
    """Let later imports of mlx-lm leave the limit as it is. Imports nothing itself."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module that sets the limit, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _SETS_LIMIT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_shielded(module: ModuleType) -> None:
            with _limit_fixed():
                run(module)

        spec.loader.exec_module = run_shielded
        return spec


@contextmanager
def _limit_fixed() -> Generator[None]:
    """Ignore this thread's attempts to set the limit. The import system runs a module once, so this is entered once."""
    setrlimit, thread = resource.setrlimit, threading.get_ident()

    def fixed(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE or threading.get_ident() != thread:
            setrlimit(kind, limits)

    resource.setrlimit = fixed
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
