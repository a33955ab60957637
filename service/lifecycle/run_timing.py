"""When runs on logged texts may start automatically: gathers the inputs for the rules in `policy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from service.core import BARE_DRAFT, AdapterRef, LearningState, TrainingRun, Verdict
from service.lifecycle import policy
from service.lifecycle.context import LifecycleContext
from service.lifecycle.gate import AGAINST_BASE
from service.store.log.held_out import HeldOut, held_out_counts
from service.store.registry.adapters import EvaluationKind
from service.store.registry.run_history import RunTimes, run_times

RUNS = 16
"""Number of newest runs searched for consecutive refusals."""


class RunTiming:
    """idle_seconds: seconds since this server last handled a request."""

    def __init__(self, context: LifecycleContext, idle_seconds: Callable[[], float]) -> None:
        self._context = context
        self._idle_seconds = idle_seconds
        self._busy = policy.BusyTime()
        self._observed_at = context.timer()
        self._held_out: tuple[int, HeldOut] | None = None
        """The count of held-out texts, and the end of the log at which it was made."""
        self.waits: str | None = None
        """Why no run started at the last check."""

    def observe(self) -> None:
        """Counts the time since the last call as busy or idle."""
        now = self._context.timer()
        self._busy.add(max(now - self._observed_at, 0.0), busy=self._idle_seconds() == 0.0)
        self._observed_at = now

    def hindrance(self) -> str | None:
        """Why no run should start now although there is enough to learn, or None."""
        gates, rules = self._gates(), self._context.rules
        times = self._times()
        return (
            policy.used_up(times, rules.training.minutes_per_day)
            or self._wrong_moment(times, gates)
            or policy.unjudgeable(self._count_held_out(), rules.gate, policy.levels(gates)[0])
        )

    def state(self, *, working: bool) -> LearningState:
        """See core.Operator. working: a child is running."""
        context, gates, times = self._context, self._gates(), self._times()
        (level, after), held_out = policy.levels(gates), self._count_held_out()
        # Only the process that leads checks whether a run is due; the others know only about held-out texts.
        waits = None if working else self.waits or policy.unjudgeable(held_out, context.rules.gate, level)
        return LearningState(
            waits=waits,
            refused=policy.refusals(self._runs()),
            level=level,
            level_after_promotion=after,
            held_out=held_out.prompts,
            held_out_needed=policy.prompts_needed(context.rules.gate, level),
            minutes=times.seconds / 60,
            minutes_per_day=context.rules.training.minutes_per_day,
            expected_gain=policy.expected_gain(gates),
            against_base=self._against_base(),
        )

    def _wrong_moment(self, times: RunTimes, gates: Sequence[Verdict]) -> str | None:
        wanted = self._context.rules.training.idle_seconds
        return policy.wrong_moment(self._idle_seconds(), self._busy.share, times, gates, wanted=wanted)

    def _runs(self) -> Sequence[TrainingRun]:
        return self._context.stores.runs.newest(self._context.who, RUNS)

    def _gates(self) -> list[Verdict]:
        return self._context.stores.adapters.gates(self._context.who.target, self._context.who.draft)

    def _times(self) -> RunTimes:
        return run_times(self._context.stores.database, self._context.who, self._context.database_now())

    def _count_held_out(self) -> HeldOut:
        stored, rules = self._context.stores.generations, self._context.rules.gate
        end = stored.end()
        if self._held_out is None or self._held_out[0] != end:
            self._held_out = end, held_out_counts(stored, self._context.who, rules.max_prompts)
        return self._held_out[1]

    def _against_base(self) -> dict[str, tuple[float, float, float]]:
        """Gains of the active adapter over the base draft at its gate, by set."""
        ref = self._context.active_ref()
        gates = [] if ref is None else self._context.stores.adapters.evaluations(ref.id, EvaluationKind.GATE)
        if ref is None or not gates:
            return {}
        return against_base(ref, gates[-1][1])


def against_base(ref: AdapterRef, verdict: Verdict) -> dict[str, tuple[float, float, float]]:
    """Gains (gain, low, high) of an adapter over the base draft, by set: as bounded by the gate, or those of the golden
    set and the domains when its parent is the base draft."""
    if ref.parent != BARE_DRAFT:
        return {
            name.removesuffix(AGAINST_BASE): gain
            for name, gain in verdict.domains.items()
            if name.endswith(AGAINST_BASE)
        }
    return dict(verdict.domains)
