"""A model in two parts: tokens to hidden states, hidden states to logits.

Training and verification need logits at a few positions of many; the head is a large part of a small model's work, so
it should run on those positions alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

Backbone: TypeAlias = Callable[[mx.array, Any], mx.array]
"""tokens (rows, length), cache (a list with one per layer, or None) -> hidden states (rows, length, hidden)."""
Head: TypeAlias = Callable[[mx.array], mx.array]
"""hidden states (..., hidden) -> logits (..., vocabulary)."""

_PROBE = (1, 2, 3, 4)


def split(model: nn.Module) -> tuple[Backbone, Head] | None:
    """The model's two parts, or None when head(backbone(x)) is not exactly model(x).

    Exactly, because families that scale or cap their logits would pass any looser comparison on a probe with small
    logits. The parts look their layers up when called: layers replaced later (LoRA) are the ones that run.
    """
    probe = mx.array([_PROBE])
    expected = cast("mx.array", model(probe, cache=make_prompt_cache(model)))
    for owner in (model, getattr(model, "language_model", None)):
        if not isinstance(owner, nn.Module) or not isinstance(getattr(owner, "model", None), nn.Module):
            continue
        for head in _heads(owner):
            backbone = _backbone(owner)
            try:
                got = head(backbone(probe, make_prompt_cache(model)))
                if got.shape == expected.shape and mx.array_equal(got, expected).item():
                    return backbone, head
            except (TypeError, ValueError, AttributeError):  # another signature or other shapes: another family
                continue
    return None


def _backbone(owner: Any) -> Backbone:
    return lambda tokens, cache: owner.model(tokens, cache=cache)


def _heads(owner: Any) -> list[Head]:
    heads: list[Head] = []
    if hasattr(owner, "lm_head"):
        heads.append(lambda hidden: owner.lm_head(hidden))
    if hasattr(getattr(owner.model, "embed_tokens", None), "as_linear"):
        heads.append(lambda hidden: owner.model.embed_tokens.as_linear(hidden))
    return heads
