"""Who proposes tokens. A Drafter sees the rows as they stand and answers with up to K tokens per row and their q."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.engine import device
from service.engine.adapters import Draft
from service.engine.kv.cache import RowCache
from service.engine.planner import DraftSteps
from service.engine.sampling import SamplingBatch, SharedNoise, draw, fit, normaliser, transform
from service.engine.strategy import current
from service.models.heads import Backbone, CutHead, Head, cut_head, split, token_limit
from service.models.vocabulary import ExtraIds, padded

WIDE = 8
"""Tokens of one row that a first draft step takes in besides the last one, where a row fell behind."""


READING = 256
"""Tokens of all rows that a draft which fell behind reads in one round."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """tokens: (B, K). logq: (B, K, V) what they were drawn from, None when no row needs it. logits: the draft's of each
    position, (B, 1, V), none of what was looked up. usable: (B, K) false where nothing was proposed, or by a draft whose
    logits were not finite."""

    tokens: mx.array
    logq: mx.array | None
    logits: tuple[mx.array, ...]
    usable: mx.array


def looked_up(found: Sequence[Sequence[int]], k: int, vocabulary: int, unseeded: bool) -> Proposal:
    """Tokens without a distribution, up to k per row: q is 1 at them."""
    tokens, usable = np.zeros((len(found), k), dtype=np.int32), np.zeros((len(found), k), dtype=np.bool_)
    for i, row in enumerate(found):
        tokens[i, : len(row)] = row
        usable[i, : len(row)] = True
    proposed = mx.array(tokens)
    certain = mx.where(mx.arange(vocabulary) == proposed[..., None], 0.0, -float("inf")) if unseeded else None
    return Proposal(proposed, certain, (), mx.array(usable.tolist()))


def joined(drafted: Proposal, found: Proposal, rows: Sequence[bool]) -> Proposal:
    """One proposal of two of the same length: row b is `found`'s where rows[b]."""
    pick = mx.array(list(rows))[:, None]
    logq = None
    if drafted.logq is not None and found.logq is not None:
        logq = mx.where(pick[..., None], found.logq, drafted.logq)
    return Proposal(
        tokens=mx.where(pick, found.tokens, drafted.tokens),
        logq=logq,
        logits=drafted.logits,
        usable=mx.where(pick, found.usable, drafted.usable),
    )


def instead(
    drafted: Proposal | None, told: Sequence[Sequence[int]], k: int, vocabulary: int, unseeded: bool
) -> Proposal | None:
    """What was drafted, k tokens a row, and for rows that have something looked up that instead."""
    if not any(told):
        return drafted
    found = looked_up(told, k, vocabulary, unseeded)
    return found if drafted is None else joined(drafted, found, [len(row) > 0 for row in told])


class Drafter(Protocol):
    """What proposes tokens for a batch."""

    def propose(
        self, rows: Sequence[Sequence[int]], steps: DraftSteps, batch: SamplingBatch, noise: SharedNoise, key: mx.array
    ) -> Proposal | None:
        """Propose as many tokens after each row's tokens (at least two each) as `steps` says; None: not yet. noise: shared with
        the target."""
        ...


