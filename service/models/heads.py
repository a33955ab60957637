"""Splits a model into backbone and output head, and cuts the head to a reduced draft vocabulary.

`split` lets a caller run the head only on the positions whose logits it needs. `cut` reduces the head to the rows of the ids
that the draft may propose.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from service.core import ModelError
from service.models.arrays import named_arrays

Backbone: TypeAlias = Callable[[mx.array, Any], mx.array]
"""tokens (rows, length), cache (a list with one per layer, or None) -> hidden states (rows, length, hidden)."""
Head: TypeAlias = Callable[[mx.array], mx.array]
"""hidden states (..., hidden) -> logits (..., vocabulary)."""

_PROBE = (1, 2, 3, 4)
_CLOSE = 0.02
"""Allowed difference of a cut head's logits, as a share of the largest: a product over fewer rows rounds differently."""


def split(model: nn.Module) -> tuple[Backbone, Head] | None:
    """Backbone and head of a model, or None if head(backbone(x)) is not bit-equal to model(x) on a probe.

    A tolerance would accept families that scale or cap their logits, if the probe's logits are small. Both parts look up their
    layers when called, so layers that are replaced later (LoRA) take effect.
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
    """An output head over a reduced vocabulary. Logits keep their full width and are -inf outside of it.

    whole: the head, or the embedding that is also the head. ids: the reduced vocabulary. Each row of a batch may have extra ids
    (`allow_extra_ids`). Raises ModelError if an id is out of range or the head does not have one row per token.
    """

    def __init__(self, whole: nn.Module, ids: Sequence[int]) -> None:
        super().__init__()
        arrays = named_arrays(whole.parameters())
        width = arrays[0][1].shape[0]
        if any(array.shape[0] != width for _, array in arrays):
            raise ModelError("this head does not keep one row per token: it cannot be cut")
        if not ids or max(ids) >= width or min(ids) < 0:
            raise ModelError(f"a vocabulary names token ids that this draft does not have (it has {width})")
        reduced = np.unique(np.array(ids, dtype=np.int32))
        self.whole = whole
        self.rows = shallow_copy(whole)
        self.rows.update(tree_map(lambda array: array[mx.array(reduced)], whole.parameters()))
        mx.eval(self.rows.parameters())
        # MLX does not count attributes with a leading underscore as parameters.
        self._ids = mx.array(reduced)
        self._in_vocabulary = np.isin(np.arange(width), reduced)
        self._extra: tuple[mx.array, mx.array, mx.array | None] | None = None
        """Ids (B, 1, reduced + n) of the reduced vocabulary and the extra ids; the extra ids' rows of the head and biases."""
        self._full = False
        self._narrow = False

    @property
    def in_vocabulary(self) -> NDArray[np.bool_]:
        """(width,) whether an id is in the reduced vocabulary. Extra ids do not count."""
        return self._in_vocabulary

    def reduced_logits(self, logits: mx.array) -> mx.array:
        """The logits (..., reduced) of the reduced vocabulary, from logits (..., width)."""
        return mx.take(logits, self._ids, axis=-1)

    @property
    def takes_extra_ids(self) -> bool:
        """Whether the head is linear or an embedding, whose rows can be picked."""
        return isinstance(self.whole, nn.QuantizedLinear | nn.QuantizedEmbedding | nn.Linear | nn.Embedding)

    def allow_extra_ids(self, ids: mx.array | None) -> None:
        """Compute logits also at ids[b] for row b of a batch, until the next call. ids: (B, n), or (1, n) for all rows;
        repeated ids and ids of the reduced vocabulary have no effect; None: none. No effect if `takes_extra_ids` is false."""
        self._extra = None
        if ids is not None and self.takes_extra_ids:
            reduced, rows = mx.broadcast_to(self._ids, (ids.shape[0], self._ids.size)), _head_rows(self.whole, ids)
            self._extra = (mx.concatenate([reduced, ids.astype(reduced.dtype)], axis=-1)[:, None], *rows)

    def __call__(self, x: mx.array) -> mx.array:
        """Logits (..., width) from hidden states (..., hidden): -inf outside the reduced vocabulary and the extra ids. Inside
        `full_head`, the whole head's logits; inside `narrow_heads`, (..., reduced + n), the n extra ids last."""
        return cast("Any", self.whole)(x) if self._full else self._full_width(x, cast("Any", self.rows)(x))

    def _full_width(self, x: mx.array, logits: mx.array) -> mx.array:
        """Logits (B, N, width), -inf where none are given; (B, N, reduced + n) inside `narrow_heads`. x: (B, N, hidden).
        logits: (B, N, reduced)."""
        ids = self._ids
        if self._extra is not None:
            ids, rows, bias = self._extra
            extra = x @ rows.swapaxes(-1, -2)
            if bias is not None:
                extra = extra + bias[:, None]
            logits = mx.concatenate([logits, extra.astype(logits.dtype)], axis=-1)
        if self._narrow:
            return logits
        # A scatter takes half the time of a gather over the full width (docs/decisions/engine.md).
        full = mx.full((*logits.shape[:-1], len(self._in_vocabulary)), -float("inf"), dtype=logits.dtype)
        return mx.put_along_axis(full, mx.broadcast_to(ids, logits.shape), logits, axis=-1)


def _head_rows(whole: nn.Module, ids: mx.array) -> tuple[mx.array, mx.array | None]:
    """The rows (B, n, hidden) of a head that `takes_extra_ids` at ids (B, n), dequantised, and their biases (B, n)."""
    if isinstance(whole, nn.QuantizedLinear | nn.QuantizedEmbedding):
        quantised = cast("Any", whole)
        rows = mx.dequantize(
            quantised.weight[ids],
            quantised.scales[ids],
            None if quantised.get("biases") is None else quantised.biases[ids],
            group_size=quantised.group_size,
            bits=quantised.bits,
            mode=quantised.mode,
        )
    else:
        rows = cast("Any", whole).weight[ids]
    bias = cast("mx.array | None", whole.get("bias"))
    return rows, None if bias is None else bias[ids]


