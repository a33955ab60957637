"""A constraint without text: which tokens may follow is a function of all that came before."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from service.core import AnswerGrammar, Constraint, Sampling
from tests.support.oracle import bent, filtered_logprobs, read, seeded_noise
from tests.support.typed import as_int

END = 3
"""The end-of-sequence token."""


class Automaton:
    """core.Constraint: after each prefix a random set of 1 to `most` tokens; one time in `forcing` a single one. After `limit`
    tokens it has failed, and allows END alone."""

    def __init__(
        self, seed: int, vocabulary: int, *, most: int = 30, forcing: int = 3, limit: int = sys.maxsize
    ) -> None:
        self.seed = seed
        self.vocabulary = vocabulary
        self.most = most
        self.forcing = forcing
        self.limit = limit
        self.tokens: list[int] = []

    @property
    def grammar(self) -> AnswerGrammar:
        return AnswerGrammar(f"automaton {self.seed}")

    @property
    def unenforced(self) -> tuple[str, ...]:
        return ()

    @property
    def failed(self) -> bool:
        return len(self.tokens) >= self.limit

    def copy(self) -> Automaton:
        return Automaton(self.seed, self.vocabulary, most=self.most, forcing=self.forcing, limit=self.limit)

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        if len(tokens) >= self.limit:
            return [END]
        rng = random.Random(repr((self.seed, *tokens)))
        count = 1 if rng.randrange(self.forcing) == 0 else rng.randint(1, self.most)
        return rng.sample(range(4, self.vocabulary), count)

    def masks(self, proposed: Sequence[int]) -> list[bytes]:
        found: list[bytes] = []
        for count in range(len(proposed) + 1):
            allowed = self.allowed([*self.tokens, *proposed[:count]])
            mask = bytearray(-(-self.vocabulary // 32) * 4)
            for token in allowed:
                mask[token // 8] |= 1 << token % 8
            found.append(bytes(mask))
            if count < len(proposed) and proposed[count] not in allowed:
                break
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self.allowed(self.tokens), "the engine emitted what is not allowed"
            self.tokens.append(token)

    def forced(self, most: int) -> list[int]:
        found: list[int] = []
        while len(found) < most and len(allowed := self.allowed([*self.tokens, *found])) == 1:
            found += allowed
        return found


def masked_alone(
    target: nn.Module,
    prompt: Sequence[int],
    sampling: Sampling,
    constraint: Constraint,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """What the target alone says under a constraint and the sampling's penalties, greedy or seeded, up to and including an end
    token."""
    constraint = constraint.copy()
    cache, feed, out = make_prompt_cache(target), list(prompt), list[int]()
    for position in range(sampling.max_tokens):
        logits = np.array(read(target, feed, cache)[-1].astype(mx.float32))
        bits = np.unpackbits(np.frombuffer(constraint.masks(())[0], dtype=np.uint8), bitorder="little")
        masked = mx.array(np.where(bits[: len(logits)], logits, -np.inf))
        masked = bent(masked, prompt, out, sampling, eos)
        if not sampling.greedy:
            assert sampling.seed is not None
            masked = filtered_logprobs(masked[None], sampling)[0]
            masked = masked + mx.array(seeded_noise(sampling.seed, position, len(logits)))
        token = as_int(mx.argmax(masked))
        out.append(token)
        if token in eos:
            break
        constraint.advance([token])
        feed = [token]
    return out
