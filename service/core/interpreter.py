"""How this package starts another Python."""

from __future__ import annotations

import sys


def python_command(*words: str) -> list[str]:
    """The command line of this interpreter with `words`, which are `-m` and a module, or `-c` and code, and their arguments.

    With `-P`, Python keeps the working folder off `sys.path`: `-m service...` started where somebody's own `service/` lies
    would import that one. (The variable PYTHONSAFEPATH does the same, but would reach programs that are not ours.)
    """
    return [sys.executable, "-P", *words]
