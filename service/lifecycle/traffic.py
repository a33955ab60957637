"""What the newest generations say of the draft that serves: drift, followed from tick to tick and found again in the rows."""

from __future__ import annotations

from datetime import datetime

from service.lifecycle.drift import Drift, follow, rate
from service.lifecycle.parts import Parts

PAGE = 500
REBUILT = 10_000
"""Generations read back at most after a restart; the oldest of them are the baseline then."""


class Traffic:
    """Drift of the draft that serves, since it was switched in or since a run that drift had set off came to its verdict."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._about: tuple[int, datetime | None] | None = None
        self._drift = Drift()
        self._seen = 0

    def drift(self) -> Drift:
        """With everything recorded so far."""
        parts = self._parts
        adapter, answered = parts.serving(), parts.runs.drift_answered(parts.who.draft)
        if self._about != (adapter, answered):
            self._about, self._drift, self._seen = (adapter, answered), Drift(), 0
        newest, rates, whole = self._read(adapter, answered)
        self._drift = follow(reversed(rates), Drift() if whole else self._drift)
        self._seen = max(self._seen, newest)
        return self._drift

    def _read(self, adapter: int, since: datetime | None) -> tuple[int, list[float], bool]:
        """The newest seq; rates of what is new, newest first; whether they go back to where this draft began."""
        newest, below, read, rates = 0, None, 0, list[float]()
        while read < REBUILT:
            page = self._parts.generations.drafting(self._parts.who, PAGE, above=self._seen, below=below)
            for made in page:
                newest = max(newest, made.seq)
                drafted = {round_.adapter for round_ in made.rounds}
                if (since is not None and made.created_at <= since) or (drafted and adapter not in drafted):
                    return newest, rates, True
                # One that saw the swap says something of both.
                if drafted == {adapter} and (value := rate(made.rounds, adapter)) is not None:
                    rates.append(value)
            if len(page) < PAGE:
                break
            below, read = page[-1].seq, read + len(page)
        return newest, rates, False
