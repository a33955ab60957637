"""A predicted answer as a source of look-ups, as OpenAI's `prediction` gives one: mostly the answer with some places changed.

A cursor follows the prediction while the answer says the same. Where they part, the newest tokens of the answer are looked for
in the prediction behind that place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

STRENGTHS = (8, 4, 2, 1, 0)
"""Kinds of matches by their strength, which is how many tokens agree: at least so many. 0: the answer's beginning."""
LONGEST = STRENGTHS[0]
"""Tokens that are compared at a place of the prediction, at most."""
NEAR, FAR = 64, 4
"""A match of fewer than FAR tokens counts only so near behind the last agreement."""
PLACES = 64
"""Places that one search compares, at most."""
CONFIRMED = 2
"""Tokens that must agree behind a match before its place counts as found."""


class PredictedText:
    """The prediction for one answer, and where the answer is in it. tokens: the prediction's ids."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._next: int | None = 0
        """Position of the token that is expected next; None: the answer has left the prediction."""
        self._strength = 0
        """Of the match by which that position was found."""
        self._agreed = 0
        """Tokens that have agreed since."""
        self._parted = 0
        """The answer is looked for from here on."""
        self._needed = 1
        """Strength of the next match, at least. It grows with every match that was wrong, so that a prediction that has nothing
        to do with the answer costs few rounds."""
        self._read = 0
        self.matched = 0
        """Tokens of the answer that stood where the prediction has them."""

    @property
    def unmatched(self) -> int:
        """Tokens of the prediction that the answer does not have."""
        return max(len(self._tokens) - self.matched, 0)

    def read(self, tokens: Sequence[int], start: int = 0) -> None:
        """Follow the answer's new tokens. tokens: those of the text, of which the answer begins at `start`."""
        new = tokens[start + self._read :]
        self._read += len(new)
        for token in new:
            self._follow(token)
        if new and self._next is None:
            self._search(tokens)

    def propose(self, most: int) -> tuple[int, Sequence[int]] | None:
        """The kind of the match (one of STRENGTHS) and up to `most` tokens that may follow; None where the answer has left
        the prediction or has reached its end."""
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
        """Find the answer's end again: the strongest match behind the last agreement, the nearest of equal ones, or else a
        strong one before it, where the answer may have moved a part."""
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
        """How many of the answer's last tokens stand in the prediction up to this position."""
        most, length = min(LONGEST, self._read, position + 1), 0
        while length < most and self._tokens[position - length] == answer[-1 - length]:
            length += 1
        return length
