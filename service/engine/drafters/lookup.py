"""Prompt lookup decoding: proposes what followed the same n-gram earlier, in the row's text or in recent outputs, or what the
request's predicted output says (`prediction`).

Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding. A proposal includes the length of its match, from which the planner
predicts its acceptance. It needs no draft step and is verified like any other proposal.
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
"""Lengths of the n-grams that are searched, longest first."""
INDEX_TOKENS = 65_536
"""Tokens of recent outputs in each of two indexes. When the newer one is full, the older one is dropped."""
AT_ONCE = 512
"""Maximum tokens of all rows that are indexed per round. Indexing a prompt of 32,000 tokens at once would delay all rows by 50
ms."""
MIN_SHARED_MATCH = 4
"""The shortest match that counts in another request's output."""
SHARED_LENGTHS = tuple(length for length in LENGTHS if length >= MIN_SHARED_MATCH)
WAITED_SHARE = 1 / 2
"""Share of the requests that must have a match of the longest kind, which is rarely accidental, before a round waits for
lookups. A lookup needs the tokens of the previous round. A round launched only after those were read takes half as long again
for all rows."""
REST = 8
"""Number of rounds that do not wait for lookups after a round that waited without proposing any."""
MEASURED = 3
"""The same if the round was left plain to measure it: of this many consecutive rounds launched ahead, one can be timed."""

NGram: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class NGramIndex:
    """Index of the n-grams of one growing text: the position after the last occurrence of each. indexed: tokens indexed so
    far."""

    indexed: int = 0
    next_position: dict[NGram, int] = field(default_factory=dict[NGram, int])

    def update(self, tokens: Sequence[int], most: int = AT_ONCE) -> int:
        """Index up to `most` further tokens; returns their number. An n-gram at the end is indexed once a token follows it."""
        last = min(len(tokens), self.indexed + most)
        for end in range(max(self.indexed, 1), last):
            for length in LENGTHS:
                if length <= end:
                    self.next_position[tuple(tokens[end - length : end])] = end
        count, self.indexed = last - self.indexed, last
        return count


@dataclass(frozen=True, slots=True)
class LookupProposal:
    """The tokens proposed for one row. length: of the matched n-gram, one of LENGTHS; FORCED for tokens that a grammar forces;
    for a predicted output, the strength of the match."""

    length: int
    tokens: list[int]
    source: Source = Source.LOOKUP

    def up_to(self, limit: int | None) -> LookupProposal | None:
        """The same proposal, cut to `limit` tokens; None if that leaves none."""
        if limit is None or limit >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:limit]) if limit else None


class Lookup:
    """Proposes up to `max_tokens` tokens from a row's text or from recent outputs, which rows with the same salt share
    (core.Prompt.cache_salt), or the tokens that a row's grammar forces."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._resting = 0
        self._newer: dict[tuple[str, NGram], tuple[Sequence[int], int]] = {}
        self._older: dict[tuple[str, NGram], tuple[Sequence[int], int]] = {}
        self._newer_tokens = 0

    def propose(self, rows: Sequence[Request], *, possible: bool, forced: bool = True) -> list[LookupProposal | None]:
        """What may follow each row in the next round. possible: whether proposals may be planned for this many rows; if not,
        nothing is indexed either. forced: include tokens that grammars force."""
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
        """Whether the lookups of this many requests are worth a round that is launched only after the previous one was read."""
        long = sum(
            each is not None and (each.length >= LENGTHS[0] or each.source is Source.PREDICTION) for each in found
        )
        return not self._resting and long >= WAITED_SHARE * requests

    def waited(self, *, used: bool, measures: bool = False) -> None:
        """Record that a round has waited for lookups. used: whether it proposed any. measures: it proposed none because of
        `Choice.measures`."""
        self._resting = 0 if used else MEASURED if measures else REST

    def find(self, tokens: Sequence[int], ngrams: NGramIndex, salt: str = "") -> LookupProposal | None:
        """A proposal to follow `tokens`: the longest match, preferring the row's text to recent outputs. None without a match.

        ngrams: the index of these tokens, as far as they are indexed. salt: of the outputs that may be looked up.
        """
        for length in LENGTHS:
            if length > len(tokens):
                continue
            ngram = tuple(tokens[-length:])
            if (end := ngrams.next_position.get(ngram)) is not None:
                # If fewer tokens follow the match, they are repeated, as if the text were periodic.
                period = tokens[end : end + self.max_tokens]
                return LookupProposal(length, [period[i % len(period)] for i in range(self.max_tokens)])
            shared = salt, ngram
            if length >= MIN_SHARED_MATCH and (match := self._newer.get(shared) or self._older.get(shared)) is not None:
                text, end = match
                return LookupProposal(length, list(text[end : end + self.max_tokens]))
        return None

    def forget(self) -> None:
        """Drop the shared index, which does not record which request an output came from."""
        self._newer, self._older, self._newer_tokens = {}, {}, 0

    def add_output(self, output: Sequence[int], salt: str = "") -> None:
        """Add a finished output to the shared index, for rows with this salt. Only for outputs that may be stored."""
        for end in range(MIN_SHARED_MATCH, len(output)):
            place = output, end
            for length in SHARED_LENGTHS:
                if length <= end:
                    self._newer[salt, tuple(output[end - length : end])] = place
        self._newer_tokens += len(output)
        if self._newer_tokens > INDEX_TOKENS:
            self._older, self._newer, self._newer_tokens = self._newer, {}, 0
