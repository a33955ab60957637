"""A model in two parts: tokens to hidden states, hidden states to logits.

Training and verification need logits at a few positions of many; the head is a large part of a small model's work, so
it should run on those positions alone. And where it drafts, it needs only the tokens it may propose: `cut`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

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
    """A head, or an embedding that is one too, whose logits are -inf but at some ids: the kept ones, and those each row of a
    batch names for itself (`also`). Everything else is the whole's."""

    def __init__(self, whole: nn.Module, ids: Sequence[int]) -> None:
        super().__init__()
        arrays = cast("list[tuple[str, mx.array]]", tree_flatten(whole.parameters()))
        width = arrays[0][1].shape[0]
        if any(array.shape[0] != width for _, array in arrays):
            raise ModelError("this head does not keep one row per token: it cannot be cut")
        if not ids or max(ids) >= width or min(ids) < 0:
            raise ModelError(f"a vocabulary names token ids that this draft does not have (it has {width})")
        kept = np.unique(np.array(ids, dtype=np.int32))
        self.whole = whole
        self.rows = twin(whole)
        self.rows.update(tree_map(lambda array: array[mx.array(kept)], whole.parameters()))
        mx.eval(self.rows.parameters())
        # Not arrays of the model: names that begin so are left out of its parameters.
        self._ids = mx.array(kept)
        self._keeps = np.isin(np.arange(width), kept)
        self._also: tuple[mx.array, mx.array, mx.array | None] | None = None
        """Places (B, 1, kept + n) of the kept and the other logits, rows and biases of the others."""
        self._open = False

    @property
    def keeps(self) -> NDArray[np.bool_]:
        """(width,) whether an id is kept."""
        return self._keeps

    def narrowed(self, logits: mx.array) -> mx.array:
        """Of logits (..., width) those of the kept ids."""
        return mx.take(logits, self._ids, axis=-1)

    def also(self, ids: mx.array | None) -> None:
        """Until told otherwise, give row b of a batch logits at ids[b] besides. ids: (B, n), where doubles and kept ones do no
        harm; None: the kept ones alone. Does nothing where the head is of a kind whose rows cannot be picked."""
        self._also = None
        if ids is not None and (picked := _picked(self.whole, ids)) is not None:
            kept = mx.broadcast_to(self._ids, (ids.shape[0], self._ids.size))
            self._also = (mx.concatenate([kept, ids.astype(kept.dtype)], axis=-1)[:, None], *picked)

    def __call__(self, x: mx.array) -> mx.array:
        """Logits (..., width) from hidden states (..., hidden): -inf outside the reduced vocabulary and the extra ids, but
        the whole head's while it is `opened`."""
        return cast("Any", self.whole)(x) if self._open else self._widened(x, cast("Any", self.rows)(x))

    def _widened(self, x: mx.array, logits: mx.array) -> mx.array:
        """x: (B, N, hidden). logits: (B, N, kept) -> (B, N, width)."""
        places = self._ids
        if self._also is not None:
            places, rows, bias = self._also
            found = x @ rows.swapaxes(-1, -2)
            if bias is not None:
                found = found + bias[:, None]
            logits = mx.concatenate([logits, found.astype(logits.dtype)], axis=-1)
        # Putting what there is where it belongs takes half of the time of looking up every id.
        never = mx.full((*logits.shape[:-1], len(self._keeps)), -float("inf"), dtype=logits.dtype)
        return mx.put_along_axis(never, mx.broadcast_to(places, logits.shape), logits, axis=-1)


def _picked(whole: nn.Module, ids: mx.array) -> tuple[mx.array, mx.array | None] | None:
    """The rows (B, n, hidden) of a head at ids (B, n), and their biases."""
    if isinstance(whole, nn.QuantizedLinear | nn.QuantizedEmbedding):
        held = cast("Any", whole)
        rows = mx.dequantize(
            held.weight[ids],
            held.scales[ids],
            None if held.get("biases") is None else held.biases[ids],
            group_size=held.group_size,
            bits=held.bits,
            mode=held.mode,
        )
    elif isinstance(whole, nn.Linear | nn.Embedding):
        rows = whole.weight[ids]
    else:
        return None
    bias = cast("mx.array | None", whole.get("bias"))
    return rows, None if bias is None else bias[ids]


class CutEmbedding(CutHead):
    """A CutHead over an embedding that is the output head too. Embedding tokens is not cut."""

    def __call__(self, x: mx.array) -> mx.array:
        """Embeddings (..., hidden) of token ids (...,), by the whole table."""
        return cast("Any", self.whole)(x)

    def as_linear(self, x: mx.array) -> mx.array:
        """The head: logits (..., width) from hidden states (..., hidden), cut as in CutHead."""
        if self._open:
            return cast("Any", self.whole).as_linear(x)
        return self._widened(x, cast("Any", self.rows).as_linear(x))


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


def cut_head(model: nn.Module) -> CutHead | None:
    """The cut head of a model that has one."""
    for owner in (model, getattr(model, "language_model", None)):
        embedding = getattr(getattr(owner, "model", None), "embed_tokens", None)
        for head in (getattr(owner, "lm_head", None), embedding):
            if isinstance(head, CutHead):
                return head
    return None


@contextmanager
def opened(model: nn.Module) -> Generator[NDArray[np.bool_] | None]:
    """The model with its whole head for a while. Yields which ids its cut keeps, (width,); None where it is not cut."""
    head = cut_head(model)
    if head is None:
        yield None
        return
    head._open = True  # pyright: ignore[reportPrivateUsage]
    try:
        yield head.keeps
    finally:
        head._open = False  # pyright: ignore[reportPrivateUsage]


def token_limit(model: nn.Module) -> int | None:
    """How many token ids a model has an embedding for; None where it has no embedding of its own. Feeding it a larger id
    reads past the end of an array."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)]
    return max((table.weight.shape[0] for table in tables), default=None)


def twin(module: nn.Module) -> nn.Module:
    """A module of the same structure over the very same arrays."""
    shared = {id(array): array for _, array in cast("list[tuple[str, mx.array]]", tree_flatten(module.parameters()))}
    return copy.deepcopy(module, memo=dict(shared))
