"""Drafting with a draft model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.engine import device, products
from service.engine.activations import Activations
from service.engine.adapters import Draft
from service.engine.drafters.proposal import Proposal, Unread
from service.engine.kv.cache import RowCache
from service.engine.kv.pool import Pool
from service.engine.masks import RoundMasks, allow
from service.engine.planner import DraftSteps
from service.engine.replay import Replay
from service.engine.sampling import SamplingBatch, SharedNoise, biased, draw, fit, normaliser, transform
from service.engine.strategy import current
from service.models.heads import CutHead, cut_head, extra_ids_allowed, split, token_limit
from service.models.vocabulary import ExtraIds, padded

MAX_LAG = 8
"""Tokens of one row, besides the newest, that the first draft step of a round takes if the draft's cache lags behind."""


@dataclass(frozen=True, slots=True)
class DraftCalls:
    """A draft's call in two parts. hidden: runs the backbone over tokens (B, N), or tokens and features (B, N, width), and a
    cache; returns (B, N, ...). head: turns one position of each row of that into logits (B, 1, V)."""

    hidden: Callable[[Sequence[mx.array], RowCache], mx.array]
    head: Callable[[mx.array], mx.array]
    split: bool = True
    """Whether the output head is separate from the first part."""

    @classmethod
    def of(cls, model: nn.Module) -> DraftCalls:
        """Backbone and output head of a model. If it cannot be split, the first part is the whole model."""
        parts = split(model)
        if parts is None:
            return cls(lambda arrays, cache: model(arrays[0], cache=cache.layers), lambda out: out, split=False)
        backbone, head = parts
        return cls(lambda arrays, cache: backbone(arrays[0], cache.layers), head)

    def replayed(self, model: nn.Module) -> DraftCalls:
        """The same calls for this model, with the first part traced and replayed if the device benefits."""
        if not self.split and cut_head(model) is not None:
            # A cut head gets different extra ids in every round, which a trace would not see.
            return self
        replay = Replay(model, self.hidden)
        return DraftCalls(lambda arrays, cache: replay(arrays, cache, arrays[0].shape[1]), self.head)

    def logits(self, tokens: mx.array, cache: RowCache) -> mx.array:
        """Logits (B, N, V) of a draft that reads only tokens."""
        return self.head(self.hidden([tokens], cache))


@dataclass(frozen=True, slots=True)
class _Drafted:
    """A draft step. token: (B, 1). whole: the draft's logits (B, 1, W). logits, distribution: (B, 1, V), before and after the
    sampling transform, without tokens that a mask forbids. masked: whether a mask was applied."""

    token: mx.array
    whole: mx.array
    logits: mx.array
    distribution: mx.array
    masked: bool


