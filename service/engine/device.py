"""The only place where the engine hands work to the device and where it waits for it.

Both are counted for whoever asks (`counting`): a steady round waits once.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Counts:
    """waits: times that Python waited for the device. launches: times that work was handed over without waiting."""

    waits: int = 0
    launches: int = 0


_counts: ContextVar[Counts | None] = ContextVar("counts", default=None)


@contextmanager
def counting() -> Generator[Counts]:
    """Count what this thread hands over and waits for."""
    counts = Counts()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def launch(*arrays: object) -> None:
    """Hand arrays (or trees of them) to the device and go on. Raises what MLX refuses to run."""
    if (counts := _counts.get()) is not None:
        counts.launches += 1
    mx.async_eval(*arrays)


def wait(*arrays: object) -> None:
    """Wait until arrays (or trees of them) are computed. Raises what went wrong in computing them."""
    if (counts := _counts.get()) is not None:
        counts.waits += 1
    mx.eval(*arrays)


def read(*arrays: mx.array) -> list[NDArray[Any]]:
    """Wait for arrays once and copy them to the host. Types that NumPy lacks, such as bfloat16, are refused with a
    TypeError or RuntimeError of its own."""
    wait(*arrays)
    return [np.array(array) for array in arrays]
