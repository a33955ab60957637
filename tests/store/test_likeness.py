"""When texts count as the same text, template or kind, and how reservoirs use that."""

import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.store.log.likeness import KINDS, SHARE, content_key, groups_of, kind, simhash, template
from service.store.log.rows import id_bytes
from service.store.replay.reservoir import Item, Reservoir

tokens = st.lists(st.integers(0, 50_000), max_size=60)


@given(tokens, tokens)
def test_a_text_is_its_prompt_and_its_output(prompt: list[int], output: list[int]) -> None:
    key = content_key(id_bytes(prompt), id_bytes(output))
    assert key == content_key(id_bytes(tuple(prompt)), id_bytes(tuple(output)))
    if output:
        assert content_key(id_bytes([*prompt, output[0]]), id_bytes(output[1:])) != key, "where one ends matters"


@given(st.lists(st.text("abcxyz", min_size=1), min_size=1), st.randoms())
def test_a_template_sees_words_alone(words: list[str], rng: random.Random) -> None:
    shuffled = words * 2
    rng.shuffle(shuffled)
    assert template(" ".join(words), (1,)) == template(", ".join(shuffled).upper(), (2,))


def test_templates() -> None:
    def same(a: str, b: str) -> bool:
        return template(a, ()) == template(b, ())

    assert same("Repeat banana forever. 17", "Repeat banana forever. Repeat banana FOREVER! 290")
    assert not same("Which species is male?", "Which species is female?")
    assert template("", (5, 6, 5)) == template("", (6, 5)) != template("", (6, 7))
    assert not same("???", "!!!")


@given(tokens)
def test_a_kind_is_its_own_nearest(prompt: list[int]) -> None:
    name = kind(prompt, [])
    assert kind(prompt, [name]) == name
    assert kind(prompt, ["sql", name, "cluster:not one of ours"]) == name
    assert 0 <= simhash(prompt) < 2**64


def test_prompts_with_a_common_prefix_share_a_kind_and_kinds_are_few() -> None:
    rng = random.Random(0)
    leads = [[rng.randrange(50_000) for _ in range(46)] for _ in range(60)]
    known: list[str] = []
    names: dict[int, set[str]] = {}
    for i in range(600):
        which = i % 6 if i < 300 else i % 60
        name = kind([*leads[which], *(rng.randrange(50_000) for _ in range(30))], known)
        known = list(dict.fromkeys([*known, name]))
        names.setdefault(which, set()).add(name)
    assert len(known) == KINDS
    assert all(len(names[which]) == 1 for which in range(6)), "six instructions, a kind each"
    assert len(set.union(*(names[which] for which in range(6)))) == 6


def items(rng: random.Random, count: int, clients: int, templates: int, first: int = 0) -> list[Item]:
    return [
        Item(
            first + i,
            str(first + i).encode(),
            groups_of(f"c{rng.randrange(clients)}", b"%d" % rng.randrange(templates)),
        )
        for i in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 30), st.integers(0, 120), st.integers(0, 120), st.randoms())
def test_the_largest_client_holds_a_bounded_share_once_others_come(
    capacity: int, flood: int, honest: int, rng: random.Random
) -> None:
    reservoir = Reservoir(capacity, {}, 0, random.Random(0))
    mine = [Item(i, b"m%d" % i, groups_of("flood", b"%d" % i)) for i in range(flood)]
    theirs = [Item(1000 + i, b"h%d" % i, groups_of(f"c{i}", b"h%d" % i)) for i in range(honest)]
    offered = [*mine, *theirs]
    rng.shuffle(offered)
    for item in offered:
        reservoir.offer(item)
    assert reservoir.seen == len(offered)
    assert len(reservoir.held) == min(capacity, len(offered))
    counts = Counter(group for item in reservoir.held.values() for group in item.groups)
    flooded = counts[b"client:flood"]
    assert flooded <= max(SHARE * capacity, capacity - honest)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.lists(st.integers(0, 15), max_size=80), st.randoms())
def test_a_text_is_held_once(capacity: int, offered: list[int], rng: random.Random) -> None:
    reservoir = Reservoir(capacity, {}, 0, rng)
    for i, number in enumerate(offered):
        slot = reservoir.offer(Item(i, b"%d" % number, groups_of(None, b"%d" % number)))
        assert slot is None or reservoir.held[slot].seq == i
    held = [item.key for item in reservoir.held.values()]
    assert len(held) == len(set(held)) <= capacity
    assert set(reservoir.held) <= set(range(capacity))


def test_within_shares_every_offer_is_as_likely_held() -> None:
    held = np.zeros(40)
    for seed in range(1500):
        reservoir = Reservoir(10, {}, 0, random.Random(seed))
        for item in items(random.Random(seed), 40, 1000, 1000):
            reservoir.offer(item)
        held[[item.seq for item in reservoir.held.values()]] += 1
    expected = 1500 * 10 / 40
    assert abs(held - expected).max() < 5 * np.sqrt(expected * 0.75)
