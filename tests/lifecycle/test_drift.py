"""The drift detector: tables, simulated traffic, and the same state from the rows after a restart."""

import math
from dataclasses import replace

import numpy as np
import pytest

from service.core import BARE_DRAFT, Round, RunState, Source, Trigger, Verdict
from service.lifecycle.drift import BASELINE, LIMIT, SLACK, Drift, follow, rate
from service.store.registry.adapters import EvaluationKind
from tests.support.drift_traffic import drafted, record, usual
from tests.support.lifecycle_server import WHO, Installation, Server
from tests.support.simulated_scores import requests

USUAL = [0.6, 0.7] * (BASELINE // 2)
"""Mean 0.65, standard deviation 0.05."""


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([], None),
        ([(3, 3)] * 2, None),
        ([(3, 3)] * 3, 1.0),
        ([(3, 0)] * 8, 0.0),
        ([(3, 0)] * 7, None),
        # Tokens after the first rejection are not verified: 1 of 2, then 2 of 3, then 3 of 3.
        ([(3, 1), (4, 2), (3, 3)], 6 / 8),
        ([(0, 0)] * 50 + [(4, 4)] * 2, 1.0),
    ],
)
def test_the_rate_counts_verified_positions(rounds: list[tuple[int, int]], expected: float | None) -> None:
    assert rate([Round(5, 0, drafted, accepted, accepted + 1) for drafted, accepted in rounds], 5) == expected


def test_the_rate_counts_only_this_adapters_proposals() -> None:
    own = [Round(5, 0, 4, 2, 3)] * 4
    others = [Round(4, 0, 4, 0, 1)] * 9 + [Round(5, 0, 8, 8, 9, Source.LOOKUP)] * 9
    assert rate([*own, *others], 5) == rate(own, 5) == 8 / 12


def test_the_first_requests_set_the_baseline_and_raise_no_alarm() -> None:
    drift = follow([*USUAL[:-1], 0.0])
    assert not drift.alarm and drift.climb == 0.0
    drift = follow(USUAL)
    assert drift.mean == pytest.approx(np.mean(USUAL))
    assert drift.deviation == pytest.approx(np.std(USUAL, ddof=1))
    assert follow([0.6] * 40, drift).mean == drift.mean, "later requests do not change it"


@pytest.mark.parametrize(
    ("after", "climb"),
    [
        ([], 0.0),
        ([0.65], 0.0),
        ([0.70], 0.0),
        ([0.60], 1.0 - SLACK),
        ([0.60, 0.60], 2 * (1.0 - SLACK)),
        ([0.60, 0.70], 0.0),
        ([0.60, 0.60, 0.65], 2.0 - 3 * SLACK),
        # A request without any acceptance counts as three deviations.
        ([0.0], 3.0 - SLACK),
    ],
)
def test_the_sum_grows_by_the_shortfall_below_the_baseline(after: list[float], climb: float) -> None:
    # The sample deviation is a little more than 0.05.
    drift = follow(after, follow(USUAL))
    assert drift.climb == pytest.approx(climb, rel=0.01)
    assert drift.since == (len(after) if climb else 0)


def test_the_alarm_needs_height_and_certainty() -> None:
    usual = follow(USUAL)
    fallen = follow([0.6] * 40, usual)
    assert fallen.alarm and fallen.climb > LIMIT and fallen.z > 3
    assert not follow([0.6] * 30, usual).alarm
    # A shift smaller than the slack never adds up.
    assert not follow([0.64] * 5000, usual).alarm
    # A slightly larger shift adds up in the end, but the baseline is not known so exactly.
    slow = follow([0.637] * 5000, usual)
    assert slow.climb > LIMIT and slow.z > 3
    lucky = replace(slow, fallen=0.2 * slow.since)
    assert lucky.z < 3 and not lucky.alarm


def test_requests_that_are_all_alike_do_not_make_the_next_one_an_alarm() -> None:
    drift = follow([0.6] * 5, follow([0.65] * BASELINE))
    assert math.isfinite(drift.climb) and not drift.alarm


def first_alarms(rates: np.ndarray, usual: int = BASELINE) -> list[int | None]:
    """For each stream, the index of the request after the baseline that raised the alarm."""
    found: list[int | None] = []
    for stream in rates:
        drift, at = follow(stream[:usual]), None
        for index, value in enumerate(stream[usual:], start=1):
            drift = drift.observe(float(value))
            if drift.alarm:
                at = index
                break
        found.append(at)
    return found


def test_steady_traffic_raises_less_than_one_false_alarm_in_5000_requests() -> None:
    rng = np.random.default_rng(11)
    for usual_rate in (0.35, 0.65, 0.85):
        streams = 40
        alarms = [
            at for at in first_alarms(requests(rng, (streams, BASELINE + 5000), accepted=usual_rate)) if at is not None
        ]
        # 200,000 requests; at one in 5,000 there would be an alarm in 63 % of the streams.
        assert len(alarms) <= streams * 0.35, usual_rate


