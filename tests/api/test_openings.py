"""Which message tells conversations apart, and that a constant opening does not decide the split."""

import httpx
import pytest

from service.api.openings import COMMON, MAX_OPENINGS, Openings
from service.store.log.generations import HELD_OUT, split_of
from tests.support.echo_engine import EchoServer

OPENING = "You classify letters. Answer with one word."
EXAMPLE = "Letter: my parcel is late."


def test_the_first_message_distinguishes_conversations_that_begin_differently() -> None:
    openings = Openings()
    for i in range(100):
        chat = [f"question {i}", "go on", "and then?"]
        for turns in (1, 2, 3):
            assert openings.distinguishing(chat[:turns]) == f"question {i}"
    assert openings.distinguishing([]) == ""


@pytest.mark.parametrize("constant", [[OPENING], [OPENING, EXAMPLE], [OPENING, EXAMPLE, EXAMPLE]])
def test_a_constant_opening_does_not_decide_the_split(constant: list[str]) -> None:
    openings = Openings()
    found = [openings.distinguishing([*constant, f"letter {i}"]) for i in range(500)]
    own = [one == f"letter {i}" for i, one in enumerate(found)]
    assert own == [False] * (COMMON - 1) + [True] * (501 - COMMON)
    held_out = sum(split_of(one) == HELD_OUT for one in found[100:])
    assert 0.14 < held_out / 400 < 0.26


def test_a_chat_after_a_common_opening_stays_on_its_side() -> None:
    openings = Openings()
    chats = [[OPENING, f"letter {i}", f"shorter, {i}", "thanks"] for i in range(60)]
    second = [openings.distinguishing(chat[:2]) for chat in chats]
    for turns in (3, 4):
        later = [openings.distinguishing(chat[:turns]) for chat in chats]
        assert later[COMMON:] == second[COMMON:] == [f"letter {i}" for i in range(COMMON, 60)]


def test_asking_again_does_not_make_an_opening_common() -> None:
    openings = Openings()
    for _ in range(10 * COMMON):
        assert openings.distinguishing([OPENING, "the same letter"]) == OPENING


def test_a_bounded_number_of_openings_is_remembered() -> None:
    openings = Openings()
    for i in range(MAX_OPENINGS + 100):
        openings.distinguishing([f"question {i}", "go on"])
    assert len(openings._next) == MAX_OPENINGS


def test_prompts_carry_the_message_that_distinguishes_them(server: EchoServer, http: httpx.Client) -> None:
    for i in range(COMMON + 5):
        messages = [{"role": "user", "content": OPENING}, {"role": "assistant", "content": "Yes."}]
        messages.append({"role": "user", "content": f"letter {i}"})
        assert http.post("/generate", json={"messages": messages}).status_code == 200
    first = [ticket.prompt.first_user for ticket in server.engine.tickets]
    assert first[0] == OPENING and first[-5:] == [f"letter {i}" for i in range(COMMON, COMMON + 5)]
