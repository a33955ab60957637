"""Hands work to the device and waits for it. No other module of the engine does.

Launches and waits can be counted (`counting`): a steady round waits once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import maybe_set_recommended_wired_limit
from numpy.typing import NDArray

from service.core import Memory
from service.models.memory import device_free_bytes, total_bytes


@dataclass(slots=True)
class Counts:
    """waits: how often Python waited for the device. launches: how often work was handed over without waiting."""

    waits: int = 0
    launches: int = 0


CACHE_BYTES, CACHE_SHARE = 4 * 2**30, 1 / 16
"""Limit for freed memory that MLX keeps for reuse: CACHE_BYTES, or this share of the machine's memory if that is less. A round
reuses a few hundred MiB. Outgrown key and value buffers never fit again."""
CUDA_SHARE = 1 / 8
"""On CUDA the limit is this share of the device's memory, if that is more. There, buffers for every batch size recur, and
allocating released memory again takes tens to hundreds of milliseconds (docs/results/accelerator.md)."""

_AS_THEY_ARE: dict[mx.Dtype, type[np.generic]] = {mx.uint32: np.uint32, mx.float32: np.float32}
"""Types whose 32 bits are copied unchanged."""

_counts: ContextVar[Counts | None] = ContextVar("counts", default=None)


@contextmanager
def counting() -> Generator[Counts]:
    """Count the launches and waits of this thread."""
    counts = Counts()
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def cache_limit(total: int | None = None) -> int:
    """Bytes of freed memory that MLX may keep on a machine with `total` bytes; None: this machine."""
    own = 0 if total is not None else int(mx.device_info().get("total_memory", 0))
    return max(min(CACHE_BYTES, int((total or total_bytes()) * CACHE_SHARE)), int(own * CUDA_SHARE))


def limit_cache(size: int | None = None) -> None:
    """Limit the freed memory that MLX keeps to `size` bytes; None: `cache_limit`. Without a limit MLX keeps nearly all of the
    device's memory, and another process on it, such as a training run, finds none: MLX's allocator does not free its cache for
    others (mlx/backend/cuda/allocator.cpp)."""
    mx.set_cache_limit(cache_limit() if size is None else size)


def limit_memory(count: int) -> None:
    """Make MLX wait for the device before launching more once this process holds `count` bytes. Without a limit, a training
    step on an H200 took up to six times the memory that its operations need one after another."""
    mx.set_memory_limit(count)


def release_cache() -> None:
    """Release the freed memory that MLX keeps."""
    mx.clear_cache()


def free_bytes() -> int:
    """Bytes that can be allocated after releasing the freed memory that MLX keeps, which this function does."""
    release_cache()
    return device_free_bytes()


def wire_memory() -> None:
    """Let macOS wire as much of MLX's memory as it recommends, as mlx_lm.server does. Does nothing elsewhere."""
    maybe_set_recommended_wired_limit()


def memory() -> Memory:
    """What MLX has allocated in this process. May be called from any thread."""
    return Memory(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())


def launch(*arrays: object) -> None:
    """Hand arrays (or trees of them) to the device without waiting. Raises MLX's errors at launch."""
    if (counts := _counts.get()) is not None:
        counts.launches += 1
    mx.async_eval(*arrays)


def wait(*arrays: object) -> None:
    """Wait until arrays (or trees of them) are computed. Raises errors of the computation."""
    if (counts := _counts.get()) is not None:
        counts.waits += 1
    mx.eval(*arrays)


def pack(arrays: Sequence[mx.array]) -> mx.array:
    """Arrays that the host reads together, packed into one (n,), int32. On CUDA each array that the host reads is a separate
    copy, which takes 0.1 ms. Integers are converted to 32 bits."""
    words = [array.view(mx.int32) if array.dtype in _AS_THEY_ARE else array.astype(mx.int32) for array in arrays]
    return mx.concatenate([each.reshape(-1) for each in words])


def read_packed(packed: mx.array, arrays: Sequence[mx.array]) -> list[NDArray[Any]]:
    """Wait once for the result of `pack` on these arrays, and copy them to the host."""
    (words,) = read(packed)
    ends = np.cumsum([prod(array.shape) for array in arrays])
    return [
        (part != 0 if array.dtype == mx.bool_ else part.view(_AS_THEY_ARE.get(array.dtype, np.int32))).reshape(
            array.shape
        )
        for part, array in zip(np.split(words, ends[:-1]), arrays, strict=True)
    ]


def read(*arrays: mx.array) -> list[NDArray[Any]]:
    """Wait for arrays once and copy them to the host. NumPy raises TypeError or RuntimeError for types it lacks, such as
    bfloat16."""
    wait(*arrays)
    return [np.array(array) for array in arrays]
