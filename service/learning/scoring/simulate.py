"""The rounds a draft would have had on a greedy or seeded text, and the failure cases they would have left. This is
what the engine logs at a fixed draft length, obtained without decoding (docs/decisions/training.md, "Scoring")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.core import AcceptRule, FailureCase, Generation, Round
from service.engine.sampling import SamplingBatch, choose, shared_noise, transform
from service.learning.draft_steps import step_count
from service.learning.examples import Floats, Ints, unpack
from service.learning.masks import NO_MASKS, Masks
from service.learning.teacher_forcing import Span, response_logits

TIE_MARGIN = 1e-3
"""Nats below which a rejection counts as a tie; the default of `engine.tie_margin`."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """generation: with the rounds and cases that the draft would have left. agreed: number of output tokens that are
    the draft's choice in its first step."""

    generation: Generation
    agreed: int


@dataclass(frozen=True, slots=True)
class _Proposals:
    """The draft's proposal at every output position of a text, by draft step. tokens: (steps, tokens). q: their
    probabilities at T = 1, (steps, tokens)."""

    tokens: NDArray[np.int64]
    q: NDArray[np.float64]


def simulate_rounds(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    k: int,
    adapter: int,
    vocabulary: int,
    masks: Masks = NO_MASKS,
) -> list[Simulated]:
    """The generations as if `model` had drafted `k` tokens a round. They must be greedy or seeded and have targets;
    otherwise raises ValueError.

    adapter: the id recorded for the rounds. vocabulary: width of the target's logits. masks: of answers that had to
    follow a grammar, which also restrict the draft. A case's p is 0 if its token is not among the target's stored ones.
    """
    if any(g.prompt.sampling.rule is not AcceptRule.MATCH or g.targets is None for g in generations):
        raise ValueError("rounds can only be simulated for greedy and seeded generations with targets")
    steps = step_count(model, k)
    proposals = [
        _Proposals(np.zeros((steps, len(g.output)), dtype=np.int64), np.zeros((steps, len(g.output))))
        for g in generations
    ]
    for greedy in (True, False):
        # Greedy texts form a separate group: noise over the vocabulary costs more than everything else.
        members = [i for i, g in enumerate(generations) if g.prompt.sampling.greedy is greedy]
        texts = [(generations[i].prompt.tokens, generations[i].output) for i in members]
        text_masks = [masks.get(generations[i].id) for i in members]
        for span in response_logits(model, texts, vocabulary=vocabulary, steps=steps, masks=text_masks):
            chosen, q = _choice(span, [generations[members[text]] for text in span.text])
            for text, at, token, probability in zip(span.text, span.position, chosen, q, strict=True):
                found = proposals[members[text]]
                found.tokens[span.step, at], found.q[span.step, at] = token, probability
    return [_with_rounds(g, found, k, adapter) for g, found in zip(generations, proposals, strict=True)]


def walk_rounds(matches: NDArray[np.bool_], k: int, first: int) -> list[tuple[int, int, int, int]]:
    """(start, drafted, accepted, emitted) of every round. matches: (steps, tokens), whether the draft's token at each
    output position is the emitted one, by draft step; later steps use the last row. first: draft length of the first
    round; `k`: of all others."""
    steps, count = matches.shape
    found: list[tuple[int, int, int, int]] = []
    start, drafted = 0, first
    while start < count:
        tested = min(drafted, count - start)
        accepted = next((i for i in range(tested) if not matches[min(i, steps - 1), start + i]), tested)
        emitted = min(accepted + 1, count - start)
        # Positions past the end of the text are not counted, as in the engine.
        found.append((start, drafted if start + emitted < count else min(drafted, emitted), accepted, emitted))
        start, drafted = start + emitted, k
    return found


def _choice(span: Span, owners: Sequence[Generation]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The draft's proposal at every position of a span, and its probability at T = 1; 0 if no token that it may propose
    is allowed."""
    width = span.logits.shape[-1]
    batch = SamplingBatch.of([owner.prompt.sampling for owner in owners], width)
    logprobs = transform(span.logits[:, None], batch)
    chosen = choose(logprobs, shared_noise(batch, span.position, 1, width))
    logits = mx.take_along_axis(span.logits, chosen, axis=-1)[:, 0]
    q = mx.where(mx.isfinite(logits), mx.exp(logits - mx.logsumexp(span.logits, axis=-1)), 0.0)
    mx.eval(chosen, q)
    return np.array(chosen[:, 0], dtype=np.int64), np.array(q)


def _with_rounds(g: Generation, proposals: _Proposals, k: int, adapter: int) -> Simulated:
    assert g.targets is not None
    ids, logprobs, _ = unpack(g.targets)
    matches = proposals.tokens == np.array(g.output)
    rounds: list[Round] = []
    cases: list[FailureCase] = []
    # The engine does not draft before a text has two tokens.
    for start, drafted, accepted, emitted in walk_rounds(matches, k, k if len(g.prompt.tokens) > 1 else 0):
        rounds.append(Round(adapter, start, drafted, accepted, emitted))
        at = start + accepted
        if accepted == drafted or emitted <= accepted:
            continue
        place = min(accepted, len(matches) - 1), at
        token, q = int(proposals.tokens[place]), float(proposals.q[place])
        if g.grammar is not None and q == 0.0:
            continue  # As in the engine: the grammar, not the target, rejected the token.
        if g.prompt.sampling.penalised and token == ids[at][0]:
            continue  # As above: a penalty, not the target's preference, rejected the token.
        cases.append(_case(g, at, token, q, ids[at], logprobs[at]))
    return Simulated(replace(g, rounds=tuple(rounds), cases=tuple(cases)), int(matches[0].sum()))


def _case(g: Generation, at: int, token: int, q: float, ids: Ints, logprobs: Floats) -> FailureCase:
    """ids, logprobs: (top,) of the target at output position `at`."""
    stored = np.flatnonzero(ids == token)
    margin = float(logprobs[0] - logprobs[1]) if len(ids) > 1 else float("inf")
    return FailureCase(
        position=at,
        drafted=token,
        target=g.output[at],
        p=float(np.exp(logprobs[stored[0]])) if len(stored) else 0.0,
        q=q,
        margin=margin,
        tie=margin < TIE_MARGIN,
    )
