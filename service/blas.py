"""A fast BLAS under MLX's Linux CPU back end.

PyPI's `mlx-cpu` bundles netlib's reference BLAS, about 25-75 times slower on float32 products than OpenBLAS. Symbols that
are loaded globally before libmlx win its lookups, so loading OpenBLAS first is enough; MLX itself is untouched.

The OpenBLAS wheel (cmeel-openblas) needs the Fortran runtime under its plain name, which a machine without a Fortran
compiler does not have. `mlx-cpu` carries that very runtime under a name with a hash in it; we hand the loader a copy in
memory that answers to the plain name.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_RUNTIME = b"libgfortran.so.5"


def load_fast_blas() -> str | None:
    """Load OpenBLAS with global symbols and return its path; None where it is absent, unusable, or not wanted.

    REDRAFT_BLAS=shipped leaves MLX as it comes (what `redraft doctor` compares with).
    """
    if sys.platform != "linux" or os.environ.get("REDRAFT_BLAS") == "shipped" or "mlx.core" in sys.modules:
        return None
    try:
        library = Path(str(distribution("cmeel-openblas").locate_file("cmeel.prefix/lib/libopenblas.so.0")))
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if _RUNTIME.decode() not in str(error):
                return None
            _load_bundled_fortran_runtime()
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (PackageNotFoundError, OSError):
        return None
    return str(library)


def set_blas_threads(library: str | None, count: int) -> None:
    """Let the BLAS that `load_fast_blas` named use so many threads from now on. Nothing without one."""
    if library is not None:
        ctypes.CDLL(library).openblas_set_num_threads(max(count, 1))


def _load_bundled_fortran_runtime() -> None:
    """Load mlx-cpu's libgfortran under its plain name. Raises OSError or PackageNotFoundError when there is none."""
    bundle = Path(str(distribution("mlx-cpu").locate_file("mlx_cpu.libs")))
    for quadmath in bundle.glob("libquadmath-*.so*"):
        ctypes.CDLL(str(quadmath), mode=ctypes.RTLD_GLOBAL)
    for runtime in bundle.glob("libgfortran-*.so*"):
        image = runtime.read_bytes()
        # The name in the dynamic string table, cut short in place: offsets do not move.
        own = re.escape(runtime.name.encode())
        image = re.sub(own + b"\0", _RUNTIME.ljust(len(runtime.name), b"\0") + b"\0", image)
        descriptor = os.memfd_create(_RUNTIME.decode())
        with os.fdopen(descriptor, "wb") as file:
            file.write(image)
            file.flush()
            ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
        return
    raise OSError("mlx-cpu carries no Fortran runtime")
