"""The Python that runs: what is installed in it, and how another one is started."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str:
    """The version of an installed package; without its metadata, that it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed, run from its source"


def python_command(*words: str) -> list[str]:
    """The command line of this interpreter with `words`, which are `-m` and a module, or `-c` and code, and their arguments.

    With `-P`, Python keeps the working folder off `sys.path`: `-m service...` started where somebody's own `service/` lies
    would import that one. (The variable PYTHONSAFEPATH does the same, but would reach programs that are not ours.)
    """
    return [sys.executable, "-P", *words]
