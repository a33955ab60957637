"""Files of adapters that will not serve again are deleted; those that a rollback may need stay."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from service.core import BARE_DRAFT, AdapterRef, AdapterState, Conflict, NotFound, RunState
from service.lifecycle.cleaning import removable
from tests.support.databases import BOTH
from tests.support.lifecycle_server import WHO, Installation, Server

ACTIVE, RETIRED, ROLLED_BACK = AdapterState.ACTIVE, AdapterState.RETIRED, AdapterState.ROLLED_BACK


def adapter(number: int, parent: int, state: AdapterState, draft: str = "draft") -> AdapterRef:
    now = datetime.now(UTC)
    return AdapterRef(
        number, Path(f"run-{number}-1"), "", 16, 2.0, (), draft, parent, number, state, now, target="target"
    )


CHAIN = [
    adapter(1, 0, RETIRED),
    adapter(2, 1, ROLLED_BACK),
    adapter(3, 1, RETIRED),
    adapter(4, 3, ROLLED_BACK),
    adapter(5, 3, AdapterState.REJECTED),
    adapter(6, 3, ACTIVE),
    adapter(7, 6, AdapterState.CANDIDATE),
]


@pytest.mark.parametrize(("keep", "ids"), [(0, [4, 2]), (1, [2]), (2, []), (9, [])])
def test_the_newest_stay_beside_the_active_one_and_its_ancestors(keep: int, ids: list[int]) -> None:
    assert [ref.id for ref in removable(CHAIN, keep)] == ids


def test_each_pair_keeps_its_own() -> None:
    others = [replace(ref, id=ref.id + 10, parent=ref.parent and ref.parent + 10, draft="other") for ref in CHAIN]
    assert {ref.id for ref in removable([*CHAIN, *others], 1)} == {2, 12}
    bare = [replace(ref, state=RETIRED if ref.state is ACTIVE else ref.state) for ref in CHAIN]
    assert [ref.id for ref in removable(bare, 2)] == [3, 2, 1], "no adapter serves, so that none is an ancestor"


def promoted(server: Server) -> AdapterRef:
    """One more adapter that serves."""
    before = server.adapters.active(WHO.target, WHO.draft)
    server.traffic()
    run = server.supervisor.request_training(None)
    server.tick_until(lambda: server.runs.get(run.id).state is RunState.PROMOTED)
    ref = server.adapters.active(WHO.target, WHO.draft)
    assert ref is not None and ref != before
    return ref


@BOTH
def test_a_clean_deletes_what_cannot_serve(installation: Installation) -> None:
    with installation.server(enabled=False) as server:
        first = promoted(server)
        server.supervisor.rollback()
        installation.plan_children(train="lose")
        server.traffic()
        server.supervisor.request_training(None)
        server.tick_until(server.ended(RunState.REJECTED))
        rejected = server.adapters.all()[0]
        installation.plan_children()
        second = promoted(server)
        assert first.folder.is_dir()
    installation.keep_adapters = 0
    with installation.server(enabled=False) as server:
        assert {ref.id: ref.state for ref in server.adapters.all()} == {
            first.id: AdapterState.REMOVED,
            rejected.id: AdapterState.REJECTED,
            second.id: ACTIVE,
        }
        assert [ref.folder.is_dir() for ref in (first, rejected, second)] == [False, False, True]
        with pytest.raises(Conflict, match="removed"):
            server.supervisor.activate(first.id)


def test_an_operator_removes_what_does_not_serve(installation: Installation) -> None:
    with installation.server(enabled=False) as server:
        first = promoted(server)
        with pytest.raises(Conflict, match="its files are in use"):
            server.supervisor.remove_adapter(first.id)
        assert first.folder.is_dir()
        server.supervisor.activate(BARE_DRAFT)
        assert server.supervisor.remove_adapter(first.id).state is AdapterState.REMOVED
        assert not first.folder.exists()
        with pytest.raises(Conflict, match="already deleted"):
            server.supervisor.remove_adapter(first.id)
        with pytest.raises(NotFound):
            server.supervisor.remove_adapter(99)
        assert server.runs.latest(1)[0].verdict is not None, "what was found out about it stays"