class CutEmbedding(CutHead):
    """A CutHead over an embedding that is also the output head. Token ids are embedded with the whole table."""

    def __call__(self, x: mx.array) -> mx.array:
        """Embeddings (..., hidden) of token ids (...,), from the whole table."""
        return cast("Any", self.whole)(x)

    def as_linear(self, x: mx.array) -> mx.array:
        """The head: logits (..., width) from hidden states (..., hidden), cut as in CutHead."""
        if self._full:
            return cast("Any", self.whole).as_linear(x)
        return self._full_width(x, cast("Any", self.rows).as_linear(x))


def cut(model: nn.Module, ids: Sequence[int]) -> None:
    """Reduce the model's output vocabulary to these ids, in place; an earlier cut is undone first.

    Families that cap their logits turn -inf into a low number: such tokens are then unlikely, not impossible. Raises
    ModelError, and leaves the model uncut, if its head is not found or an id is out of range.
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
        after, reduced = cast("mx.array", model(probe)), mx.array(list(ids))
        largest = mx.abs(before).max()
        same = mx.abs(after[..., reduced] - before[..., reduced]).max() <= _CLOSE * largest
        masked = len(set(ids)) == before.shape[-1] or after.min() < before.min()
        if same.item() and mx.array(masked).item():
            return
        uncut(model)
    raise ModelError("this model's head cannot be cut: it is not where other families keep theirs")


def uncut(model: nn.Module) -> None:
    """Undo `cut`: restore a model's whole output head, in place."""
    for owner in (model, getattr(model, "language_model", None)):
        if isinstance(head := getattr(owner, "lm_head", None), CutHead):
            cast("Any", owner).lm_head = head.whole
        embedding = getattr(getattr(owner, "model", None), "embed_tokens", None)
        if isinstance(embedding, CutEmbedding):
            cast("Any", owner).model.embed_tokens = embedding.whole


def cut_head(model: nn.Module) -> CutHead | None:
    """The model's cut head; None if its head is not cut."""
    for owner in (model, getattr(model, "language_model", None)):
        embedding = getattr(getattr(owner, "model", None), "embed_tokens", None)
        for head in (getattr(owner, "lm_head", None), embedding):
            if isinstance(head, CutHead):
                return head
    return None


@contextmanager
def extra_ids_allowed(head: CutHead | None, ids: mx.array | None) -> Generator[None]:
    """Compute logits at extra ids inside the block: see `CutHead.allow_extra_ids`. head: None if it is not cut."""
    if head is not None:
        head.allow_extra_ids(ids)
    try:
        yield
    finally:
        if head is not None:
            head.allow_extra_ids(None)


@contextmanager
def ids_allowed(model: nn.Module, tokens: NDArray[np.int32]) -> Generator[NDArray[np.bool_] | None]:
    """Inside the block, a cut head also computes the logits of all ids in `tokens` (...,), or those of the whole head if its
    rows cannot be picked. Yields `CutHead.in_vocabulary`, (width,); None if the head is not cut."""
    head = cut_head(model)
    if head is None or not head.takes_extra_ids:
        with full_head(model) as in_vocabulary:
            yield in_vocabulary
        return
    with extra_ids_allowed(head, _extra_ids(head, tokens)):
        yield head.in_vocabulary


def _extra_ids(head: CutHead, tokens: NDArray[np.int32]) -> mx.array | None:
    """(1, n) the ids in `tokens` (...,) that are not in the reduced vocabulary, ascending; None if there are none."""
    own = np.zeros_like(head.in_vocabulary)
    # A wider target may use ids beyond the head.
    own[tokens[tokens < len(own)]] = True
    outside = np.flatnonzero(own & ~head.in_vocabulary)
    return mx.array(outside[None]) if len(outside) else None


@contextmanager
def narrow_heads(models: Sequence[nn.Module], tokens: NDArray[np.int32]) -> Generator[None]:
    """For models whose heads are cut to the same ids: inside the block, their logits cover only the reduced vocabulary, by
    ascending id, followed by the other ids in `tokens` (...,), also ascending, if every head takes extra ids. Uncut heads are
    not affected."""
    heads = [head for model in models if (head := cut_head(model)) is not None]
    extra = None
    if heads and all(head.takes_extra_ids for head in heads):
        extra = _extra_ids(min(heads, key=lambda head: len(head.in_vocabulary)), tokens)
    for head in heads:
        head.allow_extra_ids(extra)
        head._narrow = True  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        for head in heads:
            head.allow_extra_ids(None)
            head._narrow = False  # pyright: ignore[reportPrivateUsage]


@contextmanager
def full_head(model: nn.Module) -> Generator[NDArray[np.bool_] | None]:
    """Use the model's whole head inside the block. Yields `CutHead.in_vocabulary`, (width,); None if it is not cut."""
    head = cut_head(model)
    if head is None:
        yield None
        return
    head._full = True  # pyright: ignore[reportPrivateUsage]
    try:
        yield head.in_vocabulary
    finally:
        head._full = False  # pyright: ignore[reportPrivateUsage]


def token_limit(model: nn.Module) -> int | None:
    """The number of token ids for which a model has embeddings; None if it has no embedding table. MLX does not check indices:
    a larger id would read past the end of the array."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)]
    return max((table.weight.shape[0] for table in tables), default=None)


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of the module and its submodules that shares their arrays."""
    shared = {id(array): array for _, array in named_arrays(module.parameters())}
    return copy.deepcopy(module, memo=dict(shared))
