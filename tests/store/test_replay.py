from __future__ import annotations

import pytest
from scipy.stats import chi2

from service.core import Selection
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.registry.lineage import Lineage
from service.store.replay.buffer import Replay
from tests.support.databases import BY_NIGHT
from tests.support.store_rows import WHO, generation, texts


@BY_NIGHT
@pytest.mark.parametrize("trials", [100, pytest.param(400, marks=pytest.mark.nightly)])
def test_every_offer_is_held_with_the_same_probability(database: Database, trials: int) -> None:
    offers, capacity = 30, 6
    replay, names = Replay(database), [f"g{i}" for i in range(offers)]
    Generations(database).add([generation(id=name) for name in names]).result()
    held = dict.fromkeys(names, 0)
    for trial in range(trials):
        # One domain per trial; generations are offered in parts, as by runs.
        for start in range(0, offers, 7):
            replay.offer(f"d{trial}", names[start : start + 7], capacity, seed=5)
    assert set(replay.sizes().values()) == {capacity}
    # A sample lists a generation only once, so the rows are counted.
    with database.read() as connection:
        for (name,) in connection.exec_driver_sql("SELECT id FROM replay_buffer JOIN generations USING (seq)"):
            held[name] += 1
    expected = trials * capacity / offers
    # Drawing without replacement varies less than a multinomial: with the factor below the statistic is chi-square
    # with offers - 1 degrees of freedom.
    spread = (offers - 1) / offers / (1 - capacity / offers)
    statistic = sum((count - expected) ** 2 for count in held.values()) / expected * spread
    assert chi2.ppf(1e-5, offers - 1) < statistic < chi2.ppf(1 - 1e-5, offers - 1)


def test_held_out_texts_never_enter_a_reservoir(database: Database) -> None:
    store, replay = Generations(database), Replay(database)
    held_out = [generation(first_user=text) for text in texts("held_out", 20)]
    train = [generation(first_user=text) for text in texts("train", 20)]
    store.add([*held_out, *train]).result()
    replay.offer("code", [g.id for pair in zip(held_out, train, strict=True) for g in pair], 40, 0)
    assert replay.sizes() == {("code", ""): 20}
    assert {g.id for g in replay.sample(WHO, 100, 1)} == {g.id for g in train}
    replay.offer("code", [g.id for g in held_out] + ["unknown"], 40, 0)
    assert replay.sizes() == {("code", ""): 20}


def test_small_domains_are_sampled_like_large_ones(database: Database) -> None:
    store, replay = Generations(database), Replay(database)
    for domain, count in (("large", 40), ("small", 5), ("other", 40)):
        made = [generation(domain=domain) for _ in range(count)]
        store.add(made).result()
        replay.offer(domain, [g.id for g in made], 40, 0)
    chosen = [g.prompt.domain for g in replay.sample(WHO, 15, seed=3)]
    assert {domain: chosen.count(domain) for domain in set(chosen)} == {"large": 5, "small": 5, "other": 5}
    everything = replay.sample(WHO, 1000, seed=3)
    assert len({g.id for g in everything}) == len(everything) == 85
    assert replay.sample(WHO, 15, seed=3) == replay.sample(WHO, 15, seed=3)
    assert replay.sample(WHO, 0, seed=3) == []


@BY_NIGHT
@pytest.mark.parametrize("capacity", [1, 4])
def test_a_removed_generation_frees_its_slot(database: Database, capacity: int) -> None:
    store, replay = Generations(database), Replay(database)
    made = [generation() for _ in range(8)]
    store.add(made).result()
    replay.offer("code", [g.id for g in made], capacity, 0)
    assert replay.sizes() == {("code", ""): capacity}
    Lineage(database).erase(Selection(everything=True))
    assert replay.sizes() == {}
    assert replay.sample(WHO, 5, 0) == []
    later = [generation() for _ in range(400)]
    store.add(later).result()
    replay.offer("code", [g.id for g in later], capacity, 0)
    assert 1 <= replay.sizes()["code", ""] <= capacity
    assert {g.id for g in replay.sample(WHO, 5, 0)} <= {g.id for g in later}
