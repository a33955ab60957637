"""The watch after a promotion, rollbacks, and what an operator may request."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text, update

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    AdapterRefused,
    AdapterState,
    BadRequest,
    Conflict,
    Generation,
    NotFound,
    RunState,
    Trigger,
    Verdict,
)
from service.lifecycle import watch
from service.models.fingerprint import folder_sha256
from service.store.registry.adapters import EvaluationKind
from service.store.tables import evaluations
from tests.support.lifecycle_server import ENOUGH, WHO, Installation, Server, check_consistent, generation


def test_a_promotion_that_turns_out_worse_is_rolled_back(installation: Installation) -> None:
    installation.plan_children(score="worse")
    with installation.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        server.supervisor.tick()
        (_, verdict) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)[0]
        assert not verdict.promoted and verdict.high90 < 0
        assert server.adapters.get(ref.id).state is AdapterState.ROLLED_BACK
        assert server.engine.active == BARE_DRAFT
        assert server.events.rollbacks == 1
        (judged,) = server.adapters.gates(WHO.target, WHO.draft)
        assert judged.p_value is not None and not judged.promoted, "it was no discovery"
        server.traffic(cases=0)
        for _ in range(5):
            server.supervisor.tick()
        assert server.engine.active == BARE_DRAFT, "it is not activated again by itself"
        check_consistent(server)


def test_a_forced_bad_promotion_is_rolled_back_to_its_parent(installation: Installation) -> None:
    with installation.server() as server:
        parent = server.promote()
        server.supervisor.activate(parent.id)
        installation.plan_children(train="lose", score="fair")
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        # A forced promotion of an adapter that needs more calls.
        bad = server.adapters.all()[0]
        force = text("update adapters set state = 'retired' where id = :id").bindparams(id=bad.id)
        server.db.write(lambda connection: connection.execute(force)).result(60)
        server.adapters.activate(bad.id, WHO.target, WHO.draft)
        server.adapters.record_evaluation(bad.id, EvaluationKind.GATE, Verdict(True, "forced", 0, 0, 0.0, 0.0, 0.0))
        server.supervisor.tick()
        assert server.engine.active == bad.id
        server.traffic(cases=0)
        server.tick_until(server.watched(bad.id))
        server.supervisor.tick()
        assert server.engine.active == parent.id
        check_consistent(server)


def test_neither_the_gate_nor_the_watch_waits_for_a_tick(installation: Installation) -> None:
    installation.plan_children(score="worse")
    with installation.server() as server:

        def follow_until(done: Callable[[], bool]) -> None:
            end = time.monotonic() + 60
            while not done():
                assert time.monotonic() < end
                server.supervisor.follow()
                time.sleep(0.01)

        server.traffic()
        server.supervisor.tick()
        follow_until(lambda: server.events.promotions == 1)
        server.traffic(cases=0)
        follow_until(lambda: server.events.rollbacks == 1)
        assert server.engine.active == BARE_DRAFT
        check_consistent(server)


def test_requests_that_wait_pause_training_and_for_a_bounded_time_a_comparison(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation.plan_children(score="hang")
    with installation.server() as server:
        ref = server.promote()
        server.busy = True
        server.traffic(cases=0)
        server.tick_until(lambda: len(server.launcher.started) == 2)
        server.supervisor.tick()
        assert paused(server) is True
        monkeypatch.setattr(watch, "PAUSED_SECONDS", 0.0)
        server.supervisor.tick()
        assert paused(server) is False, "under a load that never ends a bad adapter would serve for ever"
        server.supervisor.activate(ref.id)
        server.supervisor._jobs.end()
        installation.plan_children(train="hang")
        server.traffic()
        server.tick_until(lambda: len(server.launcher.started) == 3)
        assert paused(server) is True


def paused(server: Server) -> bool:
    job = server.supervisor._jobs.job
    assert job is not None
    return job.child._paused_since is not None


@pytest.mark.parametrize(("score", "warnings"), [("fair", 0), ("short", 1)])
def test_scores_that_the_engine_falls_short_of_are_warned_of(
    installation: Installation, caplog: pytest.LogCaptureFixture, score: str, warnings: int
) -> None:
    installation.plan_children(score=score)
    with installation.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        (_, verdict) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)[0]
        assert f"realised acceptance length 3.00, predicted {3.4 if warnings else 3:.2f}" in verdict.reason
        assert ("proven" in verdict.reason) is not bool(warnings)
        assert server.engine.active == ref.id
        levels = [record.levelname for record in caplog.records if record.name == "service.lifecycle.watch"]
        assert levels.count("WARNING") == warnings
        check_consistent(server)


def test_a_watch_that_cannot_compare_ends_and_keeps_the_adapter(installation: Installation) -> None:
    installation.plan_children(score="kill")
    with installation.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        assert len(server.launcher.started) == 1 + 3
        assert server.engine.active == ref.id
        check_consistent(server)


def test_an_operators_choice_ends_the_watch(installation: Installation) -> None:
    installation.plan_children(score="worse")
    with installation.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(lambda: len(server.launcher.started) == 2)
        assert server.supervisor.activate(ref.id) == server.adapters.get(ref.id)
        for _ in range(30):
            server.supervisor.tick()
            time.sleep(0.01)
        assert server.engine.active == ref.id
        assert len(server.adapters.evaluations(ref.id, EvaluationKind.WATCH)) == 1
        check_consistent(server)


def test_a_forced_run_needs_no_minimum_and_the_same_key_is_the_same_run(installation: Installation) -> None:
    with installation.server() as server:
        with pytest.raises(BadRequest):
            server.supervisor.request_training("first")
        server.traffic(1)
        run = server.supervisor.request_training("first")
        assert (run.state, run.trigger, run.generations) == (RunState.TRAINING, Trigger.MANUAL, 1)
        assert server.supervisor.request_training("first").id == run.id
        with pytest.raises(Conflict):
            server.supervisor.request_training("second")
        with pytest.raises(Conflict):
            server.supervisor.request_training(None)
        server.tick_until(server.ended(RunState.PROMOTED))
        assert server.supervisor.request_training("first").state is RunState.PROMOTED
        assert server.supervisor.run(run.id).state is RunState.PROMOTED
        assert len(server.launcher.started) == 1
        with pytest.raises(NotFound):
            server.supervisor.run(99)


def test_ties_alone_cannot_start_a_run(installation: Installation) -> None:
    with installation.server() as server:
        server.generations.add([generation("tie", tie=True)]).result(60)
        with pytest.raises(BadRequest):
            server.supervisor.request_training(None)


def test_an_operator_may_go_back_and_forth(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        assert server.supervisor.rollback() is None
        assert server.engine.active == BARE_DRAFT
        with pytest.raises(Conflict):
            server.supervisor.rollback()
        again = server.supervisor.activate(ref.id)
        assert again is not None and again.state is AdapterState.ACTIVE
        assert server.engine.active == ref.id
        assert server.supervisor.activate(BARE_DRAFT) is None
        assert server.engine.active == BARE_DRAFT
        assert [ref.state for ref in server.supervisor.adapters()] == [AdapterState.RETIRED]
        with pytest.raises(NotFound):
            server.supervisor.activate(99)
        check_consistent(server)


def test_an_operator_cannot_activate_a_rejected_candidate(installation: Installation) -> None:
    installation.plan_children(train="lose")
    with installation.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        with pytest.raises(Conflict):
            server.supervisor.activate(server.adapters.all()[0].id)
        check_consistent(server)


@pytest.mark.promise(7)
def test_activating_a_damaged_adapter_changes_nothing(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        server.supervisor.activate(BARE_DRAFT)
        (ref.folder / "adapters.safetensors").write_text("0.5")
        with pytest.raises(AdapterRefused):
            server.supervisor.activate(ref.id)
        assert server.engine.active == BARE_DRAFT
        check_consistent(server)


def test_a_candidate_is_promoted_only_over_the_adapter_it_was_compared_with(installation: Installation) -> None:
    with installation.server() as server:
        first = server.promote()
        server.supervisor.activate(first.id)
        server.traffic()
        server.tick_until(lambda: server.runs.current(WHO) is not None)
        server.supervisor.activate(BARE_DRAFT)
        server.tick_until(server.ended(RunState.REJECTED))
        verdict = server.runs.latest(1)[0].verdict
        assert verdict is not None and "no longer serves" in verdict.reason
        assert server.engine.active == BARE_DRAFT
        check_consistent(server)


# --------------------------------------------------------------------------------------------------- repeated checks


def force(server: Server, share: float) -> AdapterRef:
    """Promote a rejected candidate by force; its folder holds the share of calls that it needs."""
    (ref, *_) = server.adapters.all()
    assert ref.state is AdapterState.REJECTED and ref.run is not None
    (ref.folder / "adapters.safetensors").write_text(str(share))
    sha256 = folder_sha256(ref.folder)
    for change in (
        text("update adapters set state = 'retired', sha256 = :sha where id = :id").bindparams(id=ref.id, sha=sha256),
        text("delete from evaluations where adapter = :id").bindparams(id=ref.id),
    ):
        server.db.write(lambda connection, change=change: connection.execute(change)).result(60)
    server.adapters.activate(ref.id, WHO.target, WHO.draft)
    server.adapters.record_evaluation(ref.id, EvaluationKind.GATE, Verdict(True, "forced", 0, 0, 0.0, 0.0, 0.0))
    server.supervisor.tick()
    assert server.engine.active == ref.id
    return ref


def quarantined_and_replayable(server: Server) -> tuple[int, int]:
    """Numbers of quarantined cases, and of generations that may be replayed."""
    return server.generations.stats().quarantined, sum(server.replay.sizes().values())


@pytest.mark.promise(10)
def test_a_forced_bad_promotion_is_gone_within_200_generations_and_does_not_come_back(
    installation: Installation,
) -> None:
    installation.watch = 200
    installation.plan_children(train="lose")
    with installation.server(min_cases=3 * ENOUGH) as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        assert quarantined_and_replayable(server) == (0, ENOUGH)
        bad = force(server, 1.05)
        served = 0
        while server.engine.active == bad.id:
            assert served < 200
            server.traffic(10, cases=0)
            served += 10
            server.supervisor.tick()
            server.tick_until(lambda: server.launcher.started[-1].exit_code() is not None)
            server.supervisor.tick()
        assert served == 20, "the first check, after 12, is enough for a clear difference"
        assert server.engine.active == BARE_DRAFT
        assert server.adapters.get(bad.id).state is AdapterState.ROLLED_BACK
        assert quarantined_and_replayable(server) == (3 * ENOUGH, 0), "its texts are neither trained on nor replayed"
        assert server.events.rollbacks == 1
        for _ in range(40):
            server.traffic(10, cases=0)
            server.supervisor.tick()
        assert server.engine.served == [bad.id, BARE_DRAFT]
        check_consistent(server)


def test_an_adapter_worse_than_the_bare_draft_is_rolled_back_to_it(installation: Installation) -> None:
    """Its parent is even worse."""
    with installation.server() as server:
        parent = server.promote()
        server.supervisor.activate(parent.id)
        (parent.folder / "adapters.safetensors").write_text("1.5")
        sha256 = folder_sha256(parent.folder)
        change = text("update adapters set sha256 = :sha where id = :id").bindparams(id=parent.id, sha=sha256)
        server.db.write(lambda connection: connection.execute(change)).result(60)
        installation.plan_children(train="lose")  # 1.05: better than its parent
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        (run, *_) = server.runs.latest(1)
        assert run.verdict is not None and run.verdict.reason.startswith("worse on a, against the base draft")
        ref = force(server, 1.05)
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        server.supervisor.tick()
        assert server.adapters.active(WHO.target, WHO.draft) is None and server.engine.active == BARE_DRAFT
        ((_, verdict),) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert "the base draft" in verdict.reason
        assert server.adapters.get(parent.id).state is AdapterState.RETIRED
    with installation.server() as successor:
        assert successor.engine.active == BARE_DRAFT


def test_an_undecided_watch_checks_again_also_after_a_restart(installation: Installation) -> None:
    installation.watch = 40
    installation.plan_children(train="lose")
    with installation.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        ref = force(server, 1.0)  # as good as the bare draft: never decided before the last check
        server.traffic(10, cases=0)
        server.tick_until(lambda: len(server.adapters.evaluations(ref.id, EvaluationKind.INTERIM)) == 1)
        for _ in range(3):
            server.supervisor.tick()
        assert len(server.launcher.started) == 2, "the next check waits for its generations"
    with installation.server() as successor:
        for _ in range(3):
            successor.supervisor.tick()
        assert not successor.launcher.started
        successor.traffic(10, cases=0)
        successor.tick_until(lambda: len(successor.adapters.evaluations(ref.id, EvaluationKind.INTERIM)) == 2)
        successor.traffic(20, cases=0)
        successor.tick_until(successor.watched(ref.id))
        ((_, verdict),) = successor.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert verdict.promoted and verdict.prompts == 40
        assert successor.engine.active == ref.id
        check_consistent(successor)


def test_after_a_rollback_the_next_run_waits_and_after_the_next_one_twice_as_long(installation: Installation) -> None:
    installation.plan_children(score="worse")
    installation.backoff = 600.0
    with installation.server() as server:
        server.traffic()
        for number, wait in enumerate((0, 600, 1200)):
            # Rows carry the real time, so each wait begins at a clock offset of 0.
            installation.clock_offset = timedelta(seconds=max(wait - 60, 0))
            for _ in range(3 if wait else 0):
                server.supervisor.tick()
            assert len(server.runs.latest(9)) == number, "it waits"
            installation.clock_offset = timedelta(seconds=wait + 1)
            server.tick_until(lambda number=number: server.events.promotions == number + 1)
            installation.clock_offset = timedelta()
            server.traffic()  # enough for the watch, and for the next run
            server.tick_until(lambda number=number: server.events.rollbacks == number + 1)
        check_consistent(server)


def test_an_operators_rollback_is_a_lost_watch(installation: Installation) -> None:
    installation.backoff = 600.0
    with installation.server() as server:
        ref = server.promote()
        assert server.supervisor.rollback() is None
        ((_, verdict),) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert not verdict.promoted and "operator" in verdict.reason
        assert server.events.rollbacks == 1
        assert quarantined_and_replayable(server) == (3 * ENOUGH, 0), "its training cases are quarantined"
        server.traffic()
        installation.clock_offset = timedelta(seconds=301)
        for _ in range(3):
            server.supervisor.tick()
        assert len(server.runs.latest(9)) == 1, "it waits"
        installation.clock_offset = timedelta(seconds=601)
        server.tick_until(lambda: server.events.promotions == 2)
        check_consistent(server)


def test_two_clicks_on_rollback_go_back_once(installation: Installation) -> None:
    installation.plan_children(train="better")
    with installation.server() as server:
        first = server.promote()
        server.supervisor.activate(first.id)  # ends its watch
        second = server.promote()
        assert second.parent == first.id
        back = server.supervisor.rollback(expected=second.id)
        assert back is not None and back.id == first.id
        with pytest.raises(Conflict, match=f"adapter {first.id} is serving, not {second.id}"):
            server.supervisor.rollback(expected=second.id)
        assert server.engine.active == first.id
        assert server.supervisor.rollback(expected=first.id) is None
        with pytest.raises(Conflict, match="adapter 0 is serving"):
            server.supervisor.rollback(expected=first.id)
        check_consistent(server)


# ---------------------------------------------------------------------------------------------------- health checks


def checked(number: int) -> Generation:
    """A sampled answer to the prompt of a health check, so that no two of them are the same text to the store."""
    asked = generation("health", cases=0)
    return replace(asked, id=f"health-{number}", output=(*asked.output[:3], number), created_at=datetime.now(UTC))


def with_health_checks(
    installation: Installation, seed: int, checks: float, others: float, *, each: int = 5, client: str | None = None
) -> tuple[bool, int, int]:
    """A promotion's whole watch, with `each` identical health checks before every honest request. checks, others: share of the
    calls that the adapter needs on either. client: of the honest requests. Whether it was rolled back, after how many
    generations and honest ones."""
    installation.watch = 200
    installation.plan_children(score=f"health {checks} {others}")
    with installation.server() as server:
        ref = server.promote()
        served = honest = 0
        while not server.adapters.evaluations(ref.id, EvaluationKind.WATCH):
            assert served < 3000
            for _ in range(10):
                many = [checked(served + i) for i in range(each)]
                words = "".join(chr(97 + int(digit)) for digit in str(honest))
                made = generation(f"honest-{seed}-{words}", cases=0)
                made = replace(made, prompt=replace(made.prompt, client=client))
                server.generations.add([*many, made]).result(60)
                served, honest = served + each + 1, honest + 1
            server.supervisor.tick()
            server.tick_until(lambda: server.launcher.started[-1].exit_code() is not None)
            server.supervisor.tick()
        check_consistent(server)
        return bool(server.events.rollbacks), served, honest


def test_identical_health_checks_do_not_roll_back_a_good_adapter(installation: Installation) -> None:
    """A tenth slower on the one text that makes up five of six requests, a tenth faster on all others."""
    assert with_health_checks(installation, 0, 1.1, 0.9) == (False, 240, 40)


def test_identical_health_checks_do_not_keep_a_bad_adapter(installation: Installation) -> None:
    back, _, honest = with_health_checks(installation, 0, 0.9, 1.1, client="app")
    assert back and honest <= 100


def test_a_watch_on_traffic_that_is_one_text_comes_to_an_end(installation: Installation) -> None:
    installation.watch = 20
    installation.plan_children(score="health 1.1 0.9")
    with installation.server() as server:
        ref = server.promote()
        made = [checked(i) for i in range(200)]
        server.generations.add(made[:199]).result(60)
        server.tick_until(lambda: len(server.adapters.evaluations(ref.id, EvaluationKind.INTERIM)) == 1)
        for _ in range(3):
            server.supervisor.tick()
        assert len(server.launcher.started) == 2, "the last check waits"
        reads, read = list[int](), server.generations.texts_after
        server.stores.generations.texts_after = lambda *given: (reads.append(1), read(*given))[1]  # pyright: ignore
        for _ in range(5):
            server.supervisor.follow()
        assert len(reads) <= 1, "it reads no text again before there can be enough"
        server.generations.add(made[199:]).result(60)
        server.tick_until(server.watched(ref.id))
        ((_, verdict),) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert verdict.promoted and "1 conversations" in verdict.reason
        check_consistent(server)


def test_an_undecided_watch_holds_runs_back_for_a_quarter_of_its_answers_or_a_day(installation: Installation) -> None:
    installation.watch = 40
    installation.plan_children(train="lose")
    with installation.server() as server:
        server.traffic()
        server.tick_until(server.ended(RunState.REJECTED))
        ref, pending = force(server, 1.0), server.supervisor._watch
        assert pending.pending() == server.adapters.get(ref.id) and pending.blocks_runs()
        gate = update(evaluations).where(evaluations.c.adapter == ref.id)
        for hours, blocks in ((25, False), (23, True)):
            then = datetime.now(UTC) - timedelta(hours=hours)
            server.db.write(lambda connection: connection.execute(gate.values(created_at=then))).result(60)  # noqa: B023
            assert pending.blocks_runs() is blocks
        server.traffic(10, cases=0)
        server.tick_until(lambda: bool(server.adapters.evaluations(ref.id, EvaluationKind.INTERIM)))
        assert pending.pending() is not None and not pending.blocks_runs()


def test_after_a_day_a_watch_looks_at_the_answers_that_there_are(installation: Installation) -> None:
    installation.watch = 200
    installation.plan_children(train="lose")
    with installation.server(min_cases=10_000) as server:
        server.traffic()
        server.supervisor.request_training(None)
        server.tick_until(server.ended(RunState.REJECTED))
        ref = force(server, 1.0)
        server.traffic(9, cases=0)
        for _ in range(3):
            server.supervisor.tick()
        assert server.launcher.kinds == ["train"], "the first check wants twelve"
        then = datetime.now(UTC) - timedelta(hours=25)
        gate = update(evaluations).where(evaluations.c.adapter == ref.id).values(created_at=then)
        server.db.write(lambda connection: connection.execute(gate)).result(60)
        server.tick_until(lambda: bool(server.adapters.evaluations(ref.id, EvaluationKind.INTERIM)))
        ((_, verdict),) = server.adapters.evaluations(ref.id, EvaluationKind.INTERIM)
        assert verdict.prompts == 9
        for _ in range(5):
            server.supervisor.tick()
        assert server.launcher.kinds == ["train", "score"], "it does not look again before there are more"


@pytest.mark.parametrize("answers", [0, 3])
def test_a_watch_on_little_traffic_ends_after_a_week(installation: Installation, answers: int) -> None:
    """With what there is."""
    with installation.server() as server:
        ref = server.promote()
        server.traffic(answers, cases=0)
        gate = update(evaluations).where(evaluations.c.adapter == ref.id)
        for days, over in ((6.9, False), (7.1, True)):
            then = datetime.now(UTC) - timedelta(days=days)
            server.db.write(lambda connection: connection.execute(gate.values(created_at=then))).result(60)  # noqa: B023
            for _ in range(20):
                server.supervisor.tick()
                time.sleep(0.05 if over else 0.0)
                if server.adapters.evaluations(ref.id, EvaluationKind.WATCH):
                    break
            assert bool(server.adapters.evaluations(ref.id, EvaluationKind.WATCH)) is over
        ((_, verdict),) = server.adapters.evaluations(ref.id, EvaluationKind.WATCH)
        assert verdict.promoted and bool(verdict.prompts) is bool(answers)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("checks", "others", "back"), [(1.1, 0.95, False), (0.9, 1.05, True), (1.0, 1.05, True)])
def test_health_checks_beside_honest_traffic(
    installation: Installation, seed: int, checks: float, others: float, back: bool
) -> None:
    rolled_back, served, honest = with_health_checks(installation, seed, checks, others)
    print(f"checks {checks} others {others} seed {seed}: back {rolled_back}, {served} generations, {honest} honest")
    assert rolled_back is back
