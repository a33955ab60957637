"""Sizes of stored weights, read from the headers of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import cast

_FLOATS = {"F16", "BF16", "F32", "F64"}


def bytes_in_memory(folder: Path, *, widen: bool) -> int:
    """Bytes of a model's weights once loaded. widen: floating-point weights become float32 (as on the CPU). Raises OSError."""
    total = 0
    for tensor in _tensors(folder):
        start, end = cast("list[int]", tensor["data_offsets"])
        floating = widen and tensor["dtype"] in _FLOATS
        total += 4 * prod(cast("list[int]", tensor["shape"])) if floating else end - start
    return total


def stores_float32(folder: Path) -> bool:
    """Whether a model's floating-point weights, or the scales of its quantised ones, are all float32. Raises OSError."""
    dtypes = {tensor["dtype"] for tensor in _tensors(folder)} & _FLOATS
    return bool(dtypes) and dtypes <= {"F32", "F64"}


def _tensors(folder: Path) -> Iterator[dict[str, object]]:
    """The headers of all stored tensors."""
    for path in folder.glob("model*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in cast("dict[str, dict[str, object]]", header).items():
            if name != "__metadata__":
                yield tensor
