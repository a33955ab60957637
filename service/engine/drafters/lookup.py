"""Prompt look-up decoding: proposes what followed the same n-gram earlier, in the row's text or in recent outputs; or what the
request's own prediction says (`prediction`).

Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding. A proposal comes with the length of its match, by which the planner
predicts its acceptance. It costs no draft step and is verified like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from service.core import Source
from service.engine.planner import FORCED, LOOKED_UP

if TYPE_CHECKING:
    from service.engine.request import Request

LENGTHS = tuple(sorted(LOOKED_UP, reverse=True))
"""Lengths of n-grams that are searched for, longest first."""
INDEX_TOKENS = 65_536
"""Tokens of recent outputs in one of the two indexes. When the newer one is full, the older one is dropped."""
AT_ONCE = 512
"""Tokens of all rows that are indexed in a round, at most: 32,000 of a long prompt would hold all rows up for 50 ms."""
MIN_SHARED_MATCH = 4
"""The shortest match that counts in another request's output."""
SHARED_LENGTHS = tuple(length for length in LENGTHS if length >= MIN_SHARED_MATCH)
WAITED_SHARE = 1 / 2
"""Share of the requests that must have a match of the longest kind, which is seldom chance: look-ups are found in tokens that
were read, and a round that is launched after the one before it was read takes all rows half as long again."""
REST = 8
"""Rounds that wait for no look-up after one that did, where none was then worth proposing."""
MEASURED = 3
"""The same where plain rounds were to be measured: of so many in a row that are launched ahead, one can be timed."""

NGram: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class NGramIndex:
    """Index of the n-grams of one growing text: the position after the last occurrence of each. indexed: tokens so far."""

    indexed: int = 0
    next_position: dict[NGram, int] = field(default_factory=dict[NGram, int])

    def update(self, tokens: Sequence[int], most: int = AT_ONCE) -> int:
        """Index the next `most` tokens that are not yet; returns how many there were. An n-gram at the end is indexed once a
        token follows it."""
        last = min(len(tokens), self.indexed + most)
        for end in range(max(self.indexed, 1), last):
            for length in LENGTHS:
                if length <= end:
                    self.next_position[tuple(tokens[end - length : end])] = end
        count, self.indexed = last - self.indexed, last
        return count


@dataclass(frozen=True, slots=True)
class LookupProposal:
    """The tokens proposed for one row. length: of the matched n-gram, one of LENGTHS; FORCED for what a grammar forces; of a
    prediction its kind of match."""

    length: int
    tokens: list[int]
    source: Source = Source.LOOKUP

    def up_to(self, limit: int | None) -> LookupProposal | None:
        """The same with so many tokens at most; None where that leaves none."""
        if limit is None or limit >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:limit]) if limit else None


class Lookup:
    """Proposes up to `max_tokens` tokens from a row's own text or from recent outputs, which rows of equal salts share
    (core.Prompt.cache_salt); or what a row's grammar leaves no choice about."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._resting = 0
        self._newer: dict[tuple[str, NGram], tuple[Sequence[int], int]] = {}
        self._older: dict[tuple[str, NGram], tuple[Sequence[int], int]] = {}
        self._newer_tokens = 0

    def propose(self, rows: Sequence[Request], *, possible: bool, forced: bool = True) -> list[LookupProposal | None]:
        """What may follow each row in the next round. possible: whether anything may be planned over so many rows; where not,
        nothing is indexed either. forced: also what grammars leave no choice about."""
        self._resting = max(self._resting - 1, 0)
        if not possible:
            return [None] * len(rows)
        left = AT_ONCE
        for row in rows:
            if not row.padding:
                left -= row.ngrams.update(row.tokens, left)
        found = [
            None
            if row.padding
            else (forced and self._forced(row))
            or self._predicted(row)
            or self.find(row.tokens, row.ngrams, row.prompt.cache_salt)
            for row in rows
        ]
        return [each and each.up_to(row.prompt.num_draft_tokens) for each, row in zip(found, rows, strict=True)]

    def _forced(self, row: Request) -> LookupProposal | None:
        constraint = row.prompt.constraint
        tokens = constraint.forced(self.max_tokens) if constraint is not None else []
        return LookupProposal(FORCED, tokens, Source.GRAMMAR) if tokens else None

    def _predicted(self, row: Request) -> LookupProposal | None:
        if row.predicted is None:
            return None
        row.predicted.read(row.tokens, len(row.prompt.tokens))
        match = row.predicted.propose(self.max_tokens)
        return None if match is None else LookupProposal(match[0], list(match[1]), Source.PREDICTION)

    def waits(self, found: Sequence[LookupProposal | None], requests: int) -> bool:
        """Whether look-ups of so many requests are worth a round that is launched after the one before it was read."""
        long = sum(
            each is not None and (each.length >= LENGTHS[0] or each.source is Source.PREDICTION) for each in found
        )
        return not self._resting and long >= WAITED_SHARE * requests

    def waited(self, *, used: bool, measures: bool = False) -> None:
        """A round has waited for look-ups. used: whether it proposed any. measures: none because of `Choice.measures`."""
        self._resting = 0 if used else MEASURED if measures else REST

    def find(self, tokens: Sequence[int], ngrams: NGramIndex, salt: str = "") -> LookupProposal | None:
        """A proposal to follow `tokens`: the longest match, in the row's own text before recent outputs. None without a match.

        ngrams: the index of these tokens, as far as they are indexed. salt: of the outputs that may be looked up.
        """
        for length in LENGTHS:
            if length > len(tokens):
                continue
            ngram = tuple(tokens[-length:])
            if (end := ngrams.next_position.get(ngram)) is not None:
                # Where fewer tokens follow the match, they are repeated: the text is taken to be periodic.
                period = tokens[end : end + self.max_tokens]
                return LookupProposal(length, [period[i % len(period)] for i in range(self.max_tokens)])
            shared = salt, ngram
            if length >= MIN_SHARED_MATCH and (match := self._newer.get(shared) or self._older.get(shared)) is not None:
                text, end = match
                return LookupProposal(length, list(text[end : end + self.max_tokens]))
        return None

    def forget(self) -> None:
        """Drop the shared index, whose outputs are nobody's in particular."""
        self._newer, self._older, self._newer_tokens = {}, {}, 0

    def add_output(self, output: Sequence[int], salt: str = "") -> None:
        """Add a finished output to the shared index, for rows of this salt. Only outputs that may be stored belong there."""
        for end in range(MIN_SHARED_MATCH, len(output)):
            place = output, end
            for length in SHARED_LENGTHS:
                if length <= end:
                    self._newer[salt, tuple(output[end - length : end])] = place
        self._newer_tokens += len(output)
        if self._newer_tokens > INDEX_TOKENS:
            self._older, self._newer, self._newer_tokens = self._newer, {}, 0
