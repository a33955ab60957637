"""What a benchmark ran on, as it stands in its JSON."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from service.models.machine import examine

_PASSING = {"disk_free", "memory_free", "needed", "problems"}


@cache
def machine(home: Path, models: tuple[Path, ...]) -> dict[str, Any]:
    """`redraft doctor` without what is different a minute later and without folders of this machine. Takes some seconds
    (two child processes), once."""
    found = examine(home, models)
    lasting = {name: value for name, value in asdict(found).items() if name not in _PASSING}
    return lasting | {"blas": Path(found.blas).name if found.blas else None}
