"""A predicted output as a source of proposals, as in OpenAI's `prediction`: usually the answer with some changes.

A cursor follows the prediction while the answer agrees with it. Where they diverge, the newest tokens of the answer are
searched for in the prediction, preferably after that point.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

STRENGTHS = (8, 4, 2, 1, 0)
"""Kinds of matches by strength, the minimum number of agreeing tokens. 0: the beginning of the answer."""
LONGEST = STRENGTHS[0]
"""Maximum tokens that are compared at a position of the prediction."""
NEAR, FAR = 64, 4
"""A match of fewer than FAR tokens counts only within NEAR tokens after the last agreement."""
PLACES = 64
"""Maximum positions that one search compares."""
CONFIRMED = 2
"""Tokens that must agree after a match before its position is confirmed."""


class PredictedText:
    """The prediction for one answer, and the current position in it. tokens: the prediction's ids."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._next: int | None = 0
        """Position of the next expected token; None: the answer has left the prediction."""
        self._strength = 0
        """Strength of the match that found this position."""
        self._agreed = 0
        """Tokens that have agreed since."""
        self._parted = 0
        """Where searches for the answer start."""
        self._needed = 1
        """Minimum strength of the next match. It grows with every wrong match, so that an unrelated prediction costs few
        rounds."""
        self._read = 0
        self.matched = 0
        """Tokens of the answer that agreed with the prediction at the cursor."""

    @property
    def unmatched(self) -> int:
        """Tokens of the prediction that do not occur in the answer."""
        return max(len(self._tokens) - self.matched, 0)

    def read(self, tokens: Sequence[int], start: int = 0) -> None:
        """Follow the answer's new tokens. tokens: the whole text, in which the answer begins at `start`."""
        new = tokens[start + self._read :]
        self._read += len(new)
        for token in new:
            self._follow(token)
        if new and self._next is None:
            self._search(tokens)

    def propose(self, most: int) -> tuple[int, Sequence[int]] | None:
        """The strength of the match (one of STRENGTHS) and up to `most` tokens that may follow. None if the answer has left the
        prediction or reached its end."""
        if self._next is None or self._next == len(self._tokens):
            return None
        strength = self._strength + self._agreed
        return next(each for each in STRENGTHS if strength >= each), self._tokens[self._next : self._next + most]

    def _follow(self, token: int) -> None:
        if self._next is None:
            return
        if self._next < len(self._tokens) and self._tokens[self._next] == token:
            self._next += 1
            self._agreed += 1
            self.matched += 1
            if self._agreed >= CONFIRMED:
                self._parted, self._needed = self._next, 1
            return
        if self._agreed < CONFIRMED:
            self._needed = min(self._strength + 1, LONGEST)
        self._next = None

    def _search(self, answer: Sequence[int]) -> None:
        """Find the answer's end again: the strongest match after the last agreement, the nearest among equals; otherwise a
        strong match before it, in case the answer moved a part."""
        found = self._strongest(answer, self._parted, len(self._tokens)) or self._strongest(answer, 0, self._parted)
        if found is not None:
            self._strength, self._next = found
            self._agreed = 0

    def _strongest(self, answer: Sequence[int], start: int, end: int) -> tuple[int, int] | None:
        """The strength of the best match in a part of the prediction, and the position of the token after it."""
        best: tuple[int, int] | None = None
        for position in self._places(answer[-1], start, end):
            strength = self._strength_at(answer, position)
            near = self._parted <= position < self._parted + NEAR
            enough = self._needed if near else max(self._needed, FAR)
            if strength >= enough and (best is None or strength > best[0]):
                best = strength, position + 1
        return best

    def _places(self, token: int, start: int, end: int) -> Iterator[int]:
        """Positions of a token in a part of the prediction, in order."""
        for _ in range(PLACES):
            try:
                position = self._tokens.index(token, start, end)
            except ValueError:
                return
            yield position
            start = position + 1

    def _strength_at(self, answer: Sequence[int], position: int) -> int:
        """How many of the answer's last tokens agree with the prediction up to this position."""
        most, length = min(LONGEST, self._read, position + 1), 0
        while length < most and self._tokens[position - length] == answer[-1 - length]:
            length += 1
        return length
