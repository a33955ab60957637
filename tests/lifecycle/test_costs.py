"""Measured costs decide at which draft lengths the gate and the watch compare adapters."""

import pytest

from service.core import RunState
from service.store.registry.adapters import EvaluationKind
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, check_consistent


@pytest.fixture
def installation(installation: Installation) -> Installation:
    """Children train adapters that need a fifth fewer calls, but only at a draft length of three."""
    installation.plan_children(train="long")
    return installation


# Calls at 1, 2 and 3 drafted tokens are as 1.4, 1.2 and 1, the candidate's as 1.4, 1.2 and 0.8.
@pytest.mark.parametrize(
    ("costs", "gain", "message"),
    [
        (None, 0.25, "at K = 3,"),
        ((1.0, 1.0, 1.0), 0.25, "at K = 3,"),
        ((1.0, 1.1, 1.2), 0.25, "at K = 3,"),
        ((1.0, 1.3, 1.7), 1.4 / (0.8 * 1.7) - 1, "at K = 3 against K = 1,"),
        ((1.0, 2.0, 3.0), 0.0, "at K = 1,"),
    ],
)
def test_a_candidate_that_is_better_at_three_serves_where_three_pay(
    installation: Installation, costs: tuple[float, ...] | None, gain: float, message: str
) -> None:
    with installation.server() as server:
        server.engine.costs = costs
        server.traffic()
        server.tick_until(server.ended(RunState.PROMOTED if gain else RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None
        assert verdict.gain == pytest.approx(gain)
        assert message in verdict.reason
        (ref,) = server.adapters.all()
        assert verdict.measured_on == ref.measured_on == (() if costs is None else ("a test's machine",))
        assert ref.learnt_from == ENOUGH
        check_consistent(server)


def test_costs_for_other_draft_lengths_are_not_used(installation: Installation) -> None:
    with installation.server() as server:
        server.engine.costs = (1.0, 1.1)
        server.traffic()
        server.tick_until(lambda: server.events.promotions == 1)
        (run,) = server.runs.latest(1)
        assert run.verdict is not None and run.verdict.gain == pytest.approx(0.25), "by calls alone"
        ref = server.adapters.active(WHO.target, WHO.draft)
        assert ref is not None
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        ((_, watched),) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert watched.promoted and watched.prompts, "the watch compares without them too"


def test_the_watch_uses_costs_too(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        server.engine.costs = (1.0, 2.0, 3.0)
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        ((_, verdict),) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert verdict.promoted and verdict.gain == 0.0
        assert "at K = 1," in verdict.reason


def test_a_candidate_whose_draft_steps_cost_more_is_refused(installation: Installation) -> None:
    """A fifth fewer calls at any draft length, a gain of 25 %, but draft steps that take twice the time."""
    installation.plan_children(train="slow steps")
    with installation.server() as server:
        server.engine.costs, server.engine.draft_step = (1.0, 1.3, 1.6), 0.3
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None
        # Both at K = 1: 1.4 x 0.8 calls of 1 + 0.3 against 1.4 calls of 1.
        assert verdict.gain == pytest.approx(1.4 / (1.12 * 1.3) - 1)
        check_consistent(server)


def test_the_watch_rolls_back_an_adapter_that_costs_more_than_it_saves(installation: Installation) -> None:
    """The adapter serves, so the engine measured its draft step; those of the others cost half of it."""
    installation.plan_children(train="better", score="slow steps")
    with installation.server() as server:
        ref = server.promote()
        server.engine.costs, server.engine.draft_step = (2.0, 2.9, 3.8), 0.9
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        ((_, verdict),) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert not verdict.promoted
        # Both at K = 1: 1.4 x 0.8 calls of 2 against 1.4 calls of 2 - 0.45.
        assert verdict.gain == pytest.approx(1.55 / (0.8 * 2.0) - 1)
