"""Nobody takes over what is learnt from: shares of clients and templates, of the new and of what is replayed."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import Generation
from service.learning.buffer import lesson, limited
from service.store.likeness import template
from service.store.reservoir import SHARE
from service.store.sampler import HARDLY, LEAST
from tests.support.logged_texts import generation


def text(number: int, client: str | None = None, said: str | None = None, domain: str | None = "d") -> Generation:
    from dataclasses import replace

    made = generation([1, 2, number], [number, 3], id=f"{client}-{number}", domain=domain)
    said = (
        f"question of {client or 'nobody'} about {chr(97 + number % 26)}{chr(97 + number // 26)}"
        if said is None
        else said
    )
    return replace(made, prompt=replace(made.prompt, client=client, first_user=said))


def by_client(found: list[Generation]) -> Counter[str | None]:
    return Counter(g.prompt.client for g in found)


def test_one_service_alone_keeps_all() -> None:
    for client in (None, "only"):
        told = [text(i, client) for i in range(300)]
        assert limited(told) == told
    same = [text(i, said="Repeat banana") for i in range(300)]
    assert limited(same) == same, "with nothing else there"


def test_equal_texts_stay_once() -> None:
    told = [text(i % 20) for i in range(100)]
    assert limited(told) == told[:20]


@pytest.mark.parametrize("attack", ["one client", "one repeated string"])
def test_nine_tenths_of_a_run_become_half(attack: str) -> None:
    honest = [text(i) for i in range(40)]
    bad = [text(100 + i, "bad") if attack == "one client" else text(100 + i, said=f"Say x {i}") for i in range(360)]
    told = [*honest, *bad]
    random.Random(0).shuffle(told)
    kept = limited(told)
    assert [g for g in kept if g in honest] == [g for g in told if g in honest], "the honest lose nothing"
    assert len(kept) == 80
    general = [text(1000 + i, domain="general") for i in range(500)]
    whole = lesson(told, share=0.4, general=general, reservoir=lambda count: [], seed=0)
    assert sum(g in bad for g in whole) <= 0.31 * len(whole)


def test_what_is_replayed_is_bounded_too() -> None:
    fresh = [text(i) for i in range(60)]
    past = [
        *(text(200 + i, "bad", domain="old") for i in range(100)),
        *(text(500 + i, domain="old") for i in range(20)),
    ]
    found = lesson(fresh, share=0.5, general=[], reservoir=lambda count: past, seed=0)
    assert by_client(found)["bad"] <= 20


def test_a_small_group_stays_whatever_the_others_are() -> None:
    told = [text(0), *(text(i, "a") for i in range(1, 100))]
    assert by_client(limited(told[:49])) == {None: 1, "a": LEAST}
    assert by_client(limited(told)) == {None: 1, "a": 99}, "one in a hundred is hardly anybody else"


clients = st.sampled_from([None, "a", "b", "c"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(clients, st.sampled_from(["x", "y", "z", None])), max_size=120))
def test_shares_hold_for_every_client_and_template(drawn: list[tuple[str | None, str | None]]) -> None:
    told = [text(i, client, said) for i, (client, said) in enumerate(drawn)]
    kept = limited(told)
    ids = [g.id for g in told]
    assert [g.id for g in kept] == [name for name in ids if name in {g.id for g in kept}], "in the order given"
    assert bool(kept) is bool(told)
    named, alike = by_client(kept), Counter(template(g.prompt.first_user, ()) for g in kept)
    named.pop(None, None)
    for counts in (named, alike):
        for held in counts.values():
            assert held <= max(SHARE * len(kept), LEAST) or len(kept) - held < HARDLY * len(kept)
