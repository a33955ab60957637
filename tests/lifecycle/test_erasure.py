"""Erasing through the supervisor: a child that read an erased text is ended, and adapters that learnt one are marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import psutil
import pytest
from sqlalchemy import select

from service.core import (
    BARE_DRAFT,
    AdapterState,
    Conflict,
    Erased,
    RunState,
    Selection,
    TrainingRun,
    Unavailable,
)
from service.lifecycle import cleaning, erasing
from service.store.tables import members
from tests.support.lifecycle_server import (
    ENOUGH,
    HELD_OUT_TEXTS,
    WHO,
    Installation,
    Server,
    check_consistent,
    generation,
)
from tests.support.store_rows import HELD_OUT_TEXT

REASON = "a text that it had read was erased"


def of(*names: str) -> Selection:
    return Selection(ids=frozenset(names))


def add(server: Server, names: Sequence[str], *, cases: int = 3, first_user: str | None = None) -> list[str]:
    made = [generation(name, cases=cases) for name in names]
    if first_user is not None:
        made = [replace(one, prompt=replace(one.prompt, first_user=first_user)) for one in made]
    server.generations.add(made).result(60)
    return list(names)


def started(server: Server, *, state: RunState = RunState.TRAINING) -> TrainingRun:
    """Texts new0, new1, ... to learn from, and the run that begins with them, as soon as its child has said what it does."""
    add(server, [f"new{i}" for i in range(ENOUGH)])

    def under_way() -> bool:
        run = server.runs.current(WHO)
        return run is not None and run.state is state and run.progress.step > 0

    server.tick_until(under_way)
    run = server.runs.current(WHO)
    assert run is not None
    return run


def alive(server: Server) -> bool:
    pid = server.launcher.started[-1].pid
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_run_that_learns_from_an_erased_text_is_ended_and_its_other_texts_are_free(
    installation: Installation,
) -> None:
    installation.plan_children(train="name old: hang")
    with installation.server() as server:
        add(server, ["old", "other"], cases=0)
        run = started(server)
        assert server.supervisor.erase(of("other")) == Erased(1, (), ())
        assert alive(server) and not server.runs.get(run.id).state.over, "it learns from none of it"
        assert server.supervisor.erase(of("new0")) == Erased(1, (), ())
        ended = server.runs.get(run.id)
        assert (ended.state, ended.error) == (RunState.ENDED, REASON)
        assert not alive(server)
        assert server.training_texts.untrained(WHO).generations == ENOUGH - 1, "free for other runs"
        # A second and a third such run count as no crash over the texts that are left.
        for name in ("old", "new1"):
            again = server.supervisor.request_training(None)
            server.tick_until(lambda id=again.id: server.runs.get(id).progress.step > 0)
            server.supervisor.erase(of(name))
            assert server.runs.get(again.id).error == REASON, name
        assert server.training_texts.untrained(WHO).generations == ENOUGH - 2
        check_consistent(server)


def test_nothing_starts_while_texts_are_being_erased(installation: Installation) -> None:
    """The rows are there still, when this process has forgotten them already."""
    installation.plan_children(train="hang")
    with installation.server() as server:
        add(server, [f"new{i}" for i in range(ENOUGH)])
        number = server.stores.erasures.ask(of("new0"))
        server.supervisor.tick()
        server.supervisor.follow()
        with pytest.raises(Conflict, match="texts are being erased"):
            server.supervisor.request_training(None)
        assert server.runs.latest(9) == []
        server.stores.erasures.end(number)
        server.supervisor.tick()
        assert server.supervisor.working


def test_an_erasure_whose_asker_is_gone_does_not_stop_runs_for_good(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        add(server, [f"new{i}" for i in range(ENOUGH)])
        server.stores.erasures.ask(of("new0"))
        server.supervisor.tick()
        server.supervisor.tick()
        assert server.stores.erasures.asked() and not server.supervisor.working
        monkeypatch.setattr(erasing, "ABANDONED_SECONDS", 0.0)
        server.supervisor.tick()
        server.supervisor.tick()
        assert not server.stores.erasures.asked() and server.supervisor.working


def test_a_child_that_has_not_said_yet_what_it_reads_is_ended_by_any_erasure(installation: Installation) -> None:
    installation.plan_children(train="hang")
    with installation.server() as server:
        add(server, ["other"], cases=0)
        run = started(server)
        server.supervisor.erase(of("other"))
        assert server.runs.get(run.id).error == REASON
        assert not alive(server)
        check_consistent(server)


@pytest.mark.parametrize(
    ("act", "state", "ends"),
    [("hang", RunState.TRAINING, False), ("hang after the candidate", RunState.SCORING, True)],
)
def test_held_out_texts_are_read_by_a_child_that_scores(
    installation: Installation, act: str, state: RunState, ends: bool
) -> None:
    installation.plan_children(train=f"name old: {act}")
    with installation.server() as server:
        add(server, ["measured"], first_user=HELD_OUT_TEXT)
        run = started(server, state=state)
        server.supervisor.erase(of("measured"))
        assert server.runs.get(run.id).state.over is ends
        assert alive(server) is not ends


def test_the_candidate_of_a_run_that_is_ended_is_marked_and_never_serves(installation: Installation) -> None:
    installation.plan_children(train="name old: hang after the candidate")
    with installation.server() as server:
        started(server, state=RunState.SCORING)
        (ref,) = server.adapters.all()
        assert server.supervisor.erase(of("new0", "new1")) == Erased(2, (ref.id,), ())
        (ref,) = server.adapters.all()
        assert (ref.state, ref.erased_texts) == (AdapterState.BROKEN, 2)
        check_consistent(server)


def test_a_folder_that_nobody_has_named_yet_goes_with_its_run(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where processes share a database, such a folder is left alone for a day: another may be about to name it.
    monkeypatch.setattr(cleaning, "SWEEP_GRACE_SECONDS", 0.0)
    installation.plan_children(train="hang")
    with installation.server() as server:
        started(server)
        half = installation.home / "adapters" / ".run-1-1.part"
        half.mkdir(parents=True)
        server.supervisor.erase(of("new0"))
        assert not half.exists()


def test_a_comparison_under_way_is_ended_and_begins_again(installation: Installation) -> None:
    installation.plan_children(score="hang")
    with installation.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(lambda: server.launcher.kinds[-1] == "score")
        server.supervisor.erase(of("new0"))
        assert not alive(server)
        installation.plan_children()
        server.tick_until(server.watched(ref.id))
        check_consistent(server)


def test_marked_adapters_serve_on_unless_they_are_retired(installation: Installation) -> None:
    installation.plan_children(train="better")
    with installation.server() as server:
        add(server, [f"new{i}" for i in range(ENOUGH)])
        first = server.promote()
        server.traffic(cases=0)
        server.tick_until(server.watched(first.id))
        second = server.promote()
        assert server.supervisor.erase(of("new0")).adapters == (first.id, second.id)
        server.supervisor.tick()
        assert server.engine.active == second.id
        assert server.supervisor.erase(of("new1"), retire_adapters=True).revoked == (first.id, second.id)
        assert server.engine.active == server.events.serving_now == BARE_DRAFT
        assert {ref.id: (ref.state, ref.erased_texts) for ref in server.supervisor.adapters()} == {
            first.id: (AdapterState.REVOKED, 2),
            second.id: (AdapterState.REVOKED, 2),
        }
        for ref in (first, second):
            with pytest.raises(Conflict, match="revoked"):
                server.supervisor.activate(ref.id)
        check_consistent(server)


def test_a_run_on_top_of_an_adapter_that_is_retired_is_ended(installation: Installation) -> None:
    with installation.server() as server:
        ref = server.promote()
        server.traffic(cases=0)
        server.tick_until(server.watched(ref.id))
        (learnt, *_) = server.training_texts.claimed_names(server.runs.latest(1)[0].id)
        installation.plan_children(train="name old: hang")
        run = started(server)
        assert run.parent == ref.id
        assert server.supervisor.erase(of(learnt[0]), retire_adapters=True).revoked == (ref.id,)
        ended = server.runs.get(run.id)
        assert (ended.state, ended.error) == (
            RunState.ENDED,
            "the adapter it was trained on was revoked",
        )
        assert server.training_texts.untrained(WHO).generations == ENOUGH
        assert server.engine.active == BARE_DRAFT
        check_consistent(server)


def test_every_place_forgets_before_the_rows_go(installation: Installation) -> None:
    seen: list[tuple[str, Selection, int]] = []

    def place(name: str) -> None:
        installation.forget[name] = lambda asked: seen.append((name, asked, server.generations.stats().generations))

    place("one")
    place("another")
    installation.held_out = False
    with installation.server() as server:
        add(server, ["a", "b"])
        asked = of("a")
        server.supervisor.erase(asked)
        assert seen == [("one", asked, 2), ("another", asked, 2)]
        assert server.generations.stats().generations == 1


def test_a_process_says_that_it_has_forgotten_only_then(installation: Installation) -> None:
    """Whoever erases deletes the rows as soon as all processes have said so."""

    def said() -> int:
        with server.stores.database.read() as connection:
            return connection.execute(select(members.c.erased)).scalar_one()

    seen: list[int] = []
    installation.forget["one"] = lambda selection: seen.append(said())
    with installation.server() as server:
        add(server, ["a", "b"])
        for number, name in enumerate(("a", "b"), 1):
            server.supervisor.erase(of(name))
            assert said() == number
    assert seen == [0, 1]


def test_an_erasure_that_failed_is_completed_by_the_next_one(installation: Installation) -> None:
    def fail(selection: Selection) -> None:
        raise Unavailable("the engine died")

    installation.plan_children(train="name old: hang")
    installation.forget["engine"] = fail
    with installation.server() as server:
        run = started(server)
        with pytest.raises(Unavailable):
            server.supervisor.erase(of("new0"))
        assert server.runs.get(run.id).error == REASON
        assert server.generations.stats().generations == ENOUGH + HELD_OUT_TEXTS, "nothing is half erased"
        del installation.forget["engine"]
        server.supervisor.erase(of("new0"))
        assert server.generations.stats().generations == ENOUGH + HELD_OUT_TEXTS - 1
        check_consistent(server)


def test_nothing_is_erased_after_the_end(installation: Installation) -> None:
    with installation.server() as server:
        server.supervisor.stop()
        with pytest.raises(Conflict):
            server.supervisor.erase(Selection(everything=True))
