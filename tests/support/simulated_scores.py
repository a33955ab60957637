"""Simulated acceptance of two drafts that mostly agree, on texts of different length and difficulty."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from service.core import Score

LONGEST, K = 256, 3
FEWER = (1.4, 1.2, 1.0)
"""Calls by draft length, relative to those at the longest."""
LEVEL = (1.0, 1.242, 1.394)
"""Costs at which the drafts of `pair` are about as fast at every draft length."""


def scores(calls: Iterable[float], *, tokens: int = 100, domain: str = "a", start: int = 0) -> list[Score]:
    """calls: at a draft length of three."""
    return by_length(([value * more for more in FEWER] for value in calls), tokens=tokens, domain=domain, start=start)


def by_length(calls: Iterable[Sequence[float]], *, tokens: int = 100, domain: str = "a", start: int = 0) -> list[Score]:
    """calls: at draft lengths one, two and three."""
    return [
        Score(f"g{start + i}", domain, tokens, 50, tuple(float(value) for value in each))
        for i, each in enumerate(calls)
    ]


def target_calls(accepted: NDArray[np.bool_], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Target calls to emit each text at draft lengths 1 .. K: (texts, K). accepted: (texts, LONGEST), whether a token would be
    accepted."""
    ahead = np.zeros((len(accepted), LONGEST + 1), dtype=np.int64)
    for t in reversed(range(LONGEST)):
        ahead[:, t] = np.where(accepted[:, t], ahead[:, t + 1] + 1, 0)
    lengths, rows = np.arange(1, K + 1), np.arange(len(accepted))[:, None]
    at = calls = np.zeros((len(accepted), K), dtype=np.int64)
    while (going := at < tokens[:, None]).any():
        at = np.where(going, at + np.minimum(ahead[rows, np.minimum(at, LONGEST - 1)], lengths) + 1, at)
        calls = calls + going
    return calls


def pair(
    rng: np.random.Generator,
    texts: int,
    *,
    better: float = 0.0,
    differ: float = 0.05,
    accepted: float = 0.65,
    domains: int = 1,
) -> tuple[list[Score], list[Score]]:
    """Scores of two drafts. accepted: acceptance rate of the second on a usual text, varying by text. differ: share of the
    tokens on which the two disagree; better: by how much the first one's acceptance is higher."""
    tokens = np.clip(rng.lognormal(np.log(90), 0.6, texts), 8, LONGEST).astype(np.int64)
    usual = 1 / (1 + np.exp(-(np.log(accepted / (1 - accepted)) + rng.normal(0, 0.5, (texts, 1)))))
    old = rng.random((texts, LONGEST)) < usual
    luck = rng.random((texts, LONGEST))
    new = np.where(old, luck >= (differ - better) / 2 / usual, luck < (differ + better) / 2 / (1 - usual))

    def scores(flags: NDArray[np.bool_]) -> list[Score]:
        found = target_calls(flags, tokens).astype(np.float64)
        return [
            Score(
                f"g{i}", f"d{i % domains}", int(tokens[i]), int(flags[i, : tokens[i]].sum()), tuple(found[i].tolist())
            )
            for i in range(texts)
        ]

    return scores(new), scores(old)


def requests(
    rng: np.random.Generator, shape: tuple[int, int], *, accepted: float = 0.65, linger: float = 0.2
) -> NDArray[np.float64]:
    """Acceptance of single requests, (streams, requests): texts of different length and difficulty, with
    autocorrelation `linger`."""
    tokens = np.clip(rng.lognormal(np.log(90), 0.6, shape), 8, 400).astype(np.int64)
    hard = rng.normal(0, 1, shape)
    for i in range(1, shape[1]):
        hard[:, i] = linger * hard[:, i - 1] + np.sqrt(1 - linger**2) * hard[:, i]
    usual = 1 / (1 + np.exp(-(np.log(accepted / (1 - accepted)) + 0.4 * hard)))
    return rng.binomial(tokens, usual) / tokens


class Population:
    """Many simulated texts, from which the texts of many gates are drawn quickly. calls: (texts, 2, K), of the new and the old
    draft. gain: of the new draft over all of them, at the longest draft length."""

    def __init__(self, *, better: float, differ: float, texts: int = 4000, seed: int = 77) -> None:
        both = pair(np.random.default_rng(seed), texts, better=better, differ=differ)
        self.calls = np.array([[new.calls, old.calls] for new, old in zip(*both, strict=True)])
        self.tokens = np.array([score.tokens for score in both[1]])
        self.gain = float(self.calls[:, 1, -1].sum() / self.calls[:, 0, -1].sum() - 1.0)

    def scaled(self, gain: float) -> "Population":
        """The same texts with the new draft's calls scaled so that its gain is exactly this."""
        other = object.__new__(Population)
        other.calls, other.tokens, other.gain = self.calls.copy(), self.tokens, gain
        other.calls[:, 0] *= (1.0 + self.gain) / (1.0 + gain)
        return other

    def draw(self, rng: np.random.Generator, texts: int, *, noise: bool = False) -> NDArray[np.float64]:
        """Calls of some texts, (texts, 2, K). noise: either draft is the new one, text by text, so that neither is better."""
        calls = self.calls[rng.integers(len(self.calls), size=texts)]
        swapped = rng.random(texts) < 0.5
        return np.where(swapped[:, None, None], calls[:, ::-1], calls) if noise else calls
