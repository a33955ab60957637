"""CUDA's memory pool, from which MLX allocates (mlx/backend/cuda/allocator.cpp, `cudaMallocAsync`).

What MLX frees goes back to the pool, and at the next wait from there to the system, unless the pool may keep it: mapping memory
again takes the host tens to hundreds of milliseconds (docs/measurements.md). MLX has no setting for it; the driver's library has.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import mlx.core as mx

log = logging.getLogger(__name__)

_RELEASE_THRESHOLD, _RESERVED = 4, 5
"""CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT (CUDA Driver API, `CUmemPool_attribute`)."""
_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def keep(size: int) -> bool:
    """Let the pool of MLX's device keep `size` bytes, what is in use among them. False where there is no such pool."""
    if mx.default_device().type == mx.cpu or mx.metal.is_available():
        return False
    try:
        library = ctypes.CDLL(_LIBRARY)
        pool = ctypes.c_void_p()
        _check(library.cuDeviceGetDefaultMemPool(ctypes.byref(pool), _device(library)))
        value = ctypes.c_uint64(size)
        _check(library.cuMemPoolSetAttribute(pool, _RELEASE_THRESHOLD, ctypes.byref(value)))
    except (OSError, AttributeError, RuntimeError) as error:
        log.warning("CUDA's memory pool cannot be set, so that memory that was freed is slow to get again: %s", error)
        return False
    return True


def _device(library: ctypes.CDLL) -> ctypes.c_int:
    device = ctypes.c_int()
    _check(library.cuDeviceGet(ctypes.byref(device), 0))
    return device


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the driver answered {status}")