@pytest.mark.parametrize(("fallen", "within", "half"), [(0.55, 100, 45), (0.45, 30, 20)])
def test_a_real_fall_is_found_soon(fallen: float, within: int, half: int) -> None:
    """Acceptance 0.65 to 0.55, about one deviation of a request."""
    rng = np.random.default_rng(12)
    streams = 200
    rates = np.concatenate(
        [requests(rng, (streams, BASELINE)), requests(rng, (streams, 2 * within), accepted=fallen)], axis=1
    )
    at = first_alarms(rates)
    found = [request for request in at if request is not None]
    assert sum(request <= within for request in found) >= 0.98 * streams
    assert np.median(found) <= half


# ------------------------------------------------------------------------------------------------------- from rows


def follower(server: Server) -> Drift:
    return server.supervisor._drift.update()


def test_a_restart_restores_the_detector_from_the_rows(installation: Installation) -> None:
    with installation.server(min_cases=10_000) as server:
        for made in (usual()[:70], usual()[70:], [drafted(0.5) for _ in range(7)]):
            record(server, *made)
            server.supervisor.tick()
        known = follower(server)
        assert known.seen == BASELINE + 7 and known.climb > 0
    with installation.server(min_cases=10_000) as successor:
        assert follower(successor) == known
        record(successor, drafted(0.5))
        assert follower(successor).seen == BASELINE + 8


def test_a_swap_restarts_the_detector_and_requests_across_it_are_ignored(installation: Installation) -> None:
    with installation.server(min_cases=3, min_tokens=1) as server:
        record(server, *[drafted(0.65) for _ in range(30)])
        assert follower(server).seen == 30
        ref = server.promote()
        both = replace(drafted(0.65), rounds=(*drafted(0.65).rounds, *drafted(0.65, ref.id).rounds))
        record(server, both, drafted(0.65, ref.id), drafted(0.65, ref.id))
        assert follower(server).seen == 2
        assert server.supervisor.activate(BARE_DRAFT) is None
        assert follower(server).seen == 0
        record(server, drafted(0.65))
        assert follower(server).seen == 1
    with installation.server(enabled=False) as successor:
        assert follower(successor).seen == 1


def test_a_swap_there_and_back_between_two_ticks_restarts_the_detector(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        server.supervisor.activate(BARE_DRAFT)
        record(server, *[drafted(0.65) for _ in range(30)])
        assert follower(server).seen == 30
        server.supervisor.activate(ref.id)
        server.supervisor.activate(BARE_DRAFT)
        record(server, drafted(0.65))
        assert follower(server).seen == 1


def test_a_process_that_still_drafts_with_another_version_changes_nothing(installation: Installation) -> None:
    with installation.server(enabled=False) as server:
        record(server, *[drafted(0.65) for _ in range(30)], *[drafted(0.1, 7) for _ in range(3)])
        assert follower(server).seen == 30
        record(server, drafted(0.1, 7), drafted(0.65), drafted(0.1, 7))
        assert follower(server).seen == 31


def test_generations_of_another_draft_are_ignored(installation: Installation) -> None:
    with installation.server(enabled=False) as server:
        other_draft = replace(drafted(0.1), provenance=replace(WHO, draft="another"))
        record(server, drafted(0.65), other_draft, drafted(0.65))
        assert follower(server).seen == 2


def test_drift_starts_a_run_with_fewer_cases_and_ends_with_its_verdict(installation: Installation) -> None:
    installation.plan_children(train="lose")
    with installation.server(min_cases=400, min_tokens=100) as server:
        record(server, *usual())
        server.supervisor.tick()
        record(server, *[drafted(0.3, cases=4) for _ in range(24)])
        for _ in range(3):
            server.supervisor.tick()
        assert follower(server).alarm
        assert not server.runs.latest(1), "96 of 100 cases"
        record(server, drafted(0.3, cases=4))
        server.tick_until(server.ended(RunState.REJECTED))
        assert server.runs.latest(1)[0].trigger is Trigger.DRIFT
        record(server, *[drafted(0.3, cases=4) for _ in range(30)])
        for _ in range(5):
            server.supervisor.tick()
        assert not follower(server).alarm, "that is how it is now"
        assert len(server.runs.latest(9)) == 1


def test_a_crashed_run_leaves_the_drift_open(installation: Installation) -> None:
    installation.plan_children(train="kill")
    with installation.server(min_cases=400, min_tokens=100) as server:
        record(server, *usual(), *[drafted(0.3, cases=4) for _ in range(25)])
        server.tick_until(server.ended(RunState.CRASHED))
        installation.plan_children()
        server.tick_until(server.ended(RunState.PROMOTED))
        runs = server.runs.latest(9)
        assert {run.trigger for run in runs} == {Trigger.DRIFT}
        ref = server.adapters.active(WHO.target, WHO.draft)
        assert ref is not None
        server.adapters.record_evaluation(ref.id, EvaluationKind.WATCH, Verdict(True, "fine", 9, 9, 0.1, 0.0, 0.2))
        record(server, *[drafted(0.3, ref.id, cases=4) for _ in range(30)])
        for _ in range(3):
            server.supervisor.tick()
        assert follower(server).seen == 30 and server.runs.latest(9) == runs
