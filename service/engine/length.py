"""How many tokens to draft: the length with the most expected tokens per second, for the batch at hand.

With a_i the probability that position i of a draft is kept when all before it were, K drafted tokens make
1 + sum over j <= K of a_1 .. a_j expected tokens (Leviathan et al., arXiv 2211.17192, eq. 1 with a rate per position). What a
round costs is measured where it runs: on a CPU a full batch wants 0, one stream 2 to 4. Pure arithmetic, no clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

CYCLE = 32
"""Rounds in which every length is looked at again. The last two draft the most whatever is best (the first of them may have to
catch up, which tells nothing of time). While nothing is drafted only the very last drafts, one token: what a draft would be
worth stays known at little cost, and what it gets wrong stays logged, so that it goes on learning."""
PLAIN_AT = 15
"""The round of a cycle that drafts nothing."""
STAY = 1.03
"""Another length must promise so many times the tokens per second."""
MEMORY = 0.98
"""What an observation of acceptance weighs after one more."""
PRIOR, PRIOR_WEIGHT = 0.6, 2.0
PACE = 0.2
"""Weight of a new measurement of a round's time, which is believed up to twice and down to half of the last one."""


class DraftLength:
    """`most`: the longest draft (at least 1). One controller belongs to one decoder; `restart` it when the draft changes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._seconds: dict[tuple[int, int], float] = {}
        self._round = 0
        self.restart()

    def restart(self) -> None:
        """Forget what the last draft was worth; what rounds cost stays true."""
        self._kept = [0.0] * self.most
        self._tested = [0.0] * self.most
        self._current = self.most

    def choose(self, rows: int) -> int:
        """Tokens to draft for `rows` rows in the coming round."""
        at = self._round % CYCLE
        self._round += 1
        size = _size(rows)
        if (size, self.most) not in self._seconds:
            return self.most
        if (size, 0) not in self._seconds or at == PLAIN_AT:
            return 0
        rates = [self.expected(k) / self.seconds(rows, k) for k in range(self.most + 1)]
        best = max(range(self.most + 1), key=rates.__getitem__)
        if rates[best] > STAY * rates[self._current]:
            self._current = best
        if self._current == 0:
            return 1 if at == CYCLE - 1 else 0
        return self.most if at >= CYCLE - 2 else self._current

    def expected(self, k: int) -> float:
        """Expected tokens of one row's round that drafts k. A position seldom tested is taken to be like the one before."""
        total, reached, rate = 1.0, 1.0, PRIOR
        for kept, tested in zip(self._kept[:k], self._tested[:k], strict=True):
            rate = (kept + PRIOR_WEIGHT * rate) / (tested + PRIOR_WEIGHT)
            reached *= rate
            total += reached
        return total

    def seconds(self, rows: int, k: int) -> float:
        """Expected time of a round: as measured, else on the line between none and the most."""
        size = _size(rows)
        if (measured := self._seconds.get((size, k))) is not None:
            return measured
        least, most = self._seconds[size, 0], self._seconds[size, self.most]
        return least + (most - least) * k / self.most

    def observe(self, rows: int, k: int, accepted: Sequence[int], seconds: float | None) -> None:
        """What a round of k drafted tokens did. accepted: per row. seconds: None where the round did other work besides."""
        for kept in accepted if k else ():
            for position in range(self.most):
                tested = position < min(kept + 1, k)
                self._kept[position] = MEMORY * self._kept[position] + (tested and position < kept)
                self._tested[position] = MEMORY * self._tested[position] + tested
        if seconds is not None:
            key = (_size(rows), k)
            last = self._seconds.get(key, seconds)
            self._seconds[key] = last + PACE * (min(max(seconds, last / 2), last * 2) - last)


def _size(rows: int) -> int:
    """Batches that cost about the same count as one."""
    return rows.bit_length()
