"""Finds the text that crashes training runs, if any, by bisection over what earlier runs read and how they ended. Pure
functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from service.core import RunState

Texts = frozenset[int]
"""Texts by their number in the log (seq)."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """A finished run, and all logged texts it read."""

    state: RunState
    texts: Texts

    @property
    def survived(self) -> bool:
        """Whether its child processed the texts without crashing."""
        return self.state.judged or self.state is RunState.FAILED


@dataclass(frozen=True, slots=True)
class Search:
    """What past runs say about the cause of crashes.

    probe: the next run has to learn from these texts alone; empty: from any, but for those in `avoid` where there are others.
    suspects: how many texts the smallest unexplained crash leaves. culprit: a text that crashes every run that reads it.
    any_texts: runs crash whatever they read, so the cause is no text."""

    probe: Texts = frozenset()
    avoid: Texts = frozenset()
    suspects: int = 0
    culprit: int | None = None
    any_texts: bool = False

    @property
    def open(self) -> bool:
        """Whether a crash is still unexplained, so that the next run reads only its own texts."""
        return bool(self.probe or self.avoid)


def search(runs: Sequence[PastRun]) -> Search:
    """The state of the search. runs: of one pair, oldest first, without those that read a text that was quarantined or
    released since: their crashes are explained.

    A crash suspects the texts of its run, less those that later runs survived. The first half is tried, then the other half,
    which shows whether the crash reproduces on some texts and not on others; from then on the smallest set of suspects is
    halved. A text is the culprit when a run crashed on it alone after another run had survived other texts since the first
    crash. A crash whose texts a later run survived all at once had another cause, and so had those before it.
    """
    runs = _since_last_refutation(runs)
    read = {i: run.texts for i, run in enumerate(runs) if run.state is RunState.CRASHED}
    left = {i: texts - _union(run.texts for run in runs[i + 1 :] if run.survived) for i, texts in read.items()}
    left = {i: texts for i, texts in left.items() if texts}
    if not left:
        return Search()
    crashes = {i: read[i] for i in left}
    first = min(crashes)
    judged = [i for i, run in enumerate(runs) if i > first and run.texts and run.state.judged]
    # The last time that a run crashed on one text alone, by that text.
    alone = {next(iter(texts)): i for i, texts in crashes.items() if len(texts) == 1}
    for text, at in alone.items():
        if any(min(i for i, texts in crashes.items() if text in texts) < i < at for i in judged):
            return Search(culprit=text, suspects=1)
    any_texts = not judged and any(not a & b for a in crashes.values() for b in crashes.values())
    found = Search(avoid=frozenset(alone), suspects=min(map(len, left.values())), any_texts=any_texts)
    if again := next((text for text in alone if judged), None):
        # Other texts were survived meanwhile: does this one still crash?
        return replace(found, probe=frozenset({again}))
    other_half = left[first] - _union(texts for i, texts in crashes.items() if i > first)
    if other_half and len(crashes) > 1 and not judged:
        return replace(found, probe=other_half)
    unexplained = [texts for texts in reversed(left.values()) if not texts & alone.keys()]
    if not unexplained:
        return found
    smallest = min(unexplained, key=len)
    reproduced = sum(smallest <= texts for texts in crashes.values()) > 1
    whole = not reproduced and smallest not in crashes.values()
    return replace(found, probe=smallest if whole else _half(smallest))


def _since_last_refutation(runs: Sequence[PastRun]) -> Sequence[PastRun]:
    for i in reversed(range(len(runs))):
        earlier = (run.texts for run in runs[:i] if run.state is RunState.CRASHED and run.texts)
        if runs[i].survived and any(texts <= runs[i].texts for texts in earlier):
            return runs[i:]
    return runs


def _half(texts: Set[int]) -> Texts:
    """The newer half; the larger one if their sizes differ."""
    return frozenset(sorted(texts)[len(texts) // 2 :])


def _union(sets: Iterable[Texts]) -> Texts:
    return frozenset[int]().union(*sets)
