"""Starts practice runs automatically when practice is on and the server is idle, and reports why none starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from service.core import PracticeState, TrainingRun
from service.lifecycle import policy, training
from service.lifecycle.context import LifecycleContext
from service.lifecycle.loans import SHORT, Borrower
from service.lifecycle.practice_choice import CONFIGURED, PracticeChoice
from service.store.registry.practice import practised

log = logging.getLogger(__name__)


class PracticeStarter:
    """choice: whether practice is on, and who decided that. idle_seconds: seconds since this server last handled a
    request. user: a message when a person is using the machine."""

    def __init__(
        self,
        context: LifecycleContext,
        choice: PracticeChoice,
        idle_seconds: Callable[[], float],
        user: Callable[[], str | None],
    ) -> None:
        self._context = context
        self._choice = choice
        self._idle_seconds = idle_seconds
        self._user = user
        self._waits: str | None = None
        """Why no practice run started at the last check."""
        self._run: int | None = None
        """The newest run claimed here."""

    @property
    def impossible(self) -> str | None:
        """Why practice cannot start automatically here, whatever is chosen."""
        context, rules = self._context, self._context.rules.training
        if not context.who.draft:
            return "this server runs without a draft model"
        if context.rules.spec.get("k") == 0:
            return "this server does not draft (engine.num_draft_tokens is 0)"
        if not rules.enabled:
            return "runs do not start automatically (training.enabled is false)"
        return None if rules.run_here else "this server leaves runs to others (training.run_here is false)"

    def state(self, *, working: bool) -> PracticeState:
        """See core.Operator. working: a child is running."""
        if (impossible := self.impossible) is not None:
            return PracticeState(False, impossible)
        on = self._choice.on
        waits = self._waits if on and not working else None
        return PracticeState(on, CONFIGURED if self._choice.configured else None, waits)

    def choose(self, on: bool) -> None:
        """Turns practice on or off. Raises what PracticeChoice.make raises."""
        self._choice.make(on)
        self._waits = None
        log.info("practice turned %s", "on" if on else "off")

    def started(self, run: TrainingRun) -> bool:
        """Whether this is the newest run claimed here."""
        return run.id == self._run

    def claim(self, hindered: str | None) -> TrainingRun | None:
        """Claims a practice run if practice is on and one is due. hindered: why no run at all may start."""
        if not self._choice.on or self.impossible is not None:
            return None
        self._waits = hindered
        if hindered is not None:
            return None
        context = self._context
        minutes = policy.practice_minutes(
            practised(context.stores.database, context.who, context.database_now()),
            per_day=context.rules.training.practice_minutes_per_day,
            idle_seconds=self._idle_seconds(),
            user=self._user(),
        )
        if isinstance(minutes, str):
            self._waits = minutes
            return None
        if not context.loans.borrow(Borrower.PRACTICE):
            self._waits = SHORT
            return None
        run = training.claim_practice(context, minutes, None, asked=False)
        if run is None:
            self._waits = "no recorded prompt to start from yet"
        else:
            self._run = run.id
        return run
