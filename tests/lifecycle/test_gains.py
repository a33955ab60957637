"""What the adapter that serves has gained: the figures, when they are measured, and what is said where there are none."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
from sqlalchemy import update

from service.core import RoundCosts, RunState, Score
from service.lifecycle.gains import MIN_ANSWERS, measure
from service.lifecycle.supervisor import Supervisor
from service.store.tables import gains
from tests.support.lifecycle_server import Installation, Server
from tests.support.simulated_scores import LEVEL, Population, pair, scores

RESAMPLES = 400


def measured(server: Server) -> list[str]:
    """Summaries of all measurements, oldest first."""
    with server.db.read() as connection:
        return list(connection.execute(gains.select().order_by(gains.c.id)).scalars())


def test_the_figures_are_those_of_the_scores() -> None:
    base, adapter = scores([20.0] * 30), scores([16.0] * 30)
    found = measure(adapter, base, None, resamples=RESAMPLES, seed=0)
    assert found is not None
    assert (found.answers, found.tokens, found.before, found.after) == (30, 3000, 5.0, 6.25)
    assert found.gain == pytest.approx(0.25) and found.low90 == pytest.approx(0.25) == found.high90
    assert (found.speed_gain, found.realised, found.overstated) == (None, None, False)
    assert found.summary.startswith("5.00 → 6.25 tokens a call, +25.0 % (+25.0 % to +25.0 %), on 30 answers")


def test_speed_is_of_the_best_draft_length_and_of_what_steps_cost() -> None:
    base, adapter = scores([20.0] * 30), scores([16.0] * 30)
    costs = RoundCosts(tuple(0.1 * level for level in LEVEL), (0.01, 0.02, 0.03))
    found = measure(adapter, base, costs, base_step=0.5, resamples=RESAMPLES, seed=0)
    assert found is not None and found.speed_gain is not None
    base_seconds = costs.scaled(0.5)
    before = 100 / min(20.0 * more * cost for more, cost in zip((1.4, 1.2, 1.0), base_seconds, strict=True))
    after = 100 / min(16.0 * more * cost for more, cost in zip((1.4, 1.2, 1.0), costs.seconds, strict=True))
    assert (found.speed_before, found.speed_after) == pytest.approx((before, after))
    assert found.speed_gain[0] == pytest.approx(after / before - 1) and found.speed_gain[0] < found.gain


def test_rounds_that_fall_short_of_their_scores_are_told() -> None:
    base = scores([20.0] * 30)
    adapter = [replace(one, rounds=10, accepted=20, predicted=30.0) for one in scores([16.0] * 30)]
    found = measure(adapter, base, None, resamples=RESAMPLES, seed=0)
    assert found is not None and found.overstated
    assert (found.realised, found.predicted) == (3.0, 4.0)
    assert found.summary.endswith("overstated: 3.00 were realised where 4.00 were predicted")


def test_few_conversations_give_no_figure() -> None:
    one = [replace(score, conversation="c") for score in scores([20.0] * 30)]
    assert measure(one, one, None, resamples=RESAMPLES, seed=0) is None
    assert measure([], [], None, resamples=RESAMPLES, seed=0) is None


def test_scores_of_other_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="different generations"):
        measure(scores([20.0] * 30), scores([20.0] * 30, start=1), None, resamples=RESAMPLES, seed=0)


@pytest.mark.parametrize(
    "logs", [pytest.param(200, id="few"), pytest.param(2000, marks=pytest.mark.nightly, id="many")]
)
def test_nine_intervals_in_ten_hold_what_is_realised(logs: int) -> None:
    """Each log has 30 to 200 answers, each a conversation of its own, of texts whose gain in the long run is known."""
    population = Population(better=0.02, differ=0.12)
    rng = np.random.default_rng(3)
    held = 0
    for seed in range(logs):
        chosen = rng.integers(len(population.calls), size=int(rng.integers(30, 201)))
        both = population.calls[chosen]
        adapter, base = (
            [
                Score(f"g{i}", "", int(tokens), 0, tuple(calls.tolist()))
                for i, (tokens, calls) in enumerate(zip(population.tokens[chosen], both[:, which], strict=True))
            ]
            for which in (0, 1)
        )
        found = measure(adapter, base, None, resamples=RESAMPLES, seed=seed)
        assert found is not None
        held += found.low90 <= population.gain <= found.high90
    print(f"{held / logs:.3f} of {logs} intervals hold the gain of {population.gain:+.3f}")
    assert 0.85 <= held / logs <= 0.95


def test_the_realised_figure_is_the_one_predicted() -> None:
    """A simulated engine accepts what its texts say, so scores that are exact are never said to be overstated."""
    rng, overstated = np.random.default_rng(0), 0
    for seed in range(50):
        adapter, base = pair(rng, 60, better=0.02, differ=0.1)
        rounds = [replace(one, rounds=10, accepted=int(rng.binomial(30, 0.6)), predicted=18.0) for one in adapter]
        found = measure(rounds, base, None, resamples=RESAMPLES, seed=seed)
        assert found is not None and found.realised is not None and found.predicted == pytest.approx(2.8)
        overstated += found.overstated
    assert overstated == 0


def test_the_watch_measures_too(installation: Installation) -> None:
    installation.watch = 40
    with installation.server() as server:
        assert server.supervisor.gains().reason == "no training run has been judged yet"
        ref = server.promote()
        state = server.supervisor.gains()
        assert state.adapter == ref.id and state.measured is None and "0 answers ago" in str(state.reason)
        server.traffic(40, cases=0)
        server.tick_until(server.watched(ref.id))
        state = server.supervisor.gains()
        assert state.measured is not None and state.measured.gain > 0.1 and state.reason is None
        assert server.events.measured == state.measured
    with installation.server() as successor:
        assert successor.events.measured == state.measured, "after a restart too"


def aged(server: Server, days: float) -> None:
    """Make all measurements older."""
    with server.db.read() as connection:
        newest = connection.execute(gains.select()).one().created_at
    older = update(gains).values(created_at=newest - timedelta(days=days))
    server.db.write(lambda connection: connection.execute(older)).result(60)


def looked(supervisor: Supervisor, times: int = 5) -> None:
    """Tick, with a look at each."""
    for _ in range(times):
        supervisor._gains._looked_at = None
        supervisor.tick()
        time.sleep(0.01)


def test_it_is_measured_again_after_a_day_when_idle(installation: Installation) -> None:
    with installation.server(enabled=False) as server:
        ref = promoted_and_watched(server)
        assert len(measured(server)) == 1
        server.traffic(MIN_ANSWERS, cases=0)
        looked(server.supervisor)
        assert len(measured(server)) == 1, "the last one is of today"
        aged(server, 1.1)
        server.idle_seconds = 59.0
        looked(server.supervisor)
        assert server.launcher.kinds.count("score") == 1, "something was asked a minute ago"
        server.idle_seconds = 61.0
        server.supervisor._gains._looked_at = None
        server.tick_until(lambda: len(measured(server)) == 2)
        assert server.supervisor.gains().adapter == ref


def test_without_new_answers_it_is_not_measured_again(installation: Installation) -> None:
    with installation.server(enabled=False) as server:
        promoted_and_watched(server)
        server.traffic(MIN_ANSWERS - 1, cases=0)
        aged(server, 9.0)
        looked(server.supervisor)
        assert server.launcher.kinds.count("score") == 1


@pytest.mark.parametrize("how", ["asked", "train"])
def test_what_is_asked_comes_first(installation: Installation, how: str) -> None:
    with installation.server(enabled=False) as server:
        promoted_and_watched(server)
        server.traffic(MIN_ANSWERS, cases=3)
        aged(server, 1.1)
        installation.plan_children(score="hang")
        server.supervisor._gains._looked_at = None
        server.tick_until(lambda: server.launcher.kinds.count("score") == 2)
        child = server.launcher.started[-1]
        if how == "asked":
            server.idle_seconds = 0.0
            server.tick_until(lambda: child.exit_code() is not None)
            assert len(measured(server)) == 1 and server.supervisor.working is False
        else:
            run = server.supervisor.request_training(None)
            assert child.exit_code() is not None
            server.tick_until(lambda: server.runs.get(run.id).state.over)


def promoted_and_watched(server: Server) -> int:
    """An adapter that a run made and that the watch is over for."""
    server.traffic()
    run = server.supervisor.request_training(None)
    server.tick_until(server.ended(RunState.PROMOTED))
    ref = server.runs.get(run.id).adapter
    assert ref is not None
    server.traffic(server.installation.watch, cases=0)
    server.tick_until(server.watched(ref))
    assert math.isinf(server.idle_seconds)
    return ref


def test_a_rejected_run_is_the_reason(installation: Installation) -> None:
    installation.plan_children(train="lose")
    with installation.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        state = server.supervisor.gains()
        assert state.adapter == 0 and state.measured is None and state.reason is not None
        assert state.reason.startswith("the base draft serves: run 1 was rejected (")


def test_a_rolled_back_adapter_is_the_reason(installation: Installation) -> None:
    with installation.server() as server:
        promoted_and_watched(server)
        server.supervisor.tick()
        assert server.events.measured is not None
        server.supervisor.rollback()
        server.supervisor.tick()
        assert server.events.measured is None, "it is of the adapter that serves"
        assert server.supervisor.gains().reason == "the base draft serves: adapter 1 was rolled back or switched off"
