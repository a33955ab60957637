"""The arm that decodes one stream with mlx-lm's own generators, on the same weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from service.core import Prompt
from service.evaluation.bench.arms import Decoded, take_turns, tokens_per_second
from service.evaluation.oracle import prefilled_cache
from service.models.heads import shallow_copy, uncut

KS = (1, 2, 3, 4)
"""Draft lengths of which the fastest is found."""


class MlxLmArm:
    """mlx-lm's generate_step, or with a draft its speculative_generate_step at K = k. draft: with a full head. settings: more
    to report than K."""

    def __init__(
        self,
        target: nn.Module,
        eos: frozenset[int],
        draft: nn.Module | None = None,
        k: int = 0,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.settings: Mapping[str, object] = {} if draft is None else {"k": k, **(settings or {})}
        self._target = target
        self._draft = draft
        self._eos = eos
        self._k = k

    def decode(self, prompt: Prompt) -> Decoded:
        """Decode one prompt up to and with the end token, on new caches; prefill is not timed."""
        cache = prefilled_cache(self._target, prompt.tokens)
        if self._draft is not None:
            cache += prefilled_cache(self._draft, prompt.tokens)
        tokens: list[int] = []
        from_draft: list[bool] = []
        started = time.perf_counter()
        for token, drafted in self._steps(prompt, cache):
            tokens.append(token)
            from_draft.append(drafted)
            if token in self._eos:
                break
        seconds = time.perf_counter() - started
        # It computes one token ahead, which must not count as the next arm's time.
        mx.synchronize(generation_stream)
        return Decoded(tokens, target_calls(from_draft), seconds)

    def _steps(self, prompt: Prompt, cache: list[Any]) -> Iterator[tuple[int, bool]]:
        last, sampling = mx.array(prompt.tokens[-1:]), prompt.sampling
        sampler = make_sampler(sampling.temperature, sampling.top_p, sampling.min_p, top_k=sampling.top_k)
        if self._draft is None:
            steps = generate_step(
                last, self._target, max_tokens=sampling.max_tokens, sampler=sampler, prompt_cache=cache
            )
            return ((int(token), False) for token, _ in steps)
        steps = speculative_generate_step(
            last,
            self._target,
            self._draft,
            num_draft_tokens=self._k,
            max_tokens=sampling.max_tokens,
            sampler=sampler,
            prompt_cache=cache,
        )
        return ((int(token), bool(from_draft)) for token, _, from_draft in steps)


def target_calls(from_draft: Sequence[bool]) -> int:
    """Target calls of mlx-lm's speculation, from whether each token was drafted: a call ends with a token of the target's own,
    except the last call where an accepted token ends the text."""
    return sum(not drafted for drafted in from_draft) + (from_draft[-1] if from_draft else 0)


def speed_by_k(
    target: nn.Module, draft: nn.Module, eos: frozenset[int], prompts: Sequence[Prompt], ks: Sequence[int] = KS
) -> dict[int, float]:
    """Tokens per second of mlx-lm's speculation by K, fastest first, each K on all prompts in turn."""
    by_k = take_turns({k: MlxLmArm(target, eos, draft, k) for k in ks}, prompts)
    rates = {k: tokens_per_second(decoded) for k, decoded in by_k.items()}
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def with_full_head(served: nn.Module) -> nn.Module:
    """A draft as mlx-lm can run it, over the same arrays: with its full head."""
    model = shallow_copy(served)
    uncut(model)
    return model
