"""How a row's earlier tokens change its next logits: penalties, bad words and the minimum length of an answer.

Tokens proposed in a round count at the positions after them and exist only on the device. For all other tokens the host builds
sparse arrays: a row's distinct tokens with their counts, and banned tokens with the text that must precede them. A round with
such a row is therefore launched only after the previous one was read (`Decoder._waits_for_tokens`). Batches without such a row
compute none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from service.engine.request import Request

_NEVER = -float("inf")
_ANY, _NONE = -1, -2
"""In the text before a banned token: any token; no token, because the output is shorter."""
_FIRST_SIZE = 64
"""Initial capacity for distinct tokens, so that the shapes of traced calls rarely change."""


@dataclass(slots=True)
class TokenCounts:
    """The distinct tokens of a growing text: ids[:size], and how often each was generated."""

    size: int = 0
    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(_FIRST_SIZE, dtype=np.int32))
    counts: NDArray[np.float32] = field(default_factory=lambda: np.zeros(_FIRST_SIZE, dtype=np.float32))
    _places: dict[int, int] = field(default_factory=dict[int, int])
    _read: int = 0

    def update(self, tokens: Sequence[int], prompt: int, *, with_prompt: bool) -> None:
        """Count the new tokens. prompt: the length of the prompt, whose tokens count as generated zero times and are left out
        unless `with_prompt`."""
        for at in range(self._read if with_prompt else max(self._read, prompt), len(tokens)):
            place = self._places.setdefault(tokens[at], self.size)
            if place == self.size:
                self._add(tokens[at])
            self.counts[place] += at >= prompt
        self._read = len(tokens)

    def _add(self, token: int) -> None:
        if self.size == len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
            self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        self.ids[self.size] = token
        self.size += 1


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of R rows of a batch.

    rows: (R,), their indices. ids, counts: (R, M), the distinct tokens of each row and how often each was generated. seen: (R,
    1), whether there are any; otherwise the ids are padding. repetition, frequency, presence: (R, 1, 1).
    """

    rows: mx.array
    ids: mx.array
    counts: mx.array
    seen: mx.array
    repetition: mx.array
    frequency: mx.array
    presence: mx.array

    @classmethod
    def of(cls, rows: Sequence[Request]) -> Penalties | None:
        """None if no row has a penalty."""
        penalised = [(i, row) for i, row in enumerate(rows) if row.prompt.sampling.penalised]
        if not penalised:
            return None
        for _, row in penalised:
            with_prompt = row.prompt.sampling.repetition_penalty != 1.0
            row.counts.update(row.tokens, len(row.prompt.tokens), with_prompt=with_prompt)
        room = max(len(row.counts.ids) for _, row in penalised)
        ids = np.zeros((len(penalised), room), dtype=np.int32)
        counts = np.zeros(ids.shape, dtype=np.float32)
        for at, (_, row) in enumerate(penalised):
            own = slice(0, row.counts.size)
            ids[at, own], counts[at, own] = row.counts.ids[own], row.counts.counts[own]
            # Padding repeats the first token, so duplicates write equal logits.
            ids[at, row.counts.size :], counts[at, row.counts.size :] = ids[at, 0], counts[at, 0]

        def column(name: str) -> mx.array:
            values = [getattr(row.prompt.sampling, name) for _, row in penalised]
            return mx.array(np.array(values, dtype=np.float32)).reshape(-1, 1, 1)

        return cls(
            rows=mx.array(np.array([i for i, _ in penalised], dtype=np.int32)),
            ids=mx.array(ids),
            counts=mx.array(counts),
            seen=mx.array([[row.counts.size > 0] for _, row in penalised]),
            repetition=column("repetition_penalty"),
            frequency=column("frequency_penalty"),
            presence=column("presence_penalty"),
        )

    def apply(self, logits: mx.array, proposed: mx.array) -> mx.array:
        """Logits (B, K+1, V), float32, penalised at each position by the tokens before it. proposed: (B, K)."""
        own = proposed[self.rows].astype(mx.int32)
        same = own[..., None] == self.ids[:, None]
        counts = mx.concatenate([self.counts, mx.max(mx.where(same, self.counts[:, None], 0.0), axis=-1)], axis=1)
        known = mx.broadcast_to(self.seen, self.ids.shape)
        seen = mx.concatenate([known, mx.any(same, axis=-1) & self.seen], axis=1)
        ids = mx.concatenate([self.ids, own], axis=1)
        # (R, K+1, M+K): how often each token occurs among the proposed tokens before each position.
        earlier = (own[..., None] == ids[:, None]).astype(mx.float32)
        earlier = mx.concatenate([mx.zeros_like(ids[:, None]).astype(mx.float32), mx.cumsum(earlier, axis=1)], axis=1)
        rows, at = self.rows[:, None, None], mx.arange(logits.shape[1])[:, None]
        values, generated = logits[rows, at, ids[:, None]], counts[:, None] + earlier
        repeated = mx.where(values > 0.0, values / self.repetition, values * self.repetition)
        values = mx.where(seen[:, None] | (earlier > 0.0), repeated, values)
        values = values - self.frequency * generated
        values = values - self.presence * (generated > 0.0)
        penalised = mx.array(logits)
        penalised[rows, at, ids[:, None]] = values
        return penalised


