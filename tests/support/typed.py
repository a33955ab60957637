"""Typed access to MLX values whose types its stubs leave open: scalars, arrays, trees, files and layers."""

from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


def as_float(scalar: mx.array) -> float:
    return float(cast("float", scalar.item()))


def as_int(scalar: mx.array) -> int:
    return int(cast("int", scalar.item()))


def as_floats(array: mx.array) -> list[float]:
    return cast("list[float]", array.tolist())


def as_ints(array: mx.array) -> list[int]:
    return cast("list[int]", array.tolist())


def as_rows(array: mx.array) -> list[list[int]]:
    return cast("list[list[int]]", array.tolist())


def leaves(tree: object) -> list[tuple[str, mx.array]]:
    """The arrays of parameters or gradients with their names."""
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))


def load_arrays(path: Path) -> dict[str, mx.array]:
    """The named arrays of a file."""
    return cast("dict[str, mx.array]", mx.load(str(path)))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return cast("Any", model).layers
