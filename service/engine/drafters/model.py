"""Drafts with a model of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.engine import device
from service.engine.adapters import Draft
from service.engine.drafters.proposal import Proposal
from service.engine.kv.cache import RowCache
from service.engine.planner import DraftSteps
from service.engine.replay import Replay
from service.engine.sampling import SamplingBatch, SharedNoise, draw, fit, normaliser, transform
from service.engine.strategy import current
from service.models.heads import CutHead, cut_head, split, token_limit
from service.models.vocabulary import ExtraIds, padded

MAX_LAG = 8
"""Tokens of one row that the first draft step of a round takes besides the last one, where the draft's cache lags behind."""
CATCH_UP = 256
"""Tokens of all rows that a draft whose cache lags further takes in one round."""


@dataclass(frozen=True, slots=True)
class DraftCalls:
    """A draft's calls in two parts. hidden: runs the backbone over arrays, the first of which are tokens (B, N), and a cache;
    returns (B, N, ...) for `head`, which returns logits (B, 1, V) from one position of each row."""

    hidden: Callable[[Sequence[mx.array], RowCache], mx.array]
    head: Callable[[mx.array], mx.array]

    @classmethod
    def of(cls, model: nn.Module) -> DraftCalls:
        """Backbone and output head of a model; where it cannot be split the whole is the first part."""
        parts = split(model)
        if parts is None:
            # A cut head is given other extra ids in every round, which a trace would not see.
            replayed = cut_head(model) is None
            return cls.over(
                model, lambda arrays, cache: model(arrays[0], cache=cache.layers), lambda out: out, replayed
            )
        backbone, head = parts
        return cls.over(model, lambda arrays, cache: backbone(arrays[0], cache.layers), head)

    @classmethod
    def over(
        cls,
        model: nn.Module,
        hidden: Callable[[Sequence[mx.array], RowCache], mx.array],
        head: Callable[[mx.array], mx.array],
        replayed: bool = True,
    ) -> DraftCalls:
        """Parts that are given. replayed: the first is traced and replayed where the device gains by it."""
        if not replayed:
            return cls(hidden, head)
        replay = Replay(model, lambda arrays, cache: (hidden(arrays, cache),))
        return cls(lambda arrays, cache: replay(arrays, cache)[0], head)

    def logits(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """Logits (B, N, V) of a draft that reads tokens alone."""
        return self.head(self.hidden([tokens], cache))


class ModelDrafter:
    """Proposes with a draft model, whose KV cache has the batch's rows. vocabulary: width of the target's logits. target: the
    target's cache of the batch.

    The first step of a round takes each row's tokens that are not in the draft's cache: the newest one, before it the last
    proposed one when all were accepted, and others where the cache lags. Only the last of them needs logits, so the output head
    runs there alone where the family allows it.
    """

    def __init__(self, draft: Draft, vocabulary: int, target: RowCache) -> None:
        self.vocabulary = vocabulary
        self.target = target
        self.strategy = current()
        self.cache = RowCache(draft.model, 0)
        self.switch(draft)

    def switch(self, draft: Draft) -> None:
        """Propose with another version of the same draft from now on. Rows keep the keys and values of the old one: that lowers
        acceptance for the rest of a row, where a new prefill would pause every row."""
        self.draft = draft
        self._limit = token_limit(draft.model)
        self._calls: DraftCalls | None = None
        """Made by the first proposal, where errors of a draft are caught, and before a cut head is given extra ids."""
        self._extra: dict[int, ExtraIds] = {}
        """By the id of each row's list of tokens."""

    def propose(
        self, rows: Sequence[Sequence[int]], steps: DraftSteps, batch: SamplingBatch, noise: SharedNoise, key: mx.array
    ) -> Proposal | None:
        """See Drafter. None while the cache of some row lags (`catch_up`)."""
        if not self.catch_up(rows):
            return None
        if self._calls is None:
            self._calls = self.make_calls()
        head = cut_head(self.draft.model)
        if head is None:
            return self._propose(rows, steps, batch, noise, key, head)
        # Names and words of a row's topic come back.
        head.allow_extra_ids(mx.array(self._extra_ids(rows, head)))
        try:
            return self._propose(rows, steps, batch, noise, key, head)
        finally:
            head.allow_extra_ids(None)

    def _extra_ids(self, rows: Sequence[Sequence[int]], head: CutHead) -> NDArray[np.int32]:
        """Extra ids (B, n) of each row, of which only new tokens are read: rows keep their list of tokens while they grow."""
        before = [self._extra.get(id(row)) for row in rows]
        extra = [
            known if known and known.tokens is row else ExtraIds(row, head.in_vocabulary)
            for row, known in zip(rows, before, strict=True)
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
        unread = [row[length:] for row, length in zip(rows, self.cache.lengths.host, strict=True)]
        feed = pad_rows(unread, self.cache)
        tokens: list[mx.array] = []
        all_logits: list[mx.array] = []
        distributions: list[mx.array] = []
        confidences: list[mx.array] = []
        for step in range(steps.most):
            whole = self._step(feed, [len(tokens) - 1 for tokens in unread] if step == 0 else None)
            logits = fit(whole, self.vocabulary)
            self.cache.rewind([len(row) + step for row in rows])
            distribution = transform(logits, batch)
            if batch.unseeded:
                key, step_key = mx.random.split(key)
            else:
                step_key = key
            feed = draw(distribution, batch, noise.at(step), step_key).astype(mx.int32)
            tokens.append(feed)
            all_logits.append(logits)
            distributions.append(distribution)
            if self.strategy.launch_steps:
                device.launch(feed)
            if steps.stops and step < steps.stops[-1]:
                confidences.append(confidence(whole, feed, head))
            if step + 1 in steps.stops:
                if not steps.more(read_confidences(confidences)):
                    break
                confidences.clear()
        return Proposal(
            tokens=mx.concatenate(tokens, axis=1),
            logq=mx.concatenate(distributions, axis=1) if batch.unseeded else None,
            logits=tuple(all_logits),
            # An infinite or undefined largest logit.
            usable=mx.abs(mx.concatenate([logits.max(axis=-1) for logits in all_logits], axis=1)) < float("inf"),
        )

    def _step(self, feed: mx.array, last: list[int] | None) -> mx.array:
        """Logits (B, 1, V) after position last[b] of each row's feed (B, N). None: of a step over one drafted token a row."""
        assert self._calls is not None
        out = self._calls.hidden(self.inputs(self.clamp_ids(feed), first=last is not None), self.cache)
        if last is not None and feed.shape[1] > 1:
            out = mx.take_along_axis(out, mx.array(last)[:, None, None], axis=1)
        return self.logits(self._calls, out)

    def make_calls(self) -> DraftCalls:
        """The calls of this draft."""
        return DraftCalls.of(self.draft.model)

    def inputs(self, tokens: mx.array, *, first: bool) -> list[mx.array]:
        """What the backbone reads: tokens (B, N), and what the kind of draft needs. first: in the first step of a round."""
        return [tokens]

    def logits(self, calls: DraftCalls, out: mx.array) -> mx.array:
        """Logits (B, 1, V) from one position a row of what the backbone returned."""
        return calls.head(out)

    def extend(self, tokens: mx.array, cache: RowCache, target: RowCache) -> mx.array:
        """Append tokens (B, N) to the rows of `cache`. target: the target's cache of the same rows. Returns the model's output,
        (B, N, ...)."""
        return self.draft.model(self.clamp_ids(tokens), cache=cache.layers)

    def clamp_ids(self, tokens: mx.array) -> mx.array:
        """Tokens (B, N), where ids that only the target has are replaced by the draft's last one."""
        if self._limit is None or self._limit >= self.vocabulary:
            return tokens
        return mx.minimum(tokens, self._limit - 1)

    def prefill_limit(self, target: RowCache) -> int:
        """Positions of a prompt that the draft can prefill when the target has prefilled what is in `target`."""
        return sys.maxsize

    def unread(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that are not in the draft's cache, each row's last one apart."""
        return sum(max(len(row) - 1 - length, 0) for row, length in zip(rows, self.cache.lengths.host, strict=True))

    def lags(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether the cache lacks more tokens of a row than a draft step takes: it decoded without drafts for some time."""
        return any(length + MAX_LAG < len(row) - 1 for row, length in zip(rows, self.cache.lengths.host, strict=True))

    def catch_up(self, rows: Sequence[Sequence[int]]) -> bool:
        """Prefill rows whose cache lags, in one ragged call of CATCH_UP tokens at most, since every row waits for it. Leaves
        every row one token to read at least. Returns whether no row lags any more."""
        cache = self.cache
        cache.rewind([min(length, len(row) - 1) for row, length in zip(rows, cache.lengths.host, strict=True)])
        if not self.lags(rows):
            return True
        lengths = cache.lengths.host
        share = max(CATCH_UP // len(rows), MAX_LAG)
        missing = [row[n : min(len(row) - 1, n + share)] for row, n in zip(rows, lengths, strict=True)]
        self.extend(pad_rows(missing, cache), cache, self.target)
        device.wait(cache.arrays())
        cache.rewind([n + len(tokens) for n, tokens in zip(lengths, missing, strict=True)])
        return not self.lags(rows)


def confidence(logits: mx.array, drawn: mx.array, head: CutHead | None) -> mx.array:
    """The draft's probability (B, 1) of each row's token at T = 1; where the head is cut, over the reduced vocabulary, whose
    exponentials are fewer."""
    narrow = logits if head is None else head.reduced_logits(logits)
    chosen = mx.take_along_axis(logits, drawn[..., None], axis=-1).astype(mx.float32)
    return mx.minimum(mx.exp(chosen - normaliser(narrow)), 1.0)[..., 0]


def read_confidences(confidences: Sequence[mx.array]) -> list[list[float]]:
    """Wait for confidences (B, 1) of some steps. Returns them by step and row, 0 where a row's logits are not finite."""
    (read,) = device.read(mx.concatenate(list(confidences), axis=1))
    return np.nan_to_num(read.T, nan=0.0).tolist()


def pad_rows(texts: Sequence[Sequence[int]], cache: RowCache | None = None) -> mx.array:
    """Tokens (B, longest), zeros behind shorter texts, which the next write overwrites; wider where the device wants few widths
    and the layers of `cache` allow it."""
    width = max(map(len, texts))
    if cache is not None and not cache.states:
        width = current().width(width)
    feed = np.zeros((len(texts), width), dtype=np.int32)
    for line, tokens in zip(feed, texts, strict=True):
        line[: len(tokens)] = tokens
    return mx.array(feed)
