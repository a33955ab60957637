"""Grammar masks for the rows of a round: bits made on the host, applied to logits on the device."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from service.core import Constraint
from service.engine.request import Request


class RoundMasks:
    """The masks of a round over B rows, some of which have a constraint. vocabulary: width of the target's logits."""

    def __init__(self, constraints: Sequence[Constraint | None], vocabulary: int) -> None:
        self._constraints = constraints
        self._words = -(-vocabulary // 32)

    @classmethod
    def of(cls, rows: Sequence[Request], vocabulary: int) -> RoundMasks | None:
        """None if every token is allowed in every row. Ended rows allow every token."""
        constraints = [row.prompt.constraint if row.finish is None else None for row in rows]
        return cls(constraints, vocabulary) if any(each is not None for each in constraints) else None

    def bits(self, proposed: Sequence[Sequence[int]]) -> mx.array:
        """(B, K+1, words), uint32: the tokens allowed at each position of proposals of up to K tokens, by row. Positions after
        a forbidden token, where nothing is verified, allow everything."""
        count = max(map(len, proposed), default=0) + 1
        bits = np.full((len(proposed), count, self._words), 0xFFFFFFFF, dtype=np.uint32)
        for row, (constraint, tokens) in enumerate(zip(self._constraints, proposed, strict=True)):
            if constraint is not None:
                masks = constraint.masks(tokens)
                bits[row, : len(masks)] = np.frombuffer(b"".join(masks), dtype="<u4").reshape(len(masks), -1)
        return mx.array(bits)

    def next_bits(self, proposed: Sequence[Sequence[int]]) -> mx.array:
        """(B, 1, words): the tokens allowed after the proposed ones, the same number in each row."""
        return self.bits(proposed)[:, -1:]


def allow(logits: mx.array, bits: mx.array | None) -> mx.array:
    """Logits (B, N, V), -inf where a token is not allowed. bits: (B, N, words), bit i of word w for token 32 w + i; None: all
    are allowed."""
    if bits is None:
        return logits
    return mx.where(allowed(bits, logits.shape[-1]), logits, mx.array(-float("inf"), dtype=logits.dtype))


def allowed(bits: mx.array, width: int) -> mx.array:
    """(..., width) booleans of masks (..., words): whether a token is allowed. Tokens beyond the masks are not."""
    found = (bits[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    found = found.reshape(*bits.shape[:-1], -1)[..., :width].astype(mx.bool_)
    if (missing := width - found.shape[-1]) > 0:
        found = mx.concatenate([found, mx.zeros((*found.shape[:-1], missing), dtype=mx.bool_)], axis=-1)
    return found
