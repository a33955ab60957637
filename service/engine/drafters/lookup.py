"""Free proposals: what followed the last time the text ended like this, in the row itself or in recent outputs.

Prompt look-up decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), with the matched length told, so that
acceptance can be known by it. A proposal is a guess like any other: verification keeps the output the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from service.engine.planner import LOOKED_UP

LENGTHS = tuple(sorted(LOOKED_UP, reverse=True))
REMEMBERED = 65_536
"""Tokens of recent outputs in one of two generations; when the younger is full, the older is forgotten."""
TELLING = 4
"""A shorter match in somebody else's text says nothing."""

Gram: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class Grams:
    """Where a growing text has each of its n-grams last: the place of the token that follows."""

    read: int = 0
    ends: dict[Gram, int] = field(default_factory=dict[Gram, int])

    def read_on(self, tokens: Sequence[int]) -> None:
        """Take in what was appended. The text's own end is left out until something follows it."""
        for end in range(max(self.read, 1), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self.ends[tuple(tokens[end - length : end])] = end
        self.read = len(tokens)


@dataclass(frozen=True, slots=True)
class Found:
    """length: how many tokens matched at least, a key of LOOKED_UP."""

    length: int
    tokens: list[int]


class Lookup:
    """most: tokens of the longest proposal. Recent outputs are shared by all rows, and only what may be remembered enters."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._young: dict[Gram, tuple[Sequence[int], int]] = {}
        self._old: dict[Gram, tuple[Sequence[int], int]] = {}
        self._held = 0

    def find(self, tokens: Sequence[int], grams: Grams) -> Found | None:
        """What may follow `tokens`: the longest match wins, the row's own text before others'. grams: of these tokens."""
        grams.read_on(tokens)
        for length in LENGTHS:
            if length > len(tokens):
                continue
            gram = tuple(tokens[-length:])
            if (end := grams.ends.get(gram)) is not None:
                # A text that repeats itself goes on repeating: its last period is read round and round.
                period = tokens[end:]
                return Found(length, [period[i % len(period)] for i in range(self.most)])
            if length >= TELLING and (other := self._young.get(gram) or self._old.get(gram)) is not None:
                text, end = other
                return Found(length, list(text[end : end + self.most]))
        return None

    def remember(self, output: Sequence[int]) -> None:
        """Offer an output to the rows to come."""
        for end in range(TELLING, len(output)):
            for length in LENGTHS:
                if TELLING <= length <= end:
                    self._young[tuple(output[end - length : end])] = (output, end)
        self._held += len(output)
        if self._held > REMEMBERED:
            self._old, self._young, self._held = self._young, {}, 0
