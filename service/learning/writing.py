"""The target writes a draft's training text itself: whole chats from an empty turn, nothing read from elsewhere.

Rows run in step. A user's turn is drawn at T = 1, each answer at the row's own temperature; when an answer ends, the next
turn begins. Mixing temperatures matters: with T = 1 alone the draft agreed with greedy text on 0.48 of tokens instead of 0.57.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from service.engine.kv.cache import RowCache
from service.models.pair import Loaded

FORCED, USER, ANSWER = 0, 1, 2
_MARK = "\u241e"
_COOL = 0.6
"""Lowest temperature of a user's turn whose first words are given."""


@dataclass(frozen=True, slots=True)
class Text:
    """tokens: (rows, length) int32. role: (rows, length) uint8, who wrote each token: FORCED (the template), USER, ANSWER.
    temperature: (rows,) of the answers."""

    tokens: np.ndarray
    role: np.ndarray
    temperature: np.ndarray


@dataclass(frozen=True, slots=True)
class Frame:
    """Template tokens around the turns: before the first user turn, before an answer, before the next user turn. end: what
    a turn ends with."""

    opening: list[int]
    answer: list[int]
    user: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """From the chat template; a model without one simply goes on writing after its first token."""
        ends = set(tokenizer.eos_token_ids)
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else min(ends)
        if not getattr(tokenizer, "has_chat_template", False):
            return cls([first], [first], [first], min(ends))
        turns = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        opening, answer, user, _ = text.split(_MARK)
        before, between, behind = (tokenizer.encode(part, add_special_tokens=False) for part in (opening, answer, user))
        end = between[0] if between and between[0] in ends else min(ends)
        # The writer ends its own turns: what follows is forced from behind the end token.
        return cls(before, _after_end(between, ends), _after_end(behind, ends), end)


def _after_end(tokens: list[int], ends: set[int]) -> list[int]:
    return tokens[1:] if tokens and tokens[0] in ends else tokens


def write(
    target: Loaded,
    *,
    rows: int,
    length: int,
    seed: int,
    greedy: float = 0.25,
    openings: Sequence[str] = (),
    turn: int | None = None,
    on_step: Callable[[int], None] = lambda tokens: None,
) -> Text:
    """`rows` texts of `length` tokens. greedy: share of rows whose answers are greedy; the others' temperatures are uniform
    in 0..1. openings: words that user turns begin with, drawn anew for each turn ("": the target begins by itself);
    with them, user turns are a little cooler, since they bring variety of their own. turn: tokens after which a turn is
    ended, so that rows hold more of them and fewer loops. on_step: told how many tokens a step wrote."""
    frame = Frame.of(target.tokenizer)
    begins = [list(target.tokenizer.encode(words, add_special_tokens=False)) for words in openings] or [[]]
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
    queue = _Queue(rows, 1 + max(len(frame.answer), len(frame.user) + max(map(len, begins))))
    for row in range(rows):
        queue.put(row, begins[rng.integers(len(begins))])
    speaker = np.full(rows, USER, dtype=np.uint8)
    user_heat = rng.uniform(_COOL, 1.0, rows) if openings else np.ones(rows)
    said = np.zeros(rows, dtype=np.int64)
    for at in range(len(opening), length):
        logits = target.model(mx.array(tokens[:, at - 1 : at]), cache=cache.layers)[:, -1].astype(mx.float32)
        cache.commit(1)
        key, step_key = mx.random.split(key)
        heat = np.where(speaker == USER, user_heat, temperature)
        hot_rows = mx.array((heat > 0).tolist())
        hot = mx.array(np.where(heat > 0, heat, 1.0)[:, None].astype(np.float32))
        # A categorical draw needs no normalised law, which saves two passes over rows x vocabulary.
        sampled = mx.random.categorical(logits / hot, axis=-1, key=step_key)
        drawn = np.array(mx.where(hot_rows, sampled, mx.argmax(logits, axis=-1).astype(sampled.dtype)))
        queued, forced = queue.take()
        tokens[:, at] = np.where(queued, forced, drawn)
        role[:, at] = np.where(queued, FORCED, speaker)
        said += ~queued
        ended = ~queued & np.isin(drawn, ends)
        cut = ~queued & ~ended & (said >= (turn or length))
        for row in np.flatnonzero(ended | cut).tolist():
            was_user = speaker[row] == USER
            following = frame.answer if was_user else [*frame.user, *begins[rng.integers(len(begins))]]
            queue.put(row, [frame.end, *following] if cut[row] else following)
            speaker[row] = ANSWER if was_user else USER
            said[row] = 0
        on_step(rows)
    return Text(tokens, role, temperature)


class _Queue:
    """Tokens each row is made to say next."""

    def __init__(self, rows: int, longest: int) -> None:
        self.tokens = np.zeros((rows, longest), dtype=np.int32)
        self.left = np.zeros(rows, dtype=np.int64)

    def put(self, row: int, tokens: Sequence[int]) -> None:
        """In place of what the row still had to say."""
        self.tokens[row, : len(tokens)] = tokens
        self.left[row] = len(tokens)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows,) who has one, and what it is (anything where there is none)."""
        queued = self.left > 0
        first = self.tokens[:, 0].copy()
        self.tokens[queued, :-1] = self.tokens[queued, 1:]
        self.left[queued] -= 1
        return queued, first
