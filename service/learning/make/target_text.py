"""Training text written by the target itself: whole chats from an empty user turn on, without outside text.

Rows advance together. User turns are sampled at T = 1, answers at their row's temperature; when a turn ends, the next
one begins (docs/decisions/training.md, "Practice and making a draft").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from service.core import NonFiniteLogits
from service.engine.accept import finite_positions
from service.engine.kv.cache import RowCache
from service.engine.strategy import PAGE
from service.models.pair import Loaded

FORCED, USER, ANSWER = 0, 1, 2
_MARK = "\u241e"
_LEAST_USER_TEMPERATURE = 0.6
"""Lowest temperature of user turns whose first words are given."""


@dataclass(frozen=True, slots=True)
class TargetText:
    """tokens: (rows, length) int32. role: (rows, length) uint8, the author of each token: FORCED (the template), USER,
    ANSWER. temperature: (rows,) of the answers."""

    tokens: np.ndarray
    role: np.ndarray
    temperature: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[TargetText]) -> TargetText:
        """The rows of all parts, which have equal lengths."""
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.role for part in parts]),
            np.concatenate([part.temperature for part in parts]),
        )

    def first(self, rows: int) -> TargetText:
        """The first rows."""
        return TargetText(self.tokens[:rows], self.role[:rows], self.temperature[:rows])

    def save(self, path: Path) -> None:
        """Write an .npz."""
        np.savez(path, tokens=self.tokens, role=self.role, temperature=self.temperature)

    @classmethod
    def load(cls, path: Path) -> TargetText:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            return cls(stored["tokens"], stored["role"], stored["temperature"])


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Template tokens around the turns: before the first user turn, before an answer, before the next user turn. end:
    the token that ends a turn."""

    opening: list[int]
    answer: list[int]
    user: list[int]
    end: int

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFrame:
        """The frame of a tokenizer's chat template. Without a template every turn begins with the beginning-of-text token."""
        ends = set(tokenizer.eos_token_ids)
        first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else min(ends)
        if not getattr(tokenizer, "has_chat_template", False):
            return cls([first], [first], [first], min(ends))
        turns = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        opening, answer, user, _ = text.split(_MARK)
        before, between, behind = (tokenizer.encode(part, add_special_tokens=False) for part in (opening, answer, user))
        end = between[0] if between and between[0] in ends else min(ends)
        # The target writes the end token of a turn itself; only the template's tokens after it are forced.
        return cls(before, _after_end(between, ends), _after_end(behind, ends), end)


def _after_end(tokens: list[int], ends: set[int]) -> list[int]:
    return tokens[1:] if tokens and tokens[0] in ends else tokens


def write_text(
    target: Loaded,
    *,
    rows: int,
    length: int,
    seed: int,
    greedy: float = 0.25,
    openings: Sequence[str] = (),
    turn: int | None = None,
    between: Callable[[], object] = lambda: None,
) -> TargetText:
    """`rows` texts of `length` tokens, written by the target.

    greedy: fraction of rows with greedy answers; the temperatures of the others are uniform in 0..1. openings: first
    words of user turns, drawn for each turn ("": none); with them user turns have lower temperatures, because the
    openings provide variety. turn: maximum tokens of a turn, so that rows have more turns and fewer loops. between:
    called before every target call.

    Texts during which the target's logits were not finite are left out, because what follows is meaningless. Raises
    NonFiniteLogits when no text is left.
    """
    between()
    writer = _Writer(target, rows, length, seed, greedy, openings, turn or length)
    for at in range(writer.start, length):
        between()
        writer.step(at)
    if not writer.finite.any():
        raise NonFiniteLogits("the target's logits are not finite in any of the texts it wrote")
    return TargetText(writer.tokens[writer.finite], writer.role[writer.finite], writer.temperature[writer.finite])


