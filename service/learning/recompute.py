"""Gradient checkpointing: blocks keep only their input and recompute their activations for the backward pass (Chen et
al., arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import mlx.nn as nn
from mlx.nn.utils import checkpoint


@contextmanager
def recomputed_blocks(model: nn.Module, *, on: bool = True) -> Generator[None]:
    """Within the context, every block of the model recomputes its activations for the backward pass; values and
    gradients are the same.

    A gradient taken inside leaves arrays of its graph in place of the blocks' trainable parameters: set them again
    before the next one. on: False changes nothing.
    """
    blocks = cast("list[nn.Module]", model.layers) if on else []
    kinds = [type(block) for block in blocks]
    for block, kind in zip(blocks, kinds, strict=True):
        block.__class__ = _recomputed(kind)
    try:
        yield
    finally:
        for block, kind in zip(blocks, kinds, strict=True):
            block.__class__ = kind


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a block's class whose calls are checkpointed."""

    def call(self: nn.Module, *positional: Any, **named: Any) -> Any:
        inner = partial(cast("Any", kind).__call__, self)
        return cast("Callable[..., Any]", checkpoint(self, inner))(*positional, **named)

    return type(kind.__name__, (kind,), {"__call__": call})
