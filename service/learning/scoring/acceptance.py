"""The acceptance rate of every logged output token under any draft, from one teacher-forced pass.

Decoding is lossless, so a logged output is a sample of the target whatever drafted it. Given the output, token x_t
would have been an accepted draft token with a probability a_t that depends only on the draft: 1 or 0 under the match
rule (whether its choice is x_t), min(1, q(x_t) / p(x_t)) under rejection sampling (Leviathan et al., arXiv 2211.17192).

Rates are (steps, tokens), or (tokens,) for a single step: row i is a_t of a token that is the (i + 1)-th of its
proposal; the last row also covers all later ones (see `draft_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.core import AcceptRule, Generation, Sampling
from service.engine.sampling import SamplingBatch, choose, shared_noise, transform
from service.learning.draft_steps import UNROLLED, step_count
from service.learning.examples import unpack
from service.learning.masks import NO_MASKS, Masks
from service.learning.teacher_forcing import Span, response_logits

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance for one generation. rates: (steps, tokens), the probability that each output token would have been
    accepted if proposed. agreed: number of output tokens that are the draft's argmax in its first step."""

    rates: Doubles
    agreed: int


def acceptance(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    vocabulary: int,
    k: int = UNROLLED,
    masks: Masks = NO_MASKS,
    between: Callable[[], object] = lambda: None,
) -> list[Acceptance]:
    """The acceptance rates of `model` on each generation, in rounds of `k` proposed tokens.

    Greedy texts by argmax; seeded ones by the draft's choice under the same Gumbel noise; unseeded ones from the
    target's stored log-probability after the sampling transform. vocabulary: width of the target's logits. masks: of
    answers that had to follow a grammar, which also restrict the draft. between: called before every model call.
    """
    steps = step_count(model, k)
    rates = [np.zeros((steps, len(generation.output))) for generation in generations]
    agreed = [0] * len(generations)
    for members in _by_sampling(generations):
        alike = [generations[index] for index in members]
        texts = [(generation.prompt.tokens, generation.output) for generation in alike]
        text_masks = [masks.get(generation.id) for generation in alike]
        for span in response_logits(
            model, texts, vocabulary=vocabulary, between=between, steps=steps, masks=text_masks
        ):
            span_rates, is_argmax = _span_acceptance(span, alike)
            for text, position, rate, same in zip(span.text, span.position, span_rates, is_argmax, strict=True):
                rates[members[text]][span.step, position] = rate
                if span.step == 0:
                    agreed[members[text]] += int(same)
    for generation, a in zip(generations, rates, strict=True):
        if len(generation.prompt.tokens) < 2:
            # The engine does not draft before a text has two tokens.
            a[:, :1] = 0.0
    return [Acceptance(a, n) for a, n in zip(rates, agreed, strict=True)]


def overlap(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    vocabulary: int,
    between: Callable[[], object] = lambda: None,
) -> list[Doubles]:
    """Sum of min(p, q) over the vocabulary at T = 1 at every output position, (tokens,) for each generation: the
    acceptance rate of the first token of a proposal under unfiltered sampling.

    Computed from the stored targets: exact over the top; for the tail the smaller of both tails, which is an upper
    bound. Raises ValueError when a generation has no targets.
    """
    found = [np.zeros(len(generation.output)) for generation in generations]
    stored = [unpack(g.targets) for g in generations if g.targets is not None]
    if len(stored) != len(generations):
        raise ValueError("overlap needs the targets of every generation")
    texts = [(generation.prompt.tokens, generation.output) for generation in generations]
    for span in response_logits(model, texts, vocabulary=vocabulary, between=between):
        rows = [(stored[text], i) for text, i in zip(span.text, span.position, strict=True)]
        ids = mx.array(np.stack([row[0][i] for row, i in rows]))
        logp = mx.array(np.stack([row[1][i] for row, i in rows]))
        tail = mx.array(np.array([row[2][i] for row, i in rows]))
        logq = span.logits - mx.logsumexp(span.logits, axis=-1, keepdims=True)
        q = mx.exp(mx.take_along_axis(logq, ids, axis=-1))
        common_tail = mx.minimum(mx.exp(tail), mx.maximum(1.0 - q.sum(axis=-1), 0.0))
        common = np.array(mx.minimum(mx.exp(logp), q).sum(axis=-1) + common_tail)
        for text, position, value in zip(span.text, span.position, common, strict=True):
            found[text][position] = value
    return found


def _by_sampling(generations: Sequence[Generation]) -> list[list[int]]:
    """Indices of the generations, grouped by the needs of their sampling: noise and sorting are computed for a whole
    span, so only if all of its texts need them."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for index, generation in enumerate(generations):
        groups.setdefault(_needs(generation.prompt.sampling), []).append(index)
    return list(groups.values())


def _needs(sampling: Sampling) -> tuple[bool, ...]:
    if sampling.greedy:
        return (True,)
    return (False, sampling.seed is not None, sampling.filtered)


def _span_acceptance(span: Span, generations: Sequence[Generation]) -> tuple[Doubles, NDArray[np.bool_]]:
    """(n,) acceptance rates of a span's tokens, and whether they are the draft's argmax."""
    owners = [generations[text] for text in span.text]
    emitted = mx.array([owner.output[i] for owner, i in zip(owners, span.position, strict=True)], dtype=mx.int32)
    finite = mx.isfinite(span.logits.max(axis=-1))
    is_argmax = (mx.argmax(span.logits, axis=-1) == emitted) & finite
    batch = SamplingBatch.of([owner.prompt.sampling for owner in owners], span.logits.shape[-1])
    if not batch.sampled:
        mx.eval(is_argmax)
        return np.array(is_argmax, dtype=np.float64), np.array(is_argmax, dtype=np.bool_)
    logq = transform(span.logits[:, None], batch)
    noise = shared_noise(batch, span.position, 1, span.logits.shape[-1])
    matched = choose(logq, noise)[:, 0] == emitted
    logp = mx.array(
        [
            owner.sampled_logprobs[i] if owner.prompt.sampling.rule is AcceptRule.REJECTION else 0.0
            for owner, i in zip(owners, span.position, strict=True)
        ]
    )
    ratio = mx.exp(mx.minimum(mx.take_along_axis(logq[:, 0], emitted[:, None], axis=-1)[:, 0] - logp, 0.0))
    rates = mx.where(finite, mx.where(batch.rejection, ratio, matched.astype(mx.float32)), 0.0)
    mx.eval(rates, is_argmax)
    return np.array(rates, dtype=np.float64), np.array(is_argmax, dtype=np.bool_)
