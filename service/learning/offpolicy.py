"""How any adapter would have drafted what was logged, without decoding again.

Decoding is lossless, so a logged output is a sample of the target whatever drafted it. Given the output, each of its
tokens x_t would have been an accepted draft token with a probability a_t that needs the draft alone: 1 or 0 under the
match rule (its own choice equals x_t or not), min(1, q(x_t) / p(x_t)) under rejection. Rounds over those a_t form a
renewal process whose expected number of target calls is exact.

Rates are (depths, tokens), or (tokens,) where there is one depth: row i holds a_t for a token that is the (i + 1)-th of its
proposal, the last row for all later ones too (see `steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.core import AcceptRule, Generation, Round, Sampling, Source
from service.engine.sampling import SamplingBatch, choose, shared_noise, transform
from service.learning.dataset import unpack
from service.learning.forced import Span, response_logits
from service.learning.masks import NO_MASKS, Masks
from service.learning.steps import UNROLLED, depths

Doubles = NDArray[np.float64]
Rates: TypeAlias = Sequence[float] | Doubles


@dataclass(frozen=True, slots=True)
class Acceptance:
    """rates: (depths, tokens) probability that each output token would have been kept, had it been drafted. agreed: how many
    output tokens are the draft's argmax, where it drafts them first."""

    rates: Doubles
    agreed: int


def expected_calls(rates: Rates, k: int) -> float:
    """Expected target calls to emit len(rates) tokens with k drafted a round.

    A round that starts at t keeps exactly j < k drafts with probability a_t .. a_{t+j-1} (1 - a_{t+j}), all k with
    a_t .. a_{t+k-1}, and emits one token more than it keeps, never past the end. With r(t) the probability that some
    round starts at t (r(0) = 1), the calls are the sum of r.
    """
    return float(_starts(_by_depth(rates), [k]).sum())


def calls_by_length(rates: Rates, k: int) -> tuple[float, ...]:
    """expected_calls with 1, 2, ... k drafted a round, in the time of one."""
    lengths = range(1, k + 1)
    return tuple(_starts(_by_depth(rates), lengths).sum(axis=1).tolist()) if lengths else ()


def expected_positions(rates: Rates, k: int) -> tuple[Doubles, Doubles]:
    """How often each of the k positions of a proposal is expected to be tested, and to be kept, (k,) each: position i is tested
    where all before it were kept and the text goes on."""
    a = _by_depth(rates)
    starts = _starts(a, [k])[0]
    tested, kept = np.zeros(k), np.zeros(k)
    reach = starts.copy()
    for i in range(k):
        reach = reach[: max(a.shape[1] - i, 0)]
        tested[i] = reach.sum()
        reach = reach * a[min(i, len(a) - 1), i : i + len(reach)]
        kept[i] = reach.sum()
    return tested, kept


def predictable_rounds(generation: Generation, adapter: int) -> list[Round]:
    """The rounds that `adapter` drafted, where its rates say exactly what is accepted in them. None of a text that

    - is sampled without a seed: how many tokens a round drafts depends on proposed ones, of which the text does not tell;
    - had to follow a grammar: on a GPU later tokens of a proposal are drafted without its mask;
    - another adapter began, whose keys and values the row keeps.
    """
    exact = generation.prompt.sampling.rule is AcceptRule.MATCH and generation.grammar is None
    if not exact or any(round.adapter != adapter for round in generation.rounds):
        return []
    return [round for round in generation.rounds if round.drafted and round.source is Source.DRAFT]


def expected_accepted(rates: Rates, rounds: Sequence[Round]) -> float:
    """Draft tokens that are expected to be accepted in these rounds, each from its start at its draft length."""
    a = _by_depth(rates)
    depth, count = a.shape
    return sum(
        float(np.cumprod([a[min(i - at, depth - 1), i] for i in range(at, min(at + drafted, count))]).sum())
        for at, drafted in ((round.start, round.drafted) for round in rounds)
    )


def _by_depth(rates: Rates) -> Doubles:
    return np.atleast_2d(np.asarray(rates, dtype=np.float64))


