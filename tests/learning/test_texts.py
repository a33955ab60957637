"""Which texts are replayed with new ones."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from service.core import Generation
from service.learning.general_set import GENERAL
from service.learning.texts import replay, replay_count
from tests.support.logged_texts import generation


@pytest.mark.parametrize("share", [0.0, 0.2, 0.25, 0.5, 0.9])
def test_the_share_is_of_all_examples(share: float) -> None:
    count = replay_count(300, share)
    assert count / (300 + count) == pytest.approx(share, abs=2e-3)


def test_a_share_of_one_replays_as_much_as_there_is_new() -> None:
    assert replay_count(300, 1.0) == 300


def stored(domain: str | None, count: int) -> list[Generation]:
    return [generation([1], [2], id=f"{domain}-{i}", domain=domain) for i in range(count)]


def general_texts(count: int) -> list[Generation]:
    made = [generation([1], [2], id=f"{GENERAL}-{i}") for i in range(count)]
    return [replace(one, prompt=replace(one.prompt, kind=GENERAL)) for one in made]


def drawn(
    fresh: list[Generation], reservoir: list[Generation], general: int, share: float = 0.5
) -> dict[str | None, int]:
    def sample(count: int) -> list[Generation]:
        # The store returns them in the order of the log, not of the sample.
        chosen = {g.id for g in random.Random(0).sample(reservoir, min(count, len(reservoir)))}
        return [g for g in reservoir if g.id in chosen]

    found = replay(fresh, share=share, general=general_texts(general), reservoir=sample, seed=1)
    assert len({g.id for g in found}) == len(found)
    domains = [g.prompt.domain for g in found]
    assert all((g.prompt.kind == GENERAL) == (g.prompt.domain is None) for g in found)
    return {domain: domains.count(domain) for domain in set(domains)}


def test_replay_fills_up_in_equal_parts() -> None:
    fresh = stored("sql", 60)
    past = [*stored("maths", 200), *stored("chat", 200), *stored("sql", 300)]
    parts = drawn(fresh, past, general=500)
    assert sum(parts.values()) == 60
    assert parts == {None: 20, "chat": 20, "maths": 20}


def test_a_service_that_saw_one_topic_replays_the_general_set() -> None:
    assert drawn(stored("sql", 60), stored("sql", 300), general=500) == {None: 60}


def test_a_client_may_call_its_domain_like_a_kind() -> None:
    past = [*stored(GENERAL, 200), *stored("cluster:00000000000000aa", 200), *stored("untagged", 200)]
    kinds = [generation([1], [2], id=f"kind-{i}") for i in range(200)]
    past += [replace(one, prompt=replace(one.prompt, kind="cluster:00000000000000aa")) for one in kinds]
    found = replay(stored("sql", 100), share=0.5, general=general_texts(500), reservoir=lambda count: past, seed=1)
    parts = Counter((g.prompt.domain, g.prompt.kind) for g in found)
    assert set(parts.values()) == {20} and len(parts) == 5


def test_one_part_makes_up_for_the_other() -> None:
    assert drawn(stored("sql", 60), stored("maths", 300), general=4) == {None: 4, "maths": 56}
    assert drawn(stored("sql", 60), stored("maths", 5), general=500) == {None: 55, "maths": 5}
    assert drawn(stored("sql", 60), [], general=7) == {None: 7}
    assert drawn(stored("sql", 60), [], general=0) == {}


def test_without_a_general_set_the_log_alone_is_replayed() -> None:
    fresh = stored("sql", 20)
    assert drawn(fresh, stored("sql", 70)[20:], general=0) == {"sql": 20}
    # New texts of this run are not also replayed.
    assert drawn(fresh, fresh, general=0) == {}


def test_without_replay_nothing_is_sampled() -> None:
    def reservoir(count: int) -> list[Generation]:
        raise AssertionError(count)

    assert replay(stored("sql", 9), share=0.0, general=general_texts(3), reservoir=reservoir, seed=0) == []
