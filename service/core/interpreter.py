"""The running Python: its installed packages, and the command line that starts it again."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str:
    """The version of an installed package, or a note that it is not installed if it has no metadata."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed, run from its source"


def python_command(*words: str) -> list[str]:
    """The command line of this interpreter with `words`: `-m` and a module, or `-c` and code, and their arguments.

    With `-P`, Python does not put the working folder on `sys.path`. Otherwise `-m service...`, started in a folder with an
    unrelated `service/`, would import that one. (PYTHONSAFEPATH does the same, but would also affect other programs.)
    """
    return [sys.executable, "-P", *words]
