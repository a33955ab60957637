"""Custom CUDA kernels for compute capability 8.0 and later. `mx.fast.cuda_kernel` compiles their bodies on first call."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx

_FOLDER = Path(__file__).parent
_SHARED = {"sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_110": 227}
"""KiB of shared memory available to a block, by architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability")."""
_SHARED_ELSEWHERE = 99


def shared_memory() -> int:
    """Bytes of shared memory available to a block on MLX's device."""
    return 1024 * _SHARED.get(str(mx.device_info().get("architecture")), _SHARED_ELSEWHERE)


def cuda_kernel(
    file: str, inputs: Sequence[str], outputs: Sequence[str], *, shared: int = 0, strided: bool = False, **defines: int
) -> Any:
    """The kernel in `file`.cu. inputs, outputs: names of its arrays. shared: bytes of dynamic shared memory. strided: it reads
    inputs in any layout; otherwise non-contiguous inputs are copied. defines: macros."""
    source = (_FOLDER / f"{file}.cu").read_text()
    header = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    header += (_FOLDER / "fragments.cuh").read_text()
    # MLX finds compiled kernels by name only (mlx/backend/cuda/jit_module.cpp, `read_cached_ptx`).
    digest = sha256((header + source).encode()).hexdigest()[:16]
    return mx.fast.cuda_kernel(
        name=f"{file}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header,
        ensure_row_contiguous=not strided,
        shared_memory=shared,
    )
