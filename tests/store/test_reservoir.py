from __future__ import annotations

from collections import Counter

import pytest
from scipy import stats
from sqlalchemy import text

from service.core import Selection
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.registry.lineage import Lineage
from service.store.replay.buffer import Replay
from tests.support.databases import BY_NIGHT
from tests.support.store_rows import HELD_OUT_TEXT, WHO, generation


def stored(database: Database, count: int, **attributes: str) -> list[str]:
    made = [generation(**attributes) for _ in range(count)]  # pyright: ignore[reportArgumentType]
    Generations(database).add(made).result()
    return [g.id for g in made]


def held(database: Database, domain: str) -> list[str]:
    query = (
        "SELECT g.id FROM replay_buffer r JOIN generations g ON g.seq = r.seq WHERE r.domain = :domain ORDER BY r.slot"
    )
    with database.read() as connection:
        return list(connection.execute(text(query), {"domain": domain}).scalars())


def test_offers_in_one_go_or_one_by_one_fill_alike(database: Database) -> None:
    replay, ids = Replay(database), stored(database, 5)
    replay.offer("at once", ids, 8, seed=1)
    for name in ids:
        replay.offer("one by one", [name], 8, seed=1)
    assert held(database, "at once") == held(database, "one by one") == ids
    assert replay.sizes() == {("at once", ""): 5, ("one by one", ""): 5}


@BY_NIGHT
def test_the_same_seed_holds_the_same(database: Database) -> None:
    replay, ids = Replay(database), stored(database, 60)
    replay.offer("a", ids, 8, seed=5)
    first = held(database, "a")
    database.write(lambda connection: connection.execute(text("DELETE FROM replay_buffer"))).result()
    database.write(lambda connection: connection.execute(text("DELETE FROM replay_domains"))).result()
    replay.offer("a", ids, 8, seed=5)
    assert held(database, "a") == first
    assert [g.id for g in replay.sample(WHO, 4, 7)] == [g.id for g in replay.sample(WHO, 4, 7)]
    assert len({tuple(g.id for g in replay.sample(WHO, 4, seed)) for seed in range(20)}) > 1


def test_held_out_unknown_and_known_texts_are_skipped(database: Database) -> None:
    replay = Replay(database)
    ids, secret = stored(database, 3), stored(database, 50, first_user=HELD_OUT_TEXT)
    for _ in range(3):
        replay.offer("code", [*secret, *ids, "nobody", ids[0]], 100, seed=0)
    assert held(database, "code") == ids
    assert sorted(g.id for g in replay.sample(WHO, 1000, 0)) == sorted(ids)


@BY_NIGHT
def test_samples_are_uniform_within_a_domain(database: Database) -> None:
    replay, ids = Replay(database), stored(database, 10)
    replay.offer("code", ids, 10, seed=0)
    counts = Counter(g.id for seed in range(300) for g in replay.sample(WHO, 1, seed))
    assert stats.chisquare([counts[name] for name in ids]).pvalue > 1e-6


@BY_NIGHT
@pytest.mark.parametrize("way", ["purge", "erase"])
def test_an_emptied_reservoir_fills_again(database: Database, way: str) -> None:
    store, replay = Generations(database), Replay(database)
    replay.offer("code", stored(database, 300), 16, seed=0)
    if way == "purge":
        assert store.purge(keep=0).result() == 300
    else:
        assert Lineage(database).erase(Selection(domain="code")).generations == 300
    assert replay.sizes() == {}
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM replay_domains")).scalar() == 0
    ids = stored(database, 16)
    replay.offer("code", ids, 16, seed=0)
    assert held(database, "code") == ids


@BY_NIGHT
def test_slots_that_a_deletion_emptied_are_filled_first(database: Database) -> None:
    replay = Replay(database)
    replay.offer("code", [*stored(database, 200, client="leaves"), *stored(database, 200, client="stays")], 32, seed=0)
    before = held(database, "code")
    Lineage(database).erase(Selection(client="leaves"))
    left = held(database, "code")
    assert 0 < len(left) < len(before)
    fresh = stored(database, 32 - len(left))
    replay.offer("code", fresh, 32, seed=0)
    assert sorted(held(database, "code")) == sorted([*left, *fresh])
