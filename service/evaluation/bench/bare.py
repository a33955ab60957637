"""A bare speculative loop over one greedy stream, on mlx-lm's own caches: a round without anything of a server around it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from service.core import BadRequest, Prompt
from service.engine.adapters import Draft
from service.evaluation.bench.peers import prefilled
from service.evaluation.bench.turns import Decoded
from service.models.pair import Pair, mlx_lm_runs


class BareArm:
    """K draft steps, each handed over by itself, one target call, acceptance on the device, one wait a round."""

    def __init__(self, pair: Pair, draft: Draft, k: int) -> None:
        if pair.draft is None or not mlx_lm_runs(pair.draft.folder):
            raise BadRequest("the bare loop needs a draft that mlx-lm runs", field="draft")
        self.settings: Mapping[str, object] = {"k": k}
        self._target, self._draft, self._k = pair.target.model, draft.model, k
        self._eos, self._known = pair.eos, pair.shared_vocabulary

    def decode(self, prompt: Prompt) -> Decoded:
        """Decode one prompt greedily up to and with the end token. Prefill is not timed."""
        target, draft, most = self._target, self._draft, prompt.sampling.max_tokens
        target_cache, draft_cache = prefilled(target, prompt.tokens), prefilled(draft, prompt.tokens)
        if not all(layer.is_trimmable() for layer in [*target_cache, *draft_cache]):
            raise BadRequest("the bare loop needs caches that can be trimmed", field="bare")
        output, unread, calls = list[int](), [prompt.tokens[-1]], 0
        started = time.perf_counter()
        while len(output) < most and not self._eos.intersection(output[-self._k - 1 :]):
            feed, drafted = mx.array([unread]), list[mx.array]()
            for _ in range(self._k):
                logits = draft(feed, cache=draft_cache)[:, -1:, : self._known]
                feed = mx.argmax(logits, axis=-1).astype(mx.int32)
                mx.async_eval(feed)
                drafted.append(feed)
            proposal = mx.concatenate(drafted, axis=1)
            read = mx.concatenate([mx.array([unread[-1:]], dtype=mx.int32), proposal], axis=1)
            chosen = mx.argmax(target(read, cache=target_cache), axis=-1).astype(mx.int32)
            accepted = mx.cumprod((chosen[:, :-1] == proposal).astype(mx.int32), axis=1).sum(axis=1)
            # The one wait of a round. An accepted token is the target's own choice.
            count, *tokens = np.array(mx.concatenate([accepted, chosen[0]])).tolist()
            output += tokens[: count + 1]
            calls += 1
            for layer in target_cache:
                layer.trim(self._k - count)
            for layer in draft_cache:
                layer.trim(max(self._k - 1 - count, 0))
            unread = tokens[count - 1 : count + 1] if count == self._k else [tokens[count]]
        seconds = time.perf_counter() - started
        ends = [at + 1 for at, token in enumerate(output) if token in self._eos]
        return Decoded(output[: min([most, *ends])], calls, seconds)
