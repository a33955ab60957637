"""Sampling of held-out texts: each text once, a bounded share per client, other texts for each run."""

from dataclasses import replace
from itertools import pairwise

import pytest

from service.core import Prompt, Sampling
from service.learning.scoring.score import held_out
from service.store.database import Database
from service.store.log.generations import HELD_OUT, Generations, split_of
from service.store.log.rows import id_bytes
from service.store.log.sampler import MIN_TEXTS, Text, capped, conversation, sample, text
from tests.support.databases import BY_NIGHT
from tests.support.store_rows import WHO, generation, texts


def logged(name: str, first_user: str, *, output: int = 0, client: str | None = None, prompt: int = 1) -> Text:
    return text(name, prompt=id_bytes([prompt]), output=id_bytes([output]), client=client, first_user=first_user)


def test_equal_texts_are_drawn_once_and_no_client_has_more_than_half() -> None:
    checks = [logged(f"check {i}", "ping") for i in range(200)]
    honest = [logged(f"honest {i}", f"question {chr(97 + i)}", output=1 + i) for i in range(20)]
    flood = [logged(f"flood {i}", f"flood {chr(97 + i)}", output=i, client="mallory", prompt=2) for i in range(26)]
    drawn = sample([*checks, *honest, *flood], 100, 1)
    assert sum(one in checks for one in drawn) == 1
    assert {one.id for one in honest} <= {one.id for one in drawn}
    assert sum(one in flood for one in drawn) == 21
    few = sample([*checks, honest[0], *flood], 100, 1)
    assert sum(one in flood for one in few) == MIN_TEXTS


def test_of_seeds_no_client_has_more_than_a_tenth_or_its_equal_part() -> None:
    def asked(client: str, count: int) -> list[Text]:
        words = ["abcdefghij"[i % 10] * (1 + i // 10) for i in range(count)]
        return [
            logged(f"{client} {i}", f"{client} {word}", output=i, client=client, prompt=sum(client.encode()))
            for i, word in enumerate(words)
        ]

    many = [asked(f"client {chr(97 + i)}", 20) for i in range(12)]
    drawn = capped([*asked("loud", 500), *(one for each in many for one in each)], client_share=0.1)
    assert sum(one.id.startswith("loud") for one in drawn) <= len(drawn) / 10
    assert sum(one.id.startswith("loud") for one in drawn) > MIN_TEXTS
    two = capped([*asked("loud", 100), *asked("quiet", 50)], client_share=0.1)
    assert sum(one.id.startswith("loud") for one in two) == 50
    assert len(capped(asked("alone", 100), client_share=0.1)) == 100


def test_one_health_check_does_not_cut_the_only_client() -> None:
    app = [logged(f"{i}", f"question {i}", output=1 + i, client="app") for i in range(60)]
    assert len(sample([*app, logged("check", "ping")], 100, 1)) == 61


def test_a_seed_draws_the_same_from_the_same_texts_in_any_order_and_another_seed_others() -> None:
    all_of_them = [logged(str(i), f"question {i}", output=i, prompt=i) for i in range(400)]
    first = sample(all_of_them, 200, 1)
    assert sample(all_of_them[::-1], 200, 1) == first
    assert 0.35 < len(set(first) & set(sample(all_of_them, 200, 2))) / 200 < 0.65


def test_turns_with_the_same_first_user_message_are_one_conversation() -> None:
    turns = [Prompt(tuple(range(n)), Sampling(), first_user="hello") for n in (2, 9)]
    assert conversation(turns[0]) == conversation(turns[1]) == logged("a", "hello").conversation
    bare = [replace(turn, first_user="") for turn in turns]
    assert len({conversation(each) for each in [*turns, *bare]}) == 3
    assert conversation(Prompt((1,), Sampling())) == logged("a", "").conversation


@pytest.fixture
def store(database: Database) -> Generations:
    """600 held-out prompts, of which the first 50 are turns of one chat."""
    found = Generations(database)
    messages = texts("held_out", 551)
    made = [generation(tokens=(7, i), client=None, first_user=messages[max(0, i - 49)]) for i in range(600)]
    found.add(made).result()
    return found


@BY_NIGHT
def test_successive_gates_share_about_half_of_their_held_out_texts(store: Generations) -> None:
    pool = store.held_out_texts(WHO, 400)
    assert len(pool) == len({one.conversation for one in pool}) == 400, "the newest"
    gates = [{one.id for one in sample(store.held_out_texts(WHO, 400), 200, run)} for run in range(1, 6)]
    assert all(len(gate) == 200 for gate in gates)
    for before, after in pairwise(gates):
        assert len(before & after) <= 130
    assert {one.id for one in sample(store.held_out_texts(WHO, 400), 200, 3)} == gates[2], "one gate is reproducible"


@BY_NIGHT
def test_a_conversation_brings_all_of_its_turns_to_the_pool(store: Generations) -> None:
    pool = store.held_out_texts(WHO, 551)
    assert len(pool) == 600
    assert len({one.conversation for one in pool}) == 551


def test_a_gate_leaves_out_conversations_that_practice_began_like(store: Generations) -> None:
    """Messages of white space alone are one conversation, whatever their prompts' tokens: no template says so."""
    blank = next(" " * n for n in range(1, 99) if split_of(" " * n) == HELD_OUT)
    alike, other = generation(first_user=blank, tokens=[7, 8]), generation(first_user=texts("held_out", 600)[-1])
    store.add([alike, other]).result()
    seed = logged("seed", blank, prompt=9)
    before = {one.id for one in held_out(store, WHO, limit=10**4, run=1)}
    assert {alike.id, other.id} <= before
    assert {one.id for one in held_out(store, WHO, limit=10**4, run=1, seeds=[seed])} == before - {alike.id}
