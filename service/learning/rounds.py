"""The rounds a draft would have had on a greedy or seeded text, and the cases they would have left: what the engine logs at a
fixed draft length, without decoding. Such a text is the same whatever drafted it, and the draft's choice at every position is
too (under a seed by the same noise; of a draft that reads hidden states, by the token's place in its proposal), so one
teacher-forced pass of the draft tells. Under rejection neither the draft's choice nor the target's word on it is settled by the
text: such texts have no one course of rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.core import AcceptRule, FailureCase, Generation, Round
from service.engine.sampling import SamplingBatch, choose, shared_noise, transform
from service.learning.dataset import unpack
from service.learning.forced import Span, response_logits
from service.learning.masks import NO_MASKS, Masks
from service.learning.steps import depths


@dataclass(frozen=True, slots=True)
class Drafted:
    """A generation with the rounds and cases that a draft would have left. agreed: output tokens that are its choice, were each
    the first of a proposal."""

    generation: Generation
    agreed: int


def walk(kept: NDArray[np.bool_], k: int, first: int) -> list[tuple[int, int, int, int]]:
    """(start, drafted, accepted, emitted) of every round. kept: (depths, tokens) whether the draft's token at each output
    position is the one that was emitted, by its place in a proposal, later ones as the last. first: tokens drafted in the first
    round, `k` in all others."""
    depth, count = kept.shape
    found: list[tuple[int, int, int, int]] = []
    start, drafted = 0, first
    while start < count:
        tried = min(drafted, count - start)
        accepted = next((i for i in range(tried) if not kept[min(i, depth - 1), start + i]), tried)
        emitted = min(accepted + 1, count - start)
        # Positions behind the end of the text are not counted, as in the engine.
        found.append((start, drafted if start + emitted < count else min(drafted, emitted), accepted, emitted))
        start, drafted = start + emitted, k
    return found


def logged(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    k: int,
    adapter: int,
    vocabulary: int,
    tie_margin: float = 1e-3,
    masks: Masks = NO_MASKS,
    between: Callable[[], object] = lambda: None,
) -> list[Drafted]:
    """Greedy and seeded generations with targets, as they would be had `model` drafted `k` tokens a round.

    masks: of answers that had to follow a grammar, under which the draft proposes. A case's p is 0 where its token is not among
    the target's stored ones. Raises ValueError for a generation that is sampled without a seed or has no targets.
    """
    if any(g.prompt.sampling.rule is not AcceptRule.MATCH or g.targets is None for g in generations):
        raise ValueError("only greedy and seeded generations with targets have one course of rounds")
    depth = depths(model, k)
    guesses = [np.zeros((depth, len(g.output)), dtype=np.int64) for g in generations]
    sure = [np.zeros((depth, len(g.output))) for g in generations]
    for greedy in (True, False):
        # Apart: noise over the vocabulary costs more than the rest.
        members = [i for i, g in enumerate(generations) if g.prompt.sampling.greedy is greedy]
        texts = [(generations[i].prompt.tokens, generations[i].output) for i in members]
        held = [masks.get(generations[i].id) for i in members]
        for span in response_logits(model, texts, vocabulary=vocabulary, between=between, depth=depth, masks=held):
            chosen, q = _choice(span, [generations[members[text]] for text in span.text])
            for text, at, token, mass in zip(span.text, span.position, chosen, q, strict=True):
                guesses[members[text]][span.depth, at], sure[members[text]][span.depth, at] = token, mass
    return [_told(g, guess, q, k, adapter, tie_margin) for g, guess, q in zip(generations, guesses, sure, strict=True)]


def _choice(span: Span, owners: Sequence[Generation]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What the draft would have proposed at every position of a span, and its probability at T = 1; 0 where it may propose no
    token that is allowed."""
    width = span.logits.shape[-1]
    batch = SamplingBatch.of([owner.prompt.sampling for owner in owners], width)
    law = transform(span.logits[:, None], batch)
    chosen = choose(law, shared_noise(batch, span.position, 1, width))
    taken = mx.take_along_axis(span.logits, chosen, axis=-1)[:, 0]
    q = mx.where(mx.isfinite(taken), mx.exp(taken - mx.logsumexp(span.logits, axis=-1)), 0.0)
    mx.eval(chosen, q)
    return np.array(chosen[:, 0], dtype=np.int64), np.array(q)


def _told(
    g: Generation, guess: NDArray[np.int64], q: NDArray[np.float64], k: int, adapter: int, tie_margin: float
) -> Drafted:
    """guess, q: (depths, tokens)."""
    assert g.targets is not None
    ids, logprobs, _ = unpack(g.targets)
    kept = guess == np.array(g.output)
    rounds: list[Round] = []
    cases: list[FailureCase] = []
    # The engine drafts only after two tokens.
    for start, drafted, accepted, emitted in walk(kept, k, k if len(g.prompt.tokens) > 1 else 0):
        rounds.append(Round(adapter, start, drafted, accepted, emitted))
        at = start + accepted
        if accepted == drafted or emitted <= accepted:
            continue
        place = min(accepted, len(guess) - 1), at
        if g.grammar is not None and q[place] == 0.0:
            continue  # as in the engine: what a grammar forbids was not the target's to reject
        known = np.flatnonzero(ids[at] == guess[place])
        margin = float(logprobs[at, 0] - logprobs[at, 1]) if ids.shape[1] > 1 else float("inf")
        cases.append(
            FailureCase(
                position=at,
                drafted=int(guess[place]),
                target=g.output[at],
                p=float(np.exp(logprobs[at, known[0]])) if len(known) else 0.0,
                q=float(q[place]),
                margin=margin,
                tie=margin < tie_margin,
            )
        )
    return Drafted(replace(g, rounds=tuple(rounds), cases=tuple(cases)), int(kept[0].sum()))