class ModelDrafter:
    """Drafts with a model of its own, whose KV rows run in step with the batch. vocabulary: the width of the target's logits.
    target: the target's cache of that batch.

    The first step of a round reads the tokens of each row that the draft has not read: the newest one, before it the last
    proposal when all were accepted, and whatever a row that fell behind has missed. Only the last of them needs logits, so
    the head runs there alone where the family allows it.
    """

    def __init__(self, draft: Draft, vocabulary: int, target: RowCache) -> None:
        self.vocabulary = vocabulary
        self.target = target
        self.strategy = current()
        self.cache = RowCache(draft.model, 0)
        self.switch(draft)

    def switch(self, draft: Draft) -> None:
        """Propose with another version of the same draft from now on. Rows under way keep keys and values of the old one:
        slightly stale guesses cost acceptance for the rest of that row, a new prefill would cost every row a pause."""
        self.draft = draft
        self._limit = token_limit(draft.model)
        self._parts: tuple[Backbone, Head] | None = None
        self._looked = False
        self._extra: dict[int, ExtraIds] = {}
        """By the id of each row's list of tokens."""

    def propose(
        self, rows: Sequence[Sequence[int]], steps: DraftSteps, batch: SamplingBatch, noise: SharedNoise, key: mx.array
    ) -> Proposal | None:
        """See Drafter. None while rows are still being caught up with (`catch_up`)."""
        if not self.catch_up(rows):
            return None
        if not self._looked:
            # Not when it was switched to: whatever is wrong with a draft shows where it is caught. Nor later: rows are about to
            # name tokens of their own.
            self._parts, self._looked = self.parts(), True
        head = cut_head(self.draft.model)
        if head is None:
            return self._propose(rows, steps, batch, noise, key, head)
        # A cut head proposes what the row itself has shown besides: names and words of its topic come back.
        head.allow_extra_ids(mx.array(self._extra_ids(rows, head)))
        try:
            return self._propose(rows, steps, batch, noise, key, head)
        finally:
            head.allow_extra_ids(None)

    def _extra_ids(self, rows: Sequence[Sequence[int]], head: CutHead) -> NDArray[np.int32]:
        """Extra ids (B, n) of each row, of which only new tokens are read: rows keep their list of tokens while they grow."""
        extra = [self._extra.get(id(row)) for row in rows]
        extra = [
            known if known and known.tokens is row else ExtraIds(row, head.in_vocabulary)
            for row, known in zip(rows, extra, strict=True)
        ]
        self._extra = {id(each.tokens): each for each in extra}
        return padded([each.update() for each in extra], head.in_vocabulary)

    def _propose(
        self,
        rows: Sequence[Sequence[int]],
        steps: DraftSteps,
        batch: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        head: CutHead | None,
    ) -> Proposal:
        unread = [row[have:] for row, have in zip(rows, self.cache.lengths.host, strict=True)]
        feed = ragged(unread, self.cache)
        tokens: list[mx.array] = []
        kept_logits: list[mx.array] = []
        laws: list[mx.array] = []
        unheard: list[mx.array] = []
        for step in range(steps.most):
            whole = self._after(feed, [len(tokens) - 1 for tokens in unread] if step == 0 else None)
            logits = fit(whole, self.vocabulary)
            self.cache.rewind([len(row) + step for row in rows])
            law = transform(logits, batch)
            if batch.unseeded:
                key, step_key = mx.random.split(key)
            else:
                step_key = key
            feed = draw(law, batch, noise.at(step), step_key).astype(mx.int32)
            tokens.append(feed)
            kept_logits.append(logits)
            laws.append(law)
            if self.strategy.launch_steps:
                device.launch(feed)
            if steps.stops and step < steps.stops[-1]:
                unheard.append(confidence(whole, feed, head))
            if step + 1 in steps.stops:
                if not steps.more(heard(unheard)):
                    break
                unheard.clear()
        return Proposal(
            tokens=mx.concatenate(tokens, axis=1),
            logq=mx.concatenate(laws, axis=1) if batch.unseeded else None,
            logits=tuple(kept_logits),
            usable=mx.concatenate([mx.isfinite(logits.max(axis=-1)) for logits in kept_logits], axis=1),
        )

    def _after(self, feed: mx.array, last: list[int] | None) -> mx.array:
        """Logits (B, 1, V) after position last[b] of each row's feed (B, N); None: after the only one, which follows what was
        drafted before it."""
        out = self.run(feed, first=last is not None)
        if last is not None and feed.shape[1] > 1:
            out = mx.take_along_axis(out, mx.array(last)[:, None, None], axis=1)
        return self.told(out)

    def parts(self) -> tuple[Backbone, Head] | None:
        """What is run instead of the whole, so that the head runs only where its logits are wanted; None: the whole."""
        return split(self.draft.model)

    def run(self, feed: mx.array, *, first: bool) -> mx.array:
        """Run the model, or its backbone, over feed (B, N): the first call of a round, or one drafted token a row. Returns
        (B, N, ...), for `told`."""
        if self._parts is None:
            return self.feed(feed, self.cache, self.target)
        return self._parts[0](self.known(feed), self.cache.layers)

    def told(self, out: mx.array) -> mx.array:
        """Logits (B, 1, V) from what `run` made of one position a row."""
        return out if self._parts is None else self._parts[1](out)

    def feed(self, tokens: mx.array, cache: RowCache, target: RowCache) -> mx.array:
        """Read tokens (B, N) behind what `cache` holds; target: the target's cache of the same rows. (B, N, ...), of which only
        the model itself knows more."""
        return self.draft.model(self.known(tokens), cache=cache.layers)

    def known(self, tokens: mx.array) -> mx.array:
        """Tokens (B, N), where ids that only a wider target has are replaced by the last one that the draft has."""
        if self._limit is None or self._limit >= self.vocabulary:
            return tokens
        return mx.minimum(tokens, self._limit - 1)

    def readable(self, target: RowCache) -> int:
        """Positions of a prompt that can be read when the target holds what is in its cache of one row."""
        return sys.maxsize

    def unread(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that were not read, but for each row's last."""
        return sum(max(len(row) - 1 - have, 0) for row, have in zip(rows, self.cache.lengths.host, strict=True))

    def behind(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether a row was decoded without drafts for so long that catching up is work of its own."""
        return any(have + WIDE < len(row) - 1 for row, have in zip(rows, self.cache.lengths.host, strict=True))

    def catch_up(self, rows: Sequence[Sequence[int]]) -> bool:
        """Leave every row at least one token to read and at most WIDE more; False when that takes more than this round.

        Rows that fell further behind are fed what they have not seen, all in one ragged call, no more in a round than READING:
        whoever waits for a token waits for this too.
        """
        self.cache.rewind([min(have, len(row) - 1) for row, have in zip(rows, self.cache.lengths.host, strict=True)])
        if not self.behind(rows):
            return True
        held = self.cache.lengths.host
        share = max(READING // len(rows), WIDE)
        missing = [row[have : min(len(row) - 1, have + share)] for row, have in zip(rows, held, strict=True)]
        self.feed(ragged(missing, self.cache), self.cache, self.target)
        device.wait(self.cache.arrays())
        self.cache.rewind([have + len(tokens) for have, tokens in zip(held, missing, strict=True)])
        return not self.behind(rows)


def confidence(logits: mx.array, drawn: mx.array, head: CutHead | None) -> mx.array:
    """The probability (B, 1) of each row's token at T = 1. Where the head is cut, over what it keeps: exponentials are dear on
    a CPU, and what a row has shown besides changes little."""
    narrow = logits if head is None else head.reduced_logits(logits)
    said = mx.take_along_axis(logits, drawn[..., None], axis=-1).astype(mx.float32)
    return mx.minimum(mx.exp(said - normaliser(narrow)), 1.0)[..., 0]


def heard(sure: Sequence[mx.array]) -> list[list[float]]:
    """Wait for the draft's confidence: probabilities (B, 1) of some steps, as lists by step and row; 0 where a row's logits
    are not finite."""
    (read,) = device.read(mx.concatenate(list(sure), axis=1))
    return np.nan_to_num(read.T, nan=0.0).tolist()


def ragged(texts: Sequence[Sequence[int]], cache: RowCache | None = None) -> mx.array:
    """(B, longest) with zeros behind the shorter ones, which the next write covers; padded further where that suits the device
    and the cache that is to hold them."""
    width = max(map(len, texts))
    if cache is not None and not cache.states:
        width = current().width(width)
    feed = np.zeros((len(texts), width), dtype=np.int32)
    for line, tokens in zip(feed, texts, strict=True):
        line[: len(tokens)] = tokens
    return mx.array(feed)
