"""The distillation loss of a draft on text written by its target, towards the target's distribution at every written position.

Losses: forward KL, or a blend with the total variation distance, which is the fraction of proposed tokens that a target
rejects at T = 1 (LK losses, arXiv 2602.23881). The blend moves from the first to the second as the draft improves.

An EAGLE head learns several draft steps of a round at once, the later ones from its own hidden states (EAGLE-3, arXiv
2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from service.learning.draft_steps import UNROLLED
from service.learning.make.target_text import ANSWER, FORCED, TargetText
from service.models import eagle
from service.models.heads import narrow_heads, token_limit

_SHARED = ("embed_tokens", "wte", "lm_head")
"""Modules shared with the target. They are not trained, and the draft ships without them."""
LOGITS_COPIES = 16
"""Float32 arrays of the logits' size that the gradient holds at once. Measured: 5 without the blend and 9 with it, for
an unrolled head 8 and 12; the rest is reserve."""
_BLEND_RATE = 3.0
"""How fast the blend moves from KL to total variation as the overlap grows, as in the paper."""
_STEP_DECAY = 0.8
"""Weight of a draft step relative to the previous one: it only matters if that one was right."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class TextBatch:
    """tokens: (B, L). written: (B, L - 1) float32, 1 if the target wrote the *next* token, 0 if it was forced."""

    tokens: NDArray[np.int32]
    written: mx.array

    @property
    def count(self) -> int:
        """Token positions processed."""
        return self.tokens.size

    @property
    def rows(self) -> int:
        """Number of texts, B."""
        return len(self.tokens)

    @property
    def loss_weight(self) -> float:
        """Number of written positions."""
        return float(np.array(self.written).sum())

    def split(self, rows: int) -> list[TextBatch]:
        """The same texts in batches of at most `rows`."""
        starts = range(0, self.rows, rows)
        return [TextBatch(self.tokens[at : at + rows], self.written[at : at + rows]) for at in starts]


def batches(text: TargetText, rows: int, epochs: int, seed: int) -> Iterator[TextBatch]:
    """Shuffled batches of `rows` texts; the remainder of an epoch goes into the first batch of the next one."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(text.tokens)) for _ in range(epochs)])
    for start in range(0, len(order) - rows + 1, rows):
        chosen = order[start : start + rows]
        written = (text.role[chosen, 1:] != FORCED).astype(np.float32)
        yield TextBatch(text.tokens[chosen], mx.array(written))


def batch_count(text: TargetText, rows: int, epochs: int) -> int:
    """Number of batches that `batches` yields with the same arguments."""
    return len(text.tokens) * epochs // rows


def freeze_shared(draft: nn.Module) -> None:
    """Makes everything trainable except embeddings and output head."""
    draft.unfreeze()
    for name, module in draft.named_modules():
        if name.rsplit(".", 1)[-1] in _SHARED:
            module.freeze()


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """The target's probabilities p, (B, L, V), and their entropy (B, L) in nats."""

    p: mx.array
    entropy: mx.array

    @classmethod
    def of(cls, logits: mx.array) -> TargetDistribution:
        """Computes it from logits (B, L, V), without gradient."""
        logits = mx.stop_gradient(logits.astype(mx.float32))
        normaliser = mx.logsumexp(logits, axis=-1)
        p = mx.exp(logits - normaliser[..., None])
        return cls(p, normaliser - (p * logits).sum(axis=-1))


