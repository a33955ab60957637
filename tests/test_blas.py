"""The fast BLAS: NumPy's OpenBLAS under its plain names."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from service import FAST_BLAS
from service.blas import with_plain_names

LINUX = pytest.mark.skipif(
    sys.platform != "linux" or os.environ.get("REDRAFT_BLAS") == "shipped" or find_spec("scipy_openblas32") is None,
    reason="needs scipy-openblas32 on Linux",
)


@LINUX
def test_mlx_finds_the_fast_blas_under_every_plain_name() -> None:
    assert FAST_BLAS is not None
    names = set(re.findall(rb"\0scipy_(cblas_[a-z0-9_]+|[sdcz]ge[a-z0-9]+_)\0", Path(FAST_BLAS).read_bytes()))
    assert len(names) > 300
    everything = ctypes.CDLL(None)
    missing = [name for name in names if not hasattr(everything, name.decode())]
    assert not missing
    # Nothing but the copy in memory has OpenBLAS's own functions under such a name.
    assert everything.openblas_get_num_threads() >= 1


@LINUX
def test_products_and_factorisations_are_right() -> None:
    left, right = mx.random.normal((33, 65)), mx.random.normal((65, 17))
    wanted = np.array(left) @ np.array(right)
    assert np.abs(np.array(left @ right) - wanted).max() < 1e-4
    square = np.array([[2.0, 1.0], [1.0, 3.0]], dtype=np.float32)
    inverse = np.array(mx.linalg.inv(mx.array(square), stream=mx.cpu))
    assert np.abs(inverse @ square - np.eye(2)).max() < 1e-5


@LINUX
def test_a_library_that_is_cut_short_is_refused() -> None:
    assert FAST_BLAS is not None
    whole = Path(FAST_BLAS).read_bytes()
    for size in (7, 60, 1000, len(whole) // 2):
        with pytest.raises(ValueError, match=r"library|ELF"):
            with_plain_names(whole[:size], b"scipy_")


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x01\x01" + bytes(80), b"\x7fELF\x02\x01" + bytes(80)])
def test_files_of_another_kind_are_refused(image: bytes) -> None:
    with pytest.raises(ValueError, match=r"ELF|library"):
        with_plain_names(image, b"scipy_")
