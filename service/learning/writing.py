"""The target writes a draft's training text itself: whole chats from an empty turn, nothing read from elsewhere.

Rows run in step. A user's turn is drawn at T = 1, each answer at the row's own temperature; when an answer ends, the next
turn begins. Mixing temperatures matters: with T = 1 alone the draft agreed with greedy text on 0.48 of tokens instead of 0.57.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from service.engine.cache import RowCache
from service.models.pair import Loaded

FORCED, USER, ANSWER = 0, 1, 2
_MARK = "\u241e"


@dataclass(frozen=True, slots=True)
class Text:
    """tokens: (rows, length) int32. role: (rows, length) uint8, who wrote each token: FORCED (the template), USER, ANSWER.
    temperature: (rows,) of the answers."""

    tokens: np.ndarray
    role: np.ndarray
    temperature: np.ndarray


@dataclass(frozen=True, slots=True)
class Frame:
    """Template tokens around the turns: before the first user turn, before an answer, before the next user turn."""

    opening: list[int]
    answer: list[int]
    user: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """From the chat template; a model without one simply goes on writing after its first token."""
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else next(iter(tokenizer.eos_token_ids))
        if not getattr(tokenizer, "has_chat_template", False):
            return cls([first], [first], [first])
        turns = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        opening, answer, user, _ = text.split(_MARK)
        encoded = [tokenizer.encode(part, add_special_tokens=False) for part in (opening, answer, user)]
        # The writer ends its own turns: what follows is forced from behind the end token.
        return cls(encoded[0], *(_after_end(part, set(tokenizer.eos_token_ids)) for part in encoded[1:]))


def _after_end(tokens: list[int], ends: set[int]) -> list[int]:
    return tokens[1:] if tokens and tokens[0] in ends else tokens


def write(
    target: Loaded,
    *,
    rows: int,
    length: int,
    seed: int,
    greedy: float = 0.25,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Text:
    """`rows` texts of `length` tokens. greedy: share of rows whose answers are greedy; the others' temperatures are uniform
    in 0..1. on_step: told how many tokens a step wrote."""
    frame = Frame.of(target.tokenizer)
    ends = np.array(sorted(target.tokenizer.eos_token_ids))
    rng = np.random.default_rng(seed)
    temperature = np.where(rng.random(rows) < greedy, 0.0, rng.random(rows))
    key = mx.random.key(seed)

    tokens = np.zeros((rows, length), dtype=np.int32)
    role = np.zeros((rows, length), dtype=np.uint8)
    opening = frame.opening[:length]
    tokens[:, : len(opening)] = opening
    cache = RowCache(target.model, rows)
    if len(opening) > 1:
        target.model(mx.array(tokens[:, : len(opening) - 1]), cache=cache.layers)
        cache.commit(len(opening) - 1)
    forced: np.ndarray = np.zeros((rows, max(len(frame.answer), len(frame.user), 1)), dtype=np.int32)
    pending = np.zeros(rows, dtype=np.int64)
    speaker = np.full(rows, USER, dtype=np.uint8)
    for at in range(len(opening), length):
        logits = target.model(mx.array(tokens[:, at - 1 : at]), cache=cache.layers)[:, -1].astype(mx.float32)
        cache.commit(1)
        key, step_key = mx.random.split(key)
        heat = np.where(speaker == USER, 1.0, temperature)
        hot_rows = mx.array((heat > 0).tolist())
        hot = mx.array(np.where(heat > 0, heat, 1.0)[:, None].astype(np.float32))
        # A categorical draw needs no normalised law, which saves two passes over rows x vocabulary.
        sampled = mx.random.categorical(logits / hot, axis=-1, key=step_key)
        drawn = np.array(mx.where(hot_rows, sampled, mx.argmax(logits, axis=-1).astype(sampled.dtype)))
        queued = pending > 0
        tokens[:, at] = np.where(queued, forced[:, 0], drawn)
        role[:, at] = np.where(queued, FORCED, speaker)
        forced[queued, :-1] = forced[queued, 1:]
        pending[queued] -= 1
        ended = ~queued & np.isin(drawn, ends)
        for who, following in ((USER, frame.answer), (ANSWER, frame.user)):
            turn = ended & (speaker == who)
            forced[turn, : len(following)] = following
            pending[turn] = len(following)
        speaker[ended] = np.where(speaker[ended] == USER, ANSWER, USER)
        on_step(rows)
    return Text(tokens, role, temperature)
