"""How long a draft goes on in one round: as long as its next token promises more than it costs.

A draft's own probability of a token says how likely the target keeps it. With reach(b) the probability that all of row b's
tokens so far are kept, one token more is worth the sum over b of reach(b) times how often a next one is kept, and costs a draft
step and one position more of the target's call: worth it where that, or that of some more, beats the tokens per second to be
had otherwise (the stopping rule of a ratio of sums; drafts by threshold: Zhang et al., arXiv 2309.08168; Li et al., arXiv
2406.16858).

Whether to go on is settled before the next token is drawn, by tokens that are verified in any case: no token's chance of being
kept depends on it, so that what comes out keeps the target's law.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence

from service.engine.share import Share

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Between probabilities that are told apart."""
TOKEN_MEMORY = 0.995
"""What an observation weighs after one more of a token as probable."""
OWN_WORD = 8.0
"""Observations that the draft's own probability counts for."""
STOPS = (1, 3, 7, 15)
"""Tokens after which a draft may stop. Asking after every one costs more than it gains; and a call over one more than three or
seven fills the tiles of four positions in which products come."""


class Trust:
    """How often a token of some probability is kept when all before it were, lately."""

    def __init__(self) -> None:
        self._shares = [Share(TOKEN_MEMORY) for _ in range(len(EDGES) + 1)]

    def rate(self, sure: float) -> float:
        """sure: the draft's probability of the token at T = 1. Before anything was seen, a draft is somewhat better than it
        thinks."""
        return self._shares[bisect(EDGES, sure)].rate(0.2 + 0.78 * sure, OWN_WORD)

    def observe(self, sure: float, kept: bool) -> None:
        """Count one verified token: the draft gave it the probability `sure`, and the target accepted it or not (`kept`)."""
        self._shares[bisect(EDGES, sure)].observe(kept)


class Steps:
    """The draft steps of one round: `most`, or fewer where their worth is asked for. trusts: one a row, None for a row whose
    tokens are looked up; without any nothing is asked. worth: by the tokens drafted and each row's reach, whether more are
    worth it."""

    def __init__(
        self,
        most: int,
        trusts: Sequence[Trust | None] = (),
        worth: Callable[[int, Sequence[float]], bool] = lambda drafted, reach: True,
    ) -> None:
        self.most = most
        self.stops = tuple(stop for stop in STOPS if stop < most) if trusts else ()
        """After how many tokens `more` is to be asked."""
        self._trusts = trusts
        self._worth = worth
        self._reach = [0.0 if trust is None else 1.0 for trust in trusts]
        self._sure: list[Sequence[float]] = []

    def more(self, sure: Sequence[Sequence[float]]) -> bool:
        """Whether to draft on after tokens of these probabilities, by token since it was asked last and by row."""
        for told in sure:
            pairs = zip(self._reach, self._trusts, told, strict=True)
            self._reach = [reach * trust.rate(q) if trust is not None else 0.0 for reach, trust, q in pairs]
        self._sure += sure
        return self._worth(len(self._sure), self._reach)

    def observe(self, kept: Sequence[int], proposed: Sequence[int] | None = None) -> None:
        """kept: accepted tokens by row. proposed: positions that count by row, fewer than were drafted where the text ended
        before; None: all. Of those behind the last stop nothing was asked."""
        ends = [len(self._sure)] * len(kept) if proposed is None else proposed
        for step, sure in enumerate(self._sure):
            for trust, q, count, end in zip(self._trusts, sure, kept, ends, strict=True):
                if trust is not None and count >= step and step < end:
                    trust.observe(q, count > step)
