"""A model in two parts: tokens to hidden states, hidden states to logits.

Training and verification need logits at a few positions of many; the head is a large part of a small model's work, so
it should run on those positions alone. And where it drafts, it needs only the tokens it may propose: `cut`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from service.core import ModelError

Backbone: TypeAlias = Callable[[mx.array, Any], mx.array]
"""tokens (rows, length), cache (a list with one per layer, or None) -> hidden states (rows, length, hidden)."""
Head: TypeAlias = Callable[[mx.array], mx.array]
"""hidden states (..., hidden) -> logits (..., vocabulary)."""

_PROBE = (1, 2, 3, 4)
_CLOSE = 0.02
"""Of the largest logit: fewer rows are multiplied in another order, in half precision too."""


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


class CutHead(nn.Module):
    """A head, or an embedding that is one too, whose logits are -inf but at some ids. Everything else is the whole's."""

    def __init__(self, whole: nn.Module, ids: Sequence[int]) -> None:
        super().__init__()
        arrays = cast("list[tuple[str, mx.array]]", tree_flatten(whole.parameters()))
        width = arrays[0][1].shape[0]
        if any(array.shape[0] != width for _, array in arrays):
            raise ModelError("this head does not keep one row per token: it cannot be cut")
        if not ids or max(ids) >= width or min(ids) < 0:
            raise ModelError(f"a vocabulary names token ids that this draft does not have (it has {width})")
        kept = np.sort(np.array(ids, dtype=np.int32))
        at = np.full(width, len(kept), dtype=np.int32)
        at[kept] = np.arange(len(kept), dtype=np.int32)
        self.whole = whole
        self.rows = twin(whole)
        self.rows.update(tree_map(lambda array: array[mx.array(kept)], whole.parameters()))
        self.at = mx.array(at)
        """Where each id's logit is among the kept ones; behind the last for those that have none."""
        mx.eval(self.rows.parameters(), self.at)

    def __call__(self, x: mx.array) -> mx.array:
        return self._widened(cast("Any", self.rows)(x))

    def _widened(self, logits: mx.array) -> mx.array:
        never = mx.full((*logits.shape[:-1], 1), -float("inf"), dtype=logits.dtype)
        return mx.take(mx.concatenate([logits, never], axis=-1), self.at, axis=-1)


class CutEmbedding(CutHead):
    def __call__(self, x: mx.array) -> mx.array:
        return cast("Any", self.whole)(x)

    def as_linear(self, x: mx.array) -> mx.array:
        return self._widened(cast("Any", self.rows).as_linear(x))


def cut(model: nn.Module, ids: Sequence[int]) -> None:
    """Let the model propose these tokens alone, in place; an earlier cut is undone first. Raises ModelError, and leaves the
    model whole, where its head cannot be found or an id is not one of its own.

    Families that cap their logits turn -inf into a low number: such a token is not ruled out but all but never proposed.
    """
    uncut(model)
    probe = mx.array([_PROBE])
    before = cast("mx.array", model(probe))
    for owner in cast("list[Any]", [model, getattr(model, "language_model", None)]):
        if hasattr(owner, "lm_head"):
            owner.lm_head = CutHead(owner.lm_head, ids)
        elif hasattr(getattr(getattr(owner, "model", None), "embed_tokens", None), "as_linear"):
            owner.model.embed_tokens = CutEmbedding(owner.model.embed_tokens, ids)
        else:
            continue
        after, kept = cast("mx.array", model(probe)), mx.array(list(ids))
        span = mx.abs(before).max()
        same = mx.abs(after[..., kept] - before[..., kept]).max() <= _CLOSE * span
        lost = len(set(ids)) == before.shape[-1] or after.min() < before.min()
        if same.item() and mx.array(lost).item():
            return
        uncut(model)
    raise ModelError("this model's head cannot be cut: it is not where other families keep theirs")


def uncut(model: nn.Module) -> None:
    """Give a model its whole head back, in place."""
    for owner in (model, getattr(model, "language_model", None)):
        if isinstance(head := getattr(owner, "lm_head", None), CutHead):
            cast("Any", owner).lm_head = head.whole
        embedding = getattr(getattr(owner, "model", None), "embed_tokens", None)
        if isinstance(embedding, CutEmbedding):
            cast("Any", owner).model.embed_tokens = embedding.whole


def twin(module: nn.Module) -> nn.Module:
    """A module of the same structure over the very same arrays."""
    shared = {id(array): array for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))}
    return copy.deepcopy(module, memo=dict(shared))
