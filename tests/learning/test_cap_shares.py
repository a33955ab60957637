"""Limits on the share of one client or template among new and replayed training texts."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import Generation
from service.learning.texts import cap_shares, training_texts
from service.store.log.likeness import SHARE, template
from service.store.log.sampler import FEW_OTHERS, MIN_TEXTS
from tests.support.logged_texts import generation


def text(number: int, client: str | None = None, message: str | None = None, domain: str | None = "d") -> Generation:
    from dataclasses import replace

    made = generation([1, 2, number], [number, 3], id=f"{client}-{number}", domain=domain)
    message = (
        f"question of {client or 'nobody'} about {chr(97 + number % 26)}{chr(97 + number // 26)}"
        if message is None
        else message
    )
    return replace(made, prompt=replace(made.prompt, client=client, first_user=message))


def by_client(found: list[Generation]) -> Counter[str | None]:
    return Counter(g.prompt.client for g in found)


def test_a_single_client_is_not_limited() -> None:
    for client in (None, "only"):
        texts = [text(i, client) for i in range(300)]
        assert cap_shares(texts) == texts
    same = [text(i, message="Repeat banana") for i in range(300)]
    assert cap_shares(same) == same, "with nothing else there"


def test_equal_texts_are_used_once() -> None:
    texts = [text(i % 20) for i in range(100)]
    assert cap_shares(texts) == texts[:20]


@pytest.mark.parametrize("attack", ["one client", "one repeated string"])
def test_nine_tenths_of_a_run_are_limited_to_half(attack: str) -> None:
    honest = [text(i) for i in range(40)]
    bad = [text(100 + i, "bad") if attack == "one client" else text(100 + i, message=f"Say x {i}") for i in range(360)]
    texts = [*honest, *bad]
    random.Random(0).shuffle(texts)
    selected = cap_shares(texts)
    assert [g for g in selected if g in honest] == [g for g in texts if g in honest], "the honest lose nothing"
    assert len(selected) == 80
    general = [text(1000 + i, domain="general") for i in range(500)]
    whole = training_texts(texts, share=0.4, general=general, reservoir=lambda count: [], seed=0)
    assert sum(g in bad for g in whole) <= 0.31 * len(whole)


def test_replay_is_limited_too() -> None:
    fresh = [text(i) for i in range(60)]
    past = [
        *(text(200 + i, "bad", domain="old") for i in range(100)),
        *(text(500 + i, domain="old") for i in range(20)),
    ]
    found = training_texts(fresh, share=0.5, general=[], reservoir=lambda count: past, seed=0)
    assert by_client(found)["bad"] <= 20


def test_a_small_group_is_never_limited() -> None:
    texts = [text(0), *(text(i, "a") for i in range(1, 100))]
    assert by_client(cap_shares(texts[:49])) == {None: 1, "a": MIN_TEXTS}
    assert by_client(cap_shares(texts)) == {None: 1, "a": 99}, "one in a hundred counts as none"


clients = st.sampled_from([None, "a", "b", "c"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(clients, st.sampled_from(["x", "y", "z", None])), max_size=120))
def test_shares_hold_for_every_client_and_template(drawn: list[tuple[str | None, str | None]]) -> None:
    texts = [text(i, client, message) for i, (client, message) in enumerate(drawn)]
    selected = cap_shares(texts)
    ids = [g.id for g in texts]
    assert [g.id for g in selected] == [name for name in ids if name in {g.id for g in selected}], "in the order given"
    assert bool(selected) is bool(texts)
    named, alike = by_client(selected), Counter(template(g.prompt.first_user, ()) for g in selected)
    named.pop(None, None)
    for counts in (named, alike):
        for held in counts.values():
            assert held <= max(SHARE * len(selected), MIN_TEXTS) or len(selected) - held < FEW_OTHERS * len(selected)
