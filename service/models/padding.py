"""Pads texts to one length, and groups them into calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

TOKENS = 2048
"""Tokens per call, including padding. A longer text gets a separate call."""
LENGTHS = 32
"""Padded lengths and position counts are multiples of this, so that shapes repeat and freed memory can be reused."""

Tokens = NDArray[np.int32]


def padded(length: int) -> int:
    """`length` rounded up to a multiple of LENGTHS."""
    return -(-length // LENGTHS) * LENGTHS


def padded_rows(sequences: Sequence[Tokens]) -> Tokens:
    """Token ids of sequences, (B, L), padded at the end."""
    rows = np.zeros((len(sequences), padded(max(map(len, sequences)))), dtype=np.int32)
    for row, tokens in zip(rows, sequences, strict=True):
        row[: len(tokens)] = tokens
    return rows


def grouped(lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """Indices of texts with these lengths, shorter ones first, grouped by similar length into calls."""
    group: list[int] = []
    for text in sorted(lengths, key=lengths.__getitem__):
        if group and (len(group) + 1) * padded(lengths[text]) > TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
