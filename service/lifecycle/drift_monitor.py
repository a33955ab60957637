"""Drift of the draft that serves: updated from the newest generations at every tick, rebuilt from the rows after a restart."""

from __future__ import annotations

from service.lifecycle.context import LifecycleContext
from service.lifecycle.drift import Drift, follow, rate

PAGE = 500
REBUILT = 10_000
"""Generations read back at most after a restart; the oldest of them are the baseline then."""


class DriftMonitor:
    """Drift of the draft that serves, since it was switched in or since a run was claimed that drift had set off and that came
    to a verdict."""

    def __init__(self, context: LifecycleContext) -> None:
        self._context = context
        self._of: tuple[int, int] | None = None
        """The adapter, and the generation (seq) since when."""
        self._drift = Drift()
        self._read_to = 0

    def update(self) -> Drift:
        """Read what was recorded since the last call; the drift with all of it."""
        stores, who = self._context.stores, self._context.who
        adapter = self._context.active_adapter()
        since = max(stores.adapters.serves_since(who.target, who.draft), stores.runs.drift_answered(who))
        if self._of != (adapter, since):
            self._of, self._drift, self._read_to = (adapter, since), Drift(), since
        newest, rates = self._rates(adapter)
        self._drift, self._read_to = follow(reversed(rates), self._drift), newest
        return self._drift

    def _rates(self, adapter: int) -> tuple[int, list[float]]:
        """The newest seq; rates of what is new, newest first."""
        newest, below, read, rates = self._read_to, None, 0, list[float]()
        while read < REBUILT:
            page = self._context.stores.generations.drafting(self._context.who, PAGE, above=self._read_to, below=below)
            for generation in page:
                newest = max(newest, generation.seq)
                # One that saw a swap was drafted by both. Another process may still draft with the version before.
                if {round_.adapter for round_ in generation.rounds} == {adapter}:
                    value = rate(generation.rounds, adapter)
                    rates += [value] if value is not None else []
            if len(page) < PAGE:
                break
            below, read = page[-1].seq, read + len(page)
        return newest, rates