@dataclass(frozen=True, slots=True)
class Bans:
    """The tokens that R rows of a batch may not emit next.

    rows: (R,), their indices. tokens: (R, W). before: (R, W, L), right-aligned, the tokens that must precede each for it to be
    banned; _ANY where there are fewer. until: (R, W), the position of the round from which it is no longer banned. tail: (R,
    L), the last tokens of each output.
    """

    rows: mx.array
    tokens: mx.array
    before: mx.array
    until: mx.array
    tail: mx.array

    @classmethod
    def of(cls, rows: Sequence[Request], vocabulary: int) -> Bans | None:
        """None if everything is allowed. vocabulary: width of the target's logits."""
        found = [(i, row, _bans(row, vocabulary)) for i, row in enumerate(rows)]
        found = [(i, row, bans) for i, row, bans in found if bans]
        if not found:
            return None
        count = _rounded(max(len(bans) for *_, bans in found))
        width = _rounded(max(len(behind) for *_, bans in found for _, behind, _ in bans))
        tokens, until = np.zeros((2, len(found), count), dtype=np.int32)
        before = np.full((len(found), count, width), _ANY, dtype=np.int32)
        tail = np.full((len(found), width), _NONE, dtype=np.int32)
        for at, (_, row, bans) in enumerate(found):
            for place, (token, behind, most) in enumerate(bans):
                tokens[at, place], until[at, place] = token, most
                if behind:
                    before[at, place, -len(behind) :] = behind
            if last := row.tokens[max(len(row.prompt.tokens), len(row.tokens) - width) :]:
                tail[at, -len(last) :] = last
        indices = np.array([i for i, *_ in found], dtype=np.int32)
        return cls(*map(mx.array, (indices, tokens, before, until, tail)))

    def apply(self, logits: mx.array, proposed: mx.array) -> mx.array:
        """Logits (B, K+1, V), float32, -inf where a token is banned. proposed: (B, K)."""
        text = mx.concatenate([self.tail, proposed[self.rows].astype(mx.int32)], axis=1)
        at = mx.arange(logits.shape[1])
        behind = text[:, at[:, None] + mx.arange(self.tail.shape[1])]
        fits = mx.all((self.before[:, None] == _ANY) | (self.before[:, None] == behind[:, :, None]), axis=-1)
        banned = fits & (at[:, None] < self.until[:, None])
        # Added, because a token may end several bad words of which only one matches.
        return logits.at[self.rows[:, None, None], at[:, None], self.tokens[:, None]].add(mx.where(banned, _NEVER, 0.0))


@dataclass(frozen=True, slots=True)
class History:
    """How the earlier tokens of a batch's rows change the logits of its next round."""

    penalties: Penalties | None
    bans: Bans | None

    @classmethod
    def of(cls, rows: Sequence[Request], vocabulary: int) -> History | None:
        """For rows whose tokens are all known. None if they have no effect. vocabulary: width of the target's logits."""
        if not any(row.by_history for row in rows):
            return None
        return cls(Penalties.of(rows), Bans.of(rows, vocabulary))

    def tree(self) -> dict[str, Any]:
        """The arrays by name, as a traced call takes them."""
        return {name: None if part is None else _tree(part) for name, part in self._parts.items()}

    @classmethod
    def of_tree(cls, tree: dict[str, Any]) -> History:
        """The inverse of `tree`."""
        penalties, bans = tree["penalties"], tree["bans"]
        return cls(
            None if penalties is None else Penalties(**penalties),
            None if bans is None else Bans(**bans),
        )

    @property
    def _parts(self) -> dict[str, Penalties | Bans | None]:
        return {"penalties": self.penalties, "bans": self.bans}

    def apply(self, logits: mx.array, proposed: mx.array | None, *, masked: bool) -> mx.array:
        """The target's logits (B, K+1, V) at a round's positions, penalised and with banned tokens removed, float32. proposed:
        (B, K); None: nothing. masked: a grammar may forbid tokens; a ban that would leave no token is then ignored."""
        tokens = mx.zeros((logits.shape[0], 0), dtype=mx.int32) if proposed is None else proposed
        changed = logits.astype(mx.float32)
        if self.penalties is not None:
            changed = self.penalties.apply(changed, tokens)
        if self.bans is None:
            return changed
        left = self.bans.apply(changed, tokens)
        return mx.where(mx.max(left, axis=-1, keepdims=True) > _NEVER, left, changed) if masked else left


def _tree(part: Penalties | Bans) -> dict[str, mx.array]:
    return {each.name: getattr(part, each.name) for each in fields(part)}


def _rounded(count: int) -> int:
    """The next power of two, so that shapes repeat."""
    return 1 << max(count - 1, 0).bit_length()


def _bans(row: Request, vocabulary: int) -> list[tuple[int, Sequence[int], int]]:
    """Tokens that a row may not emit next, the text that must precede each, and the position of the round from which each is
    allowed."""
    sampling, found = row.prompt.sampling, list[tuple[int, Sequence[int], int]]()
    if (left := sampling.min_tokens - row.emitted) > 0:
        found += [(token, (), left) for token in {*row.eos, *sampling.stop_token_ids} if token < vocabulary]
    # The limit lies past all positions of a round.
    found += [(word[-1], word[:-1], 2**30) for word in sampling.bad_words]
    return found
