"""The arrays of a model by name."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx.utils import tree_flatten


def named_arrays(tree: object) -> list[tuple[str, mx.array]]:
    """The leaves of a parameter tree, such as `model.parameters()`, with their dotted names."""
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))