class Distillation:
    """The loss for `train`. The draft's weights are float32, and both models run in `dtype`.

    blend: of KL and total variation; otherwise KL only. If one model has wider logits, only the common ids count. If
    both heads are cut to the same ids, both distributions cover these and the ids of the batch, which is about what the
    draft may propose: a row's own ids can be proposed too.
    """

    def __init__(self, target: nn.Module, dtype: mx.Dtype, *, blend: bool = False) -> None:
        self.target = target
        self.dtype = dtype
        self.blend = blend

    def __call__(self, draft: nn.Module, batch: TextBatch) -> mx.array:
        """The mean over written positions, a scalar, KL in nats; 0 for a batch without any. For an EAGLE head, the
        weighted mean over its draft steps.

        Memory: several float32 arrays of the size of the target's logits; with four draft steps about a dozen.
        """
        with narrow_heads((self.target, draft), batch.tokens):
            return self._loss(draft, batch)

    def _loss(self, draft: nn.Module, batch: TextBatch) -> mx.array:
        inputs = mx.array(batch.tokens[:, :-1])
        wanted = self.target(inputs)
        if not isinstance(draft, eagle.Model):
            logits = self._in_dtype(draft, draft, _embeddable(draft, inputs))
            width = min(wanted.shape[-1], logits.shape[-1])
            return self._divergence(logits[..., :width], TargetDistribution.of(wanted[..., :width]), batch.written)
        distribution = TargetDistribution.of(wanted)
        # The target's call has already captured its features.
        loss, weight, weights = mx.array(0.0), 1.0, 0.0
        for step, logits in enumerate(self._in_dtype(draft, _step_logits, draft, inputs)):
            written = batch.written * reached(step, inputs)
            loss = loss + weight * self._divergence(logits, distribution, written)
            weights += weight
            weight *= _STEP_DECAY
        return loss / weights

    def agreement(self, draft: nn.Module, text: TargetText, rows: int = 16) -> tuple[list[float], int]:
        """Fraction of answer tokens that are the draft's argmax, by draft step, given that the earlier steps were
        right; and the number of tokens compared in the first step. rows: texts per call."""
        agreed, compared = list[int](), list[int]()
        for start in range(0, len(text.tokens), rows):
            tokens, role = text.tokens[start : start + rows], text.role[start : start + rows]
            inputs = mx.array(tokens[:, :-1])
            for step, argmax in enumerate(self._argmax_by_step(draft, inputs)):
                if step == len(agreed):
                    agreed.append(0)
                    compared.append(0)
                answers = (role[:, 1:] == ANSWER) & np.array(reached(step, inputs))
                agreed[step] += int(((np.array(argmax) == tokens[:, 1:]) & answers).sum())
                compared[step] += int(answers.sum())
        return [right / max(of, 1) for right, of in zip(agreed, compared, strict=True)], compared[0]

    def _argmax_by_step(self, draft: nn.Module, tokens: mx.array) -> Iterator[mx.array]:
        """The draft's argmax (B, L) after each token of texts (B, L), by draft step."""
        if not isinstance(draft, eagle.Model):
            yield mx.argmax(self._in_dtype(draft, draft, _embeddable(draft, tokens)), axis=-1)
            return
        self.target(tokens)
        for logits in self._in_dtype(draft, _step_logits, draft, tokens):
            yield mx.argmax(logits, axis=-1)

    def _divergence(self, logits: mx.array, target: TargetDistribution, written: mx.array) -> mx.array:
        """The loss of the draft's logits (B, L, V), averaged over the positions marked in written (B, L)."""
        logits = logits.astype(mx.float32)
        count = mx.maximum(written.sum(), 1.0)
        # log q, as wide as the logits, is never stored: passes over memory dominate a step.
        normaliser = mx.logsumexp(logits, axis=-1)
        kl = ((normaliser - (target.p * logits).sum(axis=-1) - target.entropy) * written).sum() / count
        if not self.blend:
            return kl
        overlap = (mx.minimum(target.p, mx.exp(logits - normaliser[..., None])).sum(axis=-1) * written).sum() / count
        weight = mx.exp(-_BLEND_RATE * mx.stop_gradient(overlap))
        return weight * kl + (1.0 - weight) * (written.sum() / count - overlap)

    def _in_dtype(self, draft: nn.Module, call: Callable[_P, _R], *positional: _P.args, **named: _P.kwargs) -> _R:
        """Calls the draft with its weights cast to `dtype` for the call, and returns the result."""
        weights = draft.parameters()
        draft.update(tree_map(self._cast, weights))
        out = call(*positional, **named)
        draft.update(weights)
        return out

    def _cast(self, array: Any) -> Any:
        return array.astype(self.dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def _embeddable(draft: nn.Module, tokens: mx.array) -> mx.array:
    """Token ids, with those of a wider target that have no embedding in the draft replaced by its last id."""
    limit = token_limit(draft)
    return tokens if limit is None else mx.minimum(tokens, limit - 1)


def reached(step: int, tokens: mx.array) -> mx.array:
    """(L,) bool: the positions of texts (B, L) that a round starting inside the text can reach in this draft step."""
    return mx.arange(tokens.shape[1]) >= step


def _step_logits(draft: eagle.Model, tokens: mx.array) -> list[mx.array]:
    """The draft's logits (B, L, V) by draft step, from the features captured in the target's last call."""
    features = eagle.shift_right(draft.target_features())
    return [draft.logits(state) for state in draft.model.unrolled(tokens, features, UNROLLED)]
