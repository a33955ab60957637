"""What the newest generations say of the draft that serves: drift, followed from tick to tick and found again in the rows."""

from __future__ import annotations

from service.lifecycle.drift import Drift, follow, rate
from service.lifecycle.parts import Parts

PAGE = 500
REBUILT = 10_000
"""Generations read back at most after a restart; the oldest of them are the baseline then."""


class Traffic:
    """Drift of the draft that serves, since it was switched in or since a run was claimed that drift had set off and that came
    to a verdict."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._about: tuple[int, int] | None = None
        self._drift = Drift()
        self._seen = 0

    def drift(self) -> Drift:
        """With everything recorded so far."""
        parts = self._parts
        adapter, draft = parts.serving(), parts.who.draft
        since = max(parts.adapters.serves_since(draft), parts.runs.drift_answered(draft))
        if self._about != (adapter, since):
            self._about, self._drift, self._seen = (adapter, since), Drift(), since
        newest, rates = self._read(adapter)
        self._drift, self._seen = follow(reversed(rates), self._drift), newest
        return self._drift

    def _read(self, adapter: int) -> tuple[int, list[float]]:
        """The newest seq; rates of what is new, newest first."""
        newest, below, read, rates = self._seen, None, 0, list[float]()
        while read < REBUILT:
            page = self._parts.generations.drafting(self._parts.who, PAGE, above=self._seen, below=below)
            for made in page:
                newest = max(newest, made.seq)
                # One that saw a swap says something of both. Another process may still draft with the version before.
                if {round_.adapter for round_ in made.rounds} == {adapter}:
                    value = rate(made.rounds, adapter)
                    rates += [value] if value is not None else []
            if len(page) < PAGE:
                break
            below, read = page[-1].seq, read + len(page)
        return newest, rates