class _Writer:
    """Rows being written. start: the first position after the template's opening."""

    def __init__(
        self, target: Loaded, rows: int, length: int, seed: int, greedy: float, openings: Sequence[str], turn: int
    ) -> None:
        tokenizer = target.tokenizer
        self.model = target.model
        self.frame = ChatFrame.of(tokenizer)
        self.openings = [list(tokenizer.encode(words, add_special_tokens=False)) for words in openings] or [[]]
        self.ends = np.array(sorted(tokenizer.eos_token_ids))
        self.turn = turn
        self.rng = np.random.default_rng(seed)
        self.temperature = np.where(self.rng.random(rows) < greedy, 0.0, self.rng.random(rows))
        self.key = mx.random.key(seed)
        self.tokens = np.zeros((rows, length), dtype=np.int32)
        self.role = np.zeros((rows, length), dtype=np.uint8)
        self.finite = np.ones(rows, dtype=np.bool_)
        """Rows in which the target's logits were finite at every position."""
        self.cache = RowCache(target.model, rows)
        if (pages := self.cache.pages) is not None:
            # Allocated at once: growing copies the existing pages and needs memory for both.
            pages.pool.set_size(rows * -(-length // PAGE) * len(pages.groups.windows))
        self.start = self._prefill(self.frame.opening[:length])
        longest = max(len(self.frame.answer), len(self.frame.user) + max(map(len, self.openings)))
        self.forced = _ForcedTokens(rows, 1 + longest)
        for row in range(rows):
            self.forced.set(row, self._opening())
        self.turn_role = np.full(rows, USER, dtype=np.uint8)
        self.turn_tokens = np.zeros(rows, dtype=np.int64)
        self.user_temperature = self.rng.uniform(_LEAST_USER_TEMPERATURE, 1.0, rows) if openings else np.ones(rows)

    def step(self, at: int) -> None:
        """Writes position `at` of all rows, and starts the next turn where one ends."""
        drawn = self._sample(at)
        is_forced, forced = self.forced.take()
        self.tokens[:, at] = np.where(is_forced, forced, drawn)
        self.role[:, at] = np.where(is_forced, FORCED, self.turn_role)
        self.turn_tokens += ~is_forced
        ended = ~is_forced & np.isin(drawn, self.ends)
        cut = ~is_forced & ~ended & (self.turn_tokens >= self.turn)
        for row in np.flatnonzero(ended | cut).tolist():
            self._next_turn(row, cut=bool(cut[row]))

    def _prefill(self, opening: list[int]) -> int:
        self.tokens[:, : len(opening)] = opening
        if len(opening) > 1:
            self.model(mx.array(self.tokens[:, : len(opening) - 1]), cache=self.cache.layers)
            self.cache.commit(len(opening) - 1)
        return len(opening)

    def _opening(self) -> list[int]:
        return self.openings[self.rng.integers(len(self.openings))]

    def _sample(self, at: int) -> np.ndarray:
        """The target's tokens (rows,) at position `at`."""
        logits = self.model(mx.array(self.tokens[:, at - 1 : at]), cache=self.cache.layers)[:, -1].astype(mx.float32)
        self.cache.commit(1)
        self.key, step_key = mx.random.split(self.key)
        temperature = np.where(self.turn_role == USER, self.user_temperature, self.temperature)
        sampled_rows = mx.array((temperature > 0).tolist())
        divisor = mx.array(np.where(temperature > 0, temperature, 1.0)[:, None].astype(np.float32))
        # A categorical draw needs no normalised distribution, which saves two passes over rows x vocabulary.
        sampled = mx.random.categorical(logits / divisor, axis=-1, key=step_key)
        drawn = mx.where(sampled_rows, sampled, mx.argmax(logits, axis=-1).astype(sampled.dtype))
        finite = finite_positions(logits)
        mx.eval(drawn, finite)
        self.finite &= np.array(finite)
        return np.array(drawn)

    def _next_turn(self, row: int, *, cut: bool) -> None:
        """cut: the turn reached its limit, so its end token is forced."""
        was_user = self.turn_role[row] == USER
        template = self.frame.answer if was_user else [*self.frame.user, *self._opening()]
        self.forced.set(row, [self.frame.end, *template] if cut else template)
        self.turn_role[row] = ANSWER if was_user else USER
        self.turn_tokens[row] = 0


class _ForcedTokens:
    """Tokens that each row must take next."""

    def __init__(self, rows: int, longest: int) -> None:
        self.tokens = np.zeros((rows, longest), dtype=np.int32)
        self.left = np.zeros(rows, dtype=np.int64)

    def set(self, row: int, tokens: Sequence[int]) -> None:
        """Replaces the row's remaining tokens."""
        self.tokens[row, : len(tokens)] = tokens
        self.left[row] = len(tokens)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows,) which rows have a forced token, and the token (arbitrary otherwise)."""
        forced = self.left > 0
        first = self.tokens[:, 0].copy()
        self.tokens[forced, :-1] = self.tokens[forced, 1:]
        self.left[forced] -= 1
        return forced, first


def first_exchanges(
    text: TargetText, skip: int, ends: Collection[int], longest: int = 128
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, output) of each row's first turn and its answer, cut at `longest` tokens. The first `skip` rows are left
    out. ends: ids of end tokens."""
    for tokens, role in zip(text.tokens[skip:].tolist(), text.role[skip:], strict=True):
        answers = np.flatnonzero(role == ANSWER)
        if not len(answers):
            continue
        start = int(answers[0])
        stop = next((at + 1 for at in range(start, len(tokens)) if tokens[at] in ends), len(tokens))
        yield tokens[:start], tokens[start : min(stop, start + longest)]
