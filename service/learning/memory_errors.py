"""Which errors say that memory ran out."""

from __future__ import annotations

import re

_MEMORY = re.compile(
    r"unable to allocate|attempting to allocate|insufficient memory|out ?of ?memory|bad_alloc", re.IGNORECASE
)
"""In the errors of MLX's back ends when an allocation fails: they are plain RuntimeErrors."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: Python's, NumPy's, or one of MLX."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error))))