class ModelDrafter:
    """Proposes with a draft model, whose KV cache has the batch's rows. vocabulary: width of the target's logits. target: the
    target's cache of the batch. chunk: tokens per call when the draft catches up.

    The first step of a round takes each row's tokens that are not in the draft's cache: the newest one, preceded by the last
    proposed one if all were accepted, and more if the cache lags. Only the newest needs logits, so the output head runs on it
    alone if the model family allows it.
    """

    def __init__(self, draft: Draft, vocabulary: int, target: RowCache, chunk: int) -> None:
        self.vocabulary = vocabulary
        self._chunk = chunk
        self.target = target
        self.strategy = current()
        self.activations = Activations.of(draft.model)
        self.pool = Pool()
        """Where all caches of the draft take pages, if rows are paged."""
        self.switch(draft)
        self.cache = self.new_cache(0)

    def switch(self, draft: Draft) -> None:
        """Propose with another version of the same draft from now on. Rows keep the old version's keys and values. That lowers
        acceptance for the rest of a row, but a new prefill would pause every row."""
        self.draft = draft
        self._limit = token_limit(draft.model)
        self._calls: DraftCalls | None = None
        """Made by the first proposal, where errors of a draft are caught, and before a cut head gets extra ids."""
        self._replay = Replay(draft.model, self._propose_alike)
        self._extra: dict[int, ExtraIds] = {}
        """By the id of each row's list of tokens."""

    def new_cache(self, rows: int) -> RowCache:
        """An empty cache of the draft."""
        return RowCache(self.draft.model, rows, pool=self.pool)

    def propose(
        self,
        rows: Sequence[Sequence[int]],
        steps: DraftSteps,
        batch: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        after: Unread | None = None,
        masks: RoundMasks | None = None,
    ) -> Proposal | None:
        """Propose tokens after each row's tokens (two or more), as many as `steps` says. Returns None while some row's cache
        lags (`catch_up`).

        noise: shared with the target. after: the rows continue a drafted round that was not read yet. masks: of rows with a
        grammar.

        Where waiting is free, the grammar masks every token. Elsewhere it masks only the first, whose mask is known without a
        wait. Later tokens are proposed freely, and the target rejects forbidden ones.
        """
        if after is None and not self.catch_up(rows):
            return None
        if self._calls is None:
            self._calls = self.make_calls()
        head = cut_head(self.draft.model)
        # Ids from the row's text, because names and topic words recur.
        extra = None if head is None else mx.array(self._extra_ids(rows, head))
        if not self._feeds_alike:
            return self._propose_unread(rows, steps, batch, noise, key, extra, masks)
        if after is None:
            count = 2 if max(self._missing(rows)) <= 2 else MAX_LAG
            self.cache.rewind([len(row) - count for row in rows])
            feed = mx.array(np.array([row[-count:] for row in rows], dtype=np.int32))
        else:
            self.cache.follow(after.ends - 1, [n - 1 for n in after.most])
            feed = after.newest
        first, shared = self.inputs(self.clamp_ids(feed), first=True), noise.first(steps.most)
        fed = feed.shape[1] + steps.most - 1
        bits = None if masks is None else masks.bits([()] * len(rows))
        made = self._replay((first, extra, shared, key, steps.most, batch.leaves(), bits), self.cache, fed)
        self.cache.rewind([n + fed for n in self.cache.lengths.host])
        return Proposal(**made)

    @property
    def _feeds_alike(self) -> bool:
        """Whether the first step of a round feeds the same number of tokens in every row, so that shapes repeat: 2, since the
        last accepted token of a proposal was not fed, or MAX_LAG. Some may already be in the cache."""
        return self.strategy.launch_ahead and not self.cache.states

    @property
    def rereads(self) -> bool:
        """Whether it reads its accepted tokens again, because it knows more about them than when it proposed them."""
        return False

    def _missing(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """The number of each row's tokens that are not in the cache."""
        return [len(row) - length for row, length in zip(rows, self.cache.lengths.host, strict=True)]

    def release_rows(self) -> None:
        """Drop references to the rows it proposed for. Call only when none of them continues."""
        self._extra = {}

    def _extra_ids(self, rows: Sequence[Sequence[int]], head: CutHead) -> NDArray[np.int32]:
        """Extra ids (B, n) of each row. Only new tokens are read, because a row keeps its list of tokens while it grows."""
        before = [self._extra.get(id(row)) for row in rows]
        extra = [
            known if known and known.tokens is row else ExtraIds(row, head.in_vocabulary)
            for row, known in zip(rows, before, strict=True)
        ]
        self._extra = {id(each.tokens): each for each in extra}
        return padded([each.update() for each in extra], head.in_vocabulary)

    def _propose_unread(
        self,
        rows: Sequence[Sequence[int]],
        steps: DraftSteps,
        batch: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        extra: mx.array | None,
        masks: RoundMasks | None,
    ) -> Proposal:
        """A proposal whose first step feeds all tokens that are not in the cache, a different number in each row."""
        drafted: list[_Drafted] = []

        def bits(step: int) -> mx.array | None:
            if masks is None or (step and self.strategy.launch_ahead):
                return None
            before = device.read(*(each.token for each in drafted)) if drafted else []
            return masks.next_bits([[int(token[row, 0]) for token in before] for row in range(len(rows))])

        unread = [row[length:] for row, length in zip(rows, self.cache.lengths.host, strict=True)]
        head = cut_head(self.draft.model)
        with extra_ids_allowed(head, extra):
            first = self.inputs(self.clamp_ids(pad_rows(unread, self.cache)), first=True)
            confidences: list[mx.array] = []
            last = [len(tokens) - 1 for tokens in unread]
            for step in self._steps(first, last, batch, noise.at, key, self.cache, bits):
                drafted.append(step)
                count = len(drafted)
                self.cache.rewind([len(row) + count - 1 for row in rows])
                if self.strategy.launch_steps:
                    device.launch(step.token)
                if count == steps.most:
                    break
                if steps.stops and count <= steps.stops[-1]:
                    confidences.append(confidence(step.whole, step.token, head))
                if count in steps.stops:
                    if not steps.more(read_confidences(confidences)):
                        break
                    confidences.clear()
        return _proposal(drafted, unseeded=batch.unseeded)

    def _propose_alike(self, arguments: Sequence[Any], cache: RowCache) -> dict[str, Any]:
        """A proposal whose first step feeds the same number of tokens in every row, as a tree of arrays. arguments: what the
        first step reads, extra ids, noise (B, K, V), key, K, the batch's sampling, the first token's mask."""
        first, extra, noise, key, most, leaves, bits = arguments
        batch, head = SamplingBatch.of_leaves(leaves), cut_head(self.draft.model)
        with extra_ids_allowed(head, extra):
            steps = self._steps(
                first,
                None,
                batch,
                lambda at: None if noise is None else noise[:, at : at + 1],
                key,
                cache,
                lambda at: None if at else bits,
            )
            drafted: list[_Drafted] = []
            for step in islice(steps, most):
                drafted.append(step)
                if self.strategy.launch_steps and not products.inside():
                    device.launch(step.token)
        return _proposal(drafted, unseeded=batch.unseeded).tree()

    def _steps(
        self,
        first: Sequence[mx.array],
        last: Sequence[int] | None,
        batch: SamplingBatch,
        noise: Callable[[int], mx.array | None],
        key: mx.array,
        cache: RowCache,
        bits: Callable[[int], mx.array | None],
    ) -> Generator[_Drafted]:
        """An endless sequence of draft steps. first: what the first step reads. last: position of each row's newest token in
        it; None: the last position. bits: by step, the mask (B, 1, words) of its token; None: every token is allowed."""
        assert self._calls is not None
        feed, step = first, 0
        while True:
            out = self._calls.hidden(feed, cache)
            if last is None:
                out = out[:, -1:]
            elif out.shape[1] > 1:
                out = mx.take_along_axis(out, mx.array(list(last))[:, None, None], axis=1)
            whole = self.logits(self._calls, out)
            mask = bits(step)
            logits = biased(allow(fit(whole, self.vocabulary), mask), batch)
            distribution = transform(logits, batch)
            step_key = key
            if batch.unseeded:
                key, step_key = mx.random.split(key)
            token = draw(distribution, batch, noise(step), step_key).astype(mx.int32)
            yield _Drafted(token, whole, logits, distribution, mask is not None)
            feed, step = self.inputs(self.clamp_ids(token), first=False), step + 1

    def make_calls(self) -> DraftCalls:
        """The calls of this draft."""
        return DraftCalls.of(self.draft.model)

    def inputs(self, tokens: mx.array, *, first: bool) -> list[mx.array]:
        """What the backbone reads: tokens (B, N), and what this kind of draft needs. first: in the first step of a round."""
        return [tokens]

    def logits(self, calls: DraftCalls, out: mx.array) -> mx.array:
        """Logits (B, 1, V) from one position per row of the backbone's output."""
        return calls.head(out)

    def extend(self, tokens: mx.array, cache: RowCache, target: RowCache) -> mx.array:
        """Append tokens (B, N) to the rows of `cache`. target: the target's cache of the same rows. Returns the model's output,
        (B, N, ...)."""
        return self.draft.model(self.clamp_ids(tokens), cache=cache.layers)

    def clamp_ids(self, tokens: mx.array) -> mx.array:
        """Tokens (B, N), with ids that only the target has replaced by the draft's last id."""
        if self._limit is None or self._limit >= self.vocabulary:
            return tokens
        return mx.minimum(tokens, self._limit - 1)

    def prefill_limit(self, target: RowCache) -> int:
        """Positions of a prompt that the draft can prefill once the target has prefilled what is in `target`."""
        return sys.maxsize

    def unread(self, rows: Sequence[Sequence[int]]) -> int:
        """Tokens that are not in the draft's cache, not counting each row's newest."""
        return sum(max(missing - 1, 0) for missing in self._missing(rows))

    def lags(self, rows: Sequence[Sequence[int]]) -> bool:
        """Whether the cache lacks more tokens of a row than a draft step takes, because the row decoded without drafts for some
        time."""
        missing = self._missing(rows)
        if self._feeds_alike:
            return max(missing) > (2 if min(map(len, rows)) < MAX_LAG else MAX_LAG)
        return max(missing) > MAX_LAG + 1

    def catch_up_tokens(self, rows: int) -> int:
        """Tokens of one row that a lagging draft reads per round in a batch of `rows` rows."""
        return max(self._chunk // rows, MAX_LAG)

    def catch_up(self, rows: Sequence[Sequence[int]]) -> bool:
        """Prefill lagging rows in one ragged call of at most a prefill chunk, since every row waits for it. Leaves at least one
        token to read in every row. Returns whether no row lags any more."""
        cache = self.cache
        cache.rewind([min(length, len(row) - 1) for row, length in zip(rows, cache.lengths.host, strict=True)])
        if not self.lags(rows):
            return True
        lengths = cache.lengths.host
        share = self.catch_up_tokens(len(rows))
        missing = [row[n : min(len(row) - 1, n + share)] for row, n in zip(rows, lengths, strict=True)]
        tokens = pad_rows(missing, cache)
        self.extend(tokens, cache, self.target)
        self.activations.evaluate(cache.arrays(), tokens.size)
        cache.rewind([n + len(tokens) for n, tokens in zip(lengths, missing, strict=True)])
        return not self.lags(rows)


def _proposal(steps: Sequence[_Drafted], *, unseeded: bool) -> Proposal:
    """The proposal of these steps. unseeded: it needs log-distributions."""

    def bounded(logits: Sequence[mx.array]) -> mx.array:
        """(B, K): whether the largest logit is finite."""
        return mx.abs(mx.concatenate([each.max(axis=-1) for each in logits], axis=1)) < float("inf")

    return Proposal(
        tokens=mx.concatenate([step.token for step in steps], axis=1),
        logq=mx.concatenate([step.distribution for step in steps], axis=1) if unseeded else None,
        logits=tuple(step.logits for step in steps),
        usable=bounded([step.logits for step in steps]),
        finite=bounded([step.whole for step in steps]) if any(step.masked for step in steps) else None,
    )


def confidence(logits: mx.array, drawn: mx.array, head: CutHead | None) -> mx.array:
    """The draft's probability (B, 1) of each row's token at T = 1. With a cut head it is taken over the reduced vocabulary,
    which needs fewer exponentials."""
    narrow = logits if head is None else head.reduced_logits(logits)
    chosen = mx.take_along_axis(logits, drawn[..., None], axis=-1).astype(mx.float32)
    return mx.minimum(mx.exp(chosen - normaliser(narrow)), 1.0)[..., 0]


def read_confidences(confidences: Sequence[mx.array]) -> list[list[float]]:
    """Wait for the confidences (B, 1) of some steps. Returns them by step and row, 0 where a row's logits are not finite."""
    (read,) = device.read(mx.concatenate(list(confidences), axis=1))
    return np.nan_to_num(read.T, nan=0.0).tolist()


def pad_rows(texts: Sequence[Sequence[int]], cache: RowCache | None = None) -> mx.array:
    """Tokens (B, longest), with zeros after shorter texts, which the next write overwrites. Wider if the device prefers few
    widths and the layers of `cache` allow it."""
    width = max(map(len, texts))
    if cache is not None and not cache.states:
        width = current().width(width)
    feed = np.zeros((len(texts), width), dtype=np.int32)
    for line, tokens in zip(feed, texts, strict=True):
        line[: len(tokens)] = tokens
    return mx.array(feed)
