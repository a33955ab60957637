"""The only place where the engine hands work to the device and where it waits for it.

Both are counted for whoever asks (`counting`): a steady round waits once.
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
    """waits: times that Python waited for the device. launches: times that work was handed over without waiting."""

    waits: int = 0
    launches: int = 0


CACHE_BYTES, CACHE_SHARE = 4 * 2**30, 1 / 16
"""Freed memory that MLX may hold for reuse: so much, or this share of the machine's memory where that is less. A round reuses
a few hundred MiB; key and value buffers that have been outgrown fit nothing again."""
CUDA_SHARE = 1 / 8
"""Of a CUDA device's own memory it may hold so much where that is more: there the buffers of every size of batch come again,
and memory that was given back takes tens to hundreds of milliseconds to get again (docs/results/accelerator.md)."""

_AS_THEY_ARE: dict[mx.Dtype, type[np.generic]] = {mx.uint32: np.uint32, mx.float32: np.float32}
"""Types whose 32 bits are copied as they are."""

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


def cache_limit(total: int | None = None) -> int:
    """Bytes of freed memory that MLX may hold on a machine of `total` bytes; None: this one."""
    own = 0 if total is not None else int(mx.device_info().get("total_memory", 0))
    return max(min(CACHE_BYTES, int((total or total_bytes()) * CACHE_SHARE)), int(own * CUDA_SHARE))


def limit_cache(size: int | None = None) -> None:
    """Bound what MLX holds of freed memory to `size` bytes; None: `cache_limit`. Unbounded, it is all of the device's memory
    but a part, and another process on it, such as the one that trains, finds none: MLX's allocator does not free its cache for
    others (mlx/backend/cuda/allocator.cpp)."""
    mx.set_cache_limit(cache_limit() if size is None else size)


def limit_memory(count: int) -> None:
    """Have MLX wait for the device before it launches more, once this process holds so many bytes. Launched ahead without a
    limit, a training step on an H200 took up to six times what its operations need one after another."""
    mx.set_memory_limit(count)


def release_cache() -> None:
    """Give back what MLX holds of freed memory."""
    mx.clear_cache()


def free_bytes() -> int:
    """Bytes that can be allocated, once what MLX holds of freed memory is given back, which this does."""
    release_cache()
    return device_free_bytes()


def wire_memory() -> None:
    """Let macOS keep as much of what MLX uses in memory as it recommends, as mlx_lm.server does. Elsewhere nothing."""
    maybe_set_recommended_wired_limit()


def memory() -> Memory:
    """What MLX has allocated in this process. From any thread."""
    return Memory(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())


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


def pack(arrays: Sequence[mx.array]) -> mx.array:
    """Arrays that the host reads together, as one (n,), int32: on CUDA every array that it reads is a copy of its own, which
    takes 0.1 ms. Integers come as 32 bits."""
    words = [array.view(mx.int32) if array.dtype in _AS_THEY_ARE else array.astype(mx.int32) for array in arrays]
    return mx.concatenate([each.reshape(-1) for each in words])


def read_packed(packed: mx.array, arrays: Sequence[mx.array]) -> list[NDArray[Any]]:
    """Wait once for what `pack` made of these arrays, and copy them to the host."""
    (words,) = read(packed)
    ends = np.cumsum([prod(array.shape) for array in arrays])
    return [
        (part != 0 if array.dtype == mx.bool_ else part.view(_AS_THEY_ARE.get(array.dtype, np.int32))).reshape(
            array.shape
        )
        for part, array in zip(np.split(words, ends[:-1]), arrays, strict=True)
    ]


def read(*arrays: mx.array) -> list[NDArray[Any]]:
    """Wait for arrays once and copy them to the host. Types that NumPy lacks, such as bfloat16, are refused with a
    TypeError or RuntimeError of its own."""
    wait(*arrays)
    return [np.array(array) for array in arrays]
