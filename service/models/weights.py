"""Sizes of stored weights, read from the headers of safetensors files."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import cast

from service.models.model_files import stored_tensors

_FLOATS = {"F16", "BF16", "F32", "F64"}


def bytes_in_memory(folder: Path, *, widen: bool) -> int:
    """Bytes of a model's weights once loaded. widen: floating-point weights become float32 (as on the CPU). Raises ModelError
    if the files are incomplete."""
    total = 0
    for tensor in stored_tensors(folder):
        start, end = cast("list[int]", tensor["data_offsets"])
        floating = widen and tensor["dtype"] in _FLOATS
        total += 4 * prod(cast("list[int]", tensor["shape"])) if floating else end - start
    return total


def stores_float32(folder: Path) -> bool:
    """Whether all of a model's floating-point weights, or the scales of its quantised ones, are float32. Raises ModelError if
    the files are incomplete."""
    dtypes = {tensor["dtype"] for tensor in stored_tensors(folder)} & _FLOATS
    return bool(dtypes) and dtypes <= {"F32", "F64"}
