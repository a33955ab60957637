"""The proposed tokens of a round, from any source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True, slots=True)
class Proposal:
    """K proposed tokens per row.

    tokens: (B, K). logq: (B, K, V), the log-distributions they were drawn from; None if every row is greedy or uses the match
    rule. logits: the draft's at each position, (B, 1, V) each; empty for lookups. usable: (B, K), false where nothing was
    proposed, where the draft's logits were not finite, or where the draft has no token that the grammar allows. finite: (B, K),
    whether the draft's logits were finite; None: as `usable`.
    """

    tokens: mx.array
    logq: mx.array | None
    logits: tuple[mx.array, ...]
    usable: mx.array
    finite: mx.array | None = None

    def tree(self) -> dict[str, Any]:
        """The fields by name, as a traced call takes and returns them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Unread:
    """The ends of rows after a round that the host has not read. newest: (B, 2), each row's last two tokens. ends: (B,), int32,
    the number of positions before its newest token. most: upper bounds of these."""

    newest: mx.array
    ends: mx.array
    most: Sequence[int]


def lookup_proposal(lookups: Sequence[Sequence[int]], k: int, vocabulary: int, unseeded: bool) -> Proposal:
    """Lookup tokens, up to k per row, as a proposal with q = 1 at each. unseeded: rows need log-distributions."""
    tokens, usable = np.zeros((len(lookups), k), dtype=np.int32), np.zeros((len(lookups), k), dtype=np.bool_)
    for i, row in enumerate(lookups):
        tokens[i, : len(row)] = row
        usable[i, : len(row)] = True
    proposed = mx.array(tokens)
    logq = mx.where(mx.arange(vocabulary) == proposed[..., None], 0.0, -float("inf")) if unseeded else None
    return Proposal(proposed, logq, (), mx.array(usable.tolist()))


def merge(drafted: Proposal, lookups: Proposal, rows: Sequence[bool]) -> Proposal:
    """Merge two proposals of the same length: row b uses the lookup if rows[b]."""
    pick = mx.array(list(rows))[:, None]
    logq = None
    if drafted.logq is not None and lookups.logq is not None:
        logq = mx.where(pick[..., None], lookups.logq, drafted.logq)
    return Proposal(
        tokens=mx.where(pick, lookups.tokens, drafted.tokens),
        logq=logq,
        logits=drafted.logits,
        usable=mx.where(pick, lookups.usable, drafted.usable),
    )


def prefer_lookups(
    drafted: Proposal | None, lookups: Sequence[Sequence[int]], k: int, vocabulary: int, unseeded: bool
) -> Proposal | None:
    """The draft's proposal of k tokens per row, replaced in rows that have a lookup."""
    if not any(lookups):
        return drafted
    found = lookup_proposal(lookups, k, vocabulary, unseeded)
    return found if drafted is None else merge(drafted, found, [len(row) > 0 for row in lookups])
