"""Recognises errors that mean out of memory."""

from __future__ import annotations

import re

_MEMORY = re.compile(
    r"unable to allocate|attempting to allocate|insufficient memory|out ?of ?memory|bad_alloc", re.IGNORECASE
)
"""Messages of MLX's back ends when an allocation fails; they are plain RuntimeErrors."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed in Python, NumPy or MLX."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_MEMORY.search(str(error))))