def _starts(a: Doubles, lengths: Sequence[int]) -> Doubles:
    """r(t) at every output position, by draft length, (lengths, tokens). a: (depths, tokens)."""
    count, most = a.shape[1], max(lengths)
    # Beyond the end nothing matters: whatever is kept there, the request is over.
    beyond = np.pad(a, ((0, 0), (0, most + 1)))
    # (tokens, most + 1): the rates of a round that starts there.
    ahead = np.stack([beyond[min(i, len(a) - 1), i : i + count] for i in range(most + 1)], axis=1)
    kept = np.concatenate([np.ones((count, 1)), np.cumprod(ahead[:, :most], axis=1)], axis=1)
    # Probability that a round which starts at t keeps just so many: no more follows k.
    just = np.stack([kept * np.where(np.arange(most + 1) == k, 1.0, 1.0 - ahead) for k in lengths])
    for row, k in zip(just, lengths, strict=True):
        row[:, k + 1 :] = 0.0
    starts = np.zeros((len(lengths), count + most + 1))
    starts[:, :1] = 1.0
    for t in range(count):
        starts[:, t + 1 : t + most + 2] += starts[:, t, None] * just[:, t]
    return starts[:, :count]


def acceptance(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    vocabulary: int,
    k: int = UNROLLED,
    masks: Masks = NO_MASKS,
    between: Callable[[], object] = lambda: None,
) -> list[Acceptance]:
    """a_t of every output token at every depth of rounds of `k` tokens, from one teacher-forced pass of the draft.

    Greedy rows by argmax; seeded rows by the draft's choice under the same Gumbel noise; unseeded rows from the
    target's stored log-probability after the sampling transform. vocabulary: width of the logits the pair shares. masks: of
    answers that had to follow a grammar, under which the draft proposes.
    between: called before every model call.
    """
    depth = depths(model, k)
    rates = [np.zeros((depth, len(generation.output))) for generation in generations]
    agreed = [0] * len(generations)
    # What one row's sampling needs is computed for its whole span: noise and sorting only where all rows want them.
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for index, generation in enumerate(generations):
        kinds.setdefault(_kind(generation.prompt.sampling), []).append(index)
    for members in kinds.values():
        alike = [generations[index] for index in members]
        texts = [(generation.prompt.tokens, generation.output) for generation in alike]
        held = [masks.get(generation.id) for generation in alike]
        for span in response_logits(model, texts, vocabulary=vocabulary, between=between, depth=depth, masks=held):
            kept, argmax = _span(span, alike)
            for text, position, a, same in zip(span.text, span.position, kept, argmax, strict=True):
                rates[members[text]][span.depth, position] = a
                if span.depth == 0:
                    agreed[members[text]] += int(same)
    for generation, a in zip(generations, rates, strict=True):
        if len(generation.prompt.tokens) < 2:
            # The engine drafts only after two tokens.
            a[:, :1] = 0.0
    return [Acceptance(a, same) for a, same in zip(rates, agreed, strict=True)]


def _kind(sampling: Sampling) -> tuple[bool, ...]:
    if sampling.greedy:
        return (True,)
    filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.top_k > 0
    return (False, sampling.seed is not None, filtered)


def _span(span: Span, generations: Sequence[Generation]) -> tuple[Doubles, NDArray[np.bool_]]:
    """Rates and argmax agreement of one span."""
    owners = [generations[text] for text in span.text]
    emitted = mx.array([owner.output[i] for owner, i in zip(owners, span.position, strict=True)], dtype=mx.int32)
    usable = mx.isfinite(span.logits.max(axis=-1))
    same = (mx.argmax(span.logits, axis=-1) == emitted) & usable
    batch = SamplingBatch.of([owner.prompt.sampling for owner in owners], span.logits.shape[-1])
    if not batch.sampled:
        mx.eval(same)
        return np.array(same, dtype=np.float64), np.array(same, dtype=np.bool_)
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
    kept = mx.where(usable, mx.where(batch.rejection, ratio, matched.astype(mx.float32)), 0.0)
    mx.eval(kept, same)
    return np.array(kept, dtype=np.float64), np.array(same, dtype=np.bool_)


def overlap(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    vocabulary: int,
    between: Callable[[], object] = lambda: None,
) -> list[Doubles]:
    """Sum of min(p, q) over the vocabulary at T = 1 at every output position: the acceptance of unfiltered sampling, of the
    first token of a proposal.

    From the stored targets: exact over the top, and min of both tails for the rest, which is the upper end of what the
    rest can hold. Raises ValueError when a generation has none.
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
        rest = mx.minimum(mx.exp(tail), mx.maximum(1.0 - q.sum(axis=-1), 0.0))
        both = np.array(mx.minimum(mx.exp(logp), q).sum(axis=-1) + rest)
        for text, position, value in zip(span.text, span.position, both, strict=True):
            found[text][position] = value
    return found
