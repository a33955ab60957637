"""Replies that later requests refer to: responses by id, their items, threads of messages. Of each key alone, within a
bound."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from service.api.replies import OVERHEAD_BYTES, Replies
from service.core import LOCAL, Access, Caller, Selection
from tests.support.echo_engine import EchoEngine, EchoServer, OpenHouse
from tests.support.waiting import until

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
FLAT_TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}
TOOL = {"name": "now", "input_schema": {"type": "object"}}


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer, whole or of a stream's last event."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data")]
    return events[-1]["response"] if path == RESPONSES else events[0]["message"]


def say(http: httpx.Client, said: str, **more: Any) -> dict[str, Any]:
    return post(http, MESSAGES, max_tokens=500, messages=[{"role": "user", "content": said}], **more)


def error(response: httpx.Response, status: int = 404) -> dict[str, Any]:
    assert response.status_code == status, response.text
    return response.json()["error"]


def turns(server: EchoServer) -> list[Any]:
    """What the model was last asked: (role, content) of each turn, and a turn's calls."""
    return [
        (turn["role"], turn["content"], *([turn["tool_calls"]] if "tool_calls" in turn else []))
        for turn in server.encoder.chats[-1][0]
    ]


# ----------------------------------------------------------------------------------------------------------- responses


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_continued_by_its_id(server: EchoServer, http: httpx.Client, stream: bool) -> None:
    first = post(http, RESPONSES, input="a", instructions="i", stream=stream)
    second = post(http, RESPONSES, input="b", previous_response_id=first["id"], stream=stream)
    # The instructions of an earlier response are not carried over.
    assert turns(server) == [("user", "a"), ("assistant", "ia"), ("user", "b")]
    third = post(http, RESPONSES, input=[{"role": "user", "content": "c"}], previous_response_id=second["id"])
    assert turns(server) == [
        *[("user", "a"), ("assistant", "ia"), ("user", "b"), ("assistant", "aiab"), ("user", "c")],
    ]
    assert (first["previous_response_id"], third["previous_response_id"]) == (None, second["id"])
    # Another answer to the same.
    post(http, RESPONSES, input="d", previous_response_id=first["id"])
    assert turns(server)[-1] == ("user", "d") and len(turns(server)) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_items_are_taken_by_their_ids_as_if_they_were_sent(
    server: EchoServer, http: httpx.Client, stream: bool
) -> None:
    said = {"role": "user", "content": f"<think>why</think>so{CALL}{CALL}"}
    answer = post(http, RESPONSES, input=[said], tools=[FLAT_TOOL], stream=stream)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "r"} for item in answer["output"][2:]
    ]
    post(http, RESPONSES, input=[said, *answer["output"], *results])
    sent = server.encoder.chats[-1][0]
    for form in ({"type": "item_reference"}, {"type": None}, {}):
        references = [{"id": item["id"], **form} for item in answer["output"]]
        post(http, RESPONSES, input=[said, *references, *results])
        assert server.encoder.chats[-1][0] == sent
    post(http, RESPONSES, input=results, previous_response_id=answer["id"])
    assert server.encoder.chats[-1][0] == sent


def test_what_is_not_kept_is_said_with_what_to_do(http: httpx.Client) -> None:
    unknown = error(http.post(RESPONSES, json={"input": "a", "previous_response_id": "resp_x"}))
    assert (unknown["code"], unknown["param"]) == ("previous_response_not_found", "previous_response_id")
    missing = error(http.post(RESPONSES, json={"input": [{"type": "item_reference", "id": "msg_x"}]}))
    assert (missing["code"], missing["param"]) == ("item_not_found", "input")
    for refusal in (unknown, missing):
        assert "store.replies_mb" in refusal["message"] and "send the whole conversation" in refusal["message"]
    assert "store: false" in missing["message"]
    # A thread's message is no response.
    message = say(http, "a", thread={"type": "create"})
    error(http.post(RESPONSES, json={"input": "a", "previous_response_id": message["id"]}))
    error(http.get(f"{RESPONSES}/{message['id']}"))
    error(http.delete(f"{RESPONSES}/{message['id']}"))


def test_store_is_told_as_it_is(http: httpx.Client) -> None:
    kept, dropped = post(http, RESPONSES, input="a"), post(http, RESPONSES, input="a", store=False)
    assert (kept["store"], dropped["store"]) == (True, False)
    error(http.post(RESPONSES, json={"input": "b", "previous_response_id": dropped["id"]}))
    reference = {"type": "item_reference", "id": dropped["output"][0]["id"]}
    error(http.post(RESPONSES, json={"input": [reference]}))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_server_that_keeps_nothing_says_so(recorded: bool) -> None:
    with EchoServer(replies=Replies(0, recorded=recorded)).served() as address, httpx.Client(base_url=address) as http:
        first = post(http, RESPONSES, input="a", stream=True)
        assert first["store"] is recorded, "it is in the log"
        refused = error(http.post(RESPONSES, json={"input": "b", "previous_response_id": first["id"]}))
        assert "store.replies_mb is 0 or store.record is false" in refused["message"]
        error(http.get(f"{RESPONSES}/{first['id']}"))


def test_a_response_is_shown_and_dropped(http: httpx.Client) -> None:
    answer = post(http, RESPONSES, input="a", metadata={"x": "y"}, tools=[FLAT_TOOL])
    assert http.get(f"{RESPONSES}/{answer['id']}?include=usage").json() == answer
    assert http.delete(f"{RESPONSES}/{answer['id']}").json() == {
        "id": answer["id"],
        "object": "response",
        "deleted": True,
    }
    error(http.get(f"{RESPONSES}/{answer['id']}"))
    error(http.delete(f"{RESPONSES}/{answer['id']}"))
    error(http.post(RESPONSES, json={"input": "b", "previous_response_id": answer["id"]}))
    error(http.post(RESPONSES, json={"input": [{"type": "item_reference", "id": answer["output"][0]["id"]}]}))


def test_items_of_an_answer_that_broke_off_can_be_taken() -> None:
    """Their ids were sent: a chat's user stops an answer and goes on."""
    server = EchoServer(engine=EchoEngine(pause=0.01))
    with server.served() as address, httpx.Client(base_url=address) as http:
        with http.stream("POST", RESPONSES, json={"input": "x" * 900, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if "output_text.delta" in line and "data" in line)
            id = json.loads(next(lines).removeprefix("data: "))["item_id"]
        until(lambda: server.replies.size > 0)
        server.engine.pause = 0
        post(http, RESPONSES, input=[{"type": "item_reference", "id": id}, {"role": "user", "content": "b"}])
        (_, said), last = turns(server)
    assert set(said) == {"x"} and len(said) < 900 and last == ("user", "b")


def test_an_input_of_nothing_that_is_served_is_refused(http: httpx.Client) -> None:
    refused = error(http.post(RESPONSES, json={"input": [{"type": "web_search_call", "id": "ws_1"}]}), 400)
    assert (refused["message"], refused["param"]) == ("input contains no supported item", "input")


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_goes_on_with_what_is_new(server: EchoServer, http: httpx.Client, stream: bool) -> None:
    first = say(http, f"<think>t</think>a{CALL}", system="s", tools=[TOOL], thread={"type": "create"}, stream=stream)
    assert turns(server) == [("system", "s"), ("user", f"<think>t</think>a{CALL}")]
    on = {"type": "continue", "previous_message_id": first["id"]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "12"}]}
    second = post(http, MESSAGES, max_tokens=500, messages=[result], thread=on, stream=stream)
    before, tools, _ = server.encoder.chats[-1]
    assert [turn["role"] for turn in before] == ["system", "user", "assistant", "tool"]
    assert (before[2]["content"], before[2]["reasoning_content"]) == ("sa", "t")
    calls: Any = before[2]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "now", "arguments": {"a": 1}}]
    assert tools == [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    response = http.post(
        MESSAGES,
        json={
            "max_tokens": 500,
            "messages": [{"role": "user", "content": "b"}],
            "thread": {"type": "continue", "previous_message_id": second["id"]},
        },
    )
    assert "x-redraft-ignored" not in response.headers
    assert [turn["role"] for turn in server.encoder.chats[-1][0]][4:] == ["assistant", "user"]


def test_a_thread_that_is_not_kept_is_answered_and_sent_again_in_full(http: httpx.Client) -> None:
    """By the code that Anthropic's SDKs act on."""
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "store": False}
    response = http.post(MESSAGES, json={**body, "thread": {"type": "create"}})
    assert (response.status_code, response.headers["x-redraft-ignored"]) == (200, "thread")
    on = {"type": "continue", "previous_message_id": response.json()["id"]}
    refused = error(http.post(MESSAGES, json={**body, "thread": on}))
    assert (refused["details"], refused["type"]) == ({"error_code": "thread_not_found"}, "not_found_error")
    # Without a thread nothing is kept.
    on = {"type": "continue", "previous_message_id": say(http, "a")["id"]}
    error(http.post(MESSAGES, json={**body, "thread": on}))
    on = {"type": "continue", "previous_message_id": post(http, RESPONSES, input="a")["id"]}
    error(http.post(MESSAGES, json={**body, "thread": on}))


# ---------------------------------------------------------------------------------------------------------------- keys


class Keys(OpenHouse):
    """Two clients and an operator."""

    def by_key(self, secret: str) -> Caller | None:
        roles = {"ada": Access.CLIENT, "bob": Access.CLIENT, "root": Access.OPERATOR}
        return Caller(roles[secret], secret) if secret in roles else None


@pytest.fixture(scope="module")
def keyed() -> Iterator[str]:
    with EchoServer(keeper=Keys()).served() as address:
        yield address


@pytest.mark.parametrize("who", ["bob", "root", None])
def test_no_key_reaches_another_one_s_replies(keyed: str, who: str | None) -> None:
    with httpx.Client(base_url=keyed, headers={"x-api-key": "ada"}) as ada:
        response, message = post(ada, RESPONSES, input="secret"), say(ada, "secret", thread={"type": "create"})
        others = httpx.Client(base_url=keyed, headers={} if who is None else {"x-api-key": who})
        with others as other:
            reference = {"type": "item_reference", "id": response["output"][0]["id"]}
            on = {"type": "continue", "previous_message_id": message["id"]}
            refusals = [
                other.get(f"{RESPONSES}/{response['id']}"),
                other.delete(f"{RESPONSES}/{response['id']}"),
                other.post(RESPONSES, json={"input": "b", "previous_response_id": response["id"]}),
                other.post(RESPONSES, json={"input": [reference]}),
                other.post(
                    MESSAGES, json={"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "thread": on}
                ),
            ]
            unknown = other.get(f"{RESPONSES}/resp_{'0' * 32}").json()
        assert all("secret" not in refusal.text for refusal in refusals)
        assert [refusal.status_code for refusal in refusals] == [404] * 5
        assert refusals[0].json() == unknown, "nobody learns which ids there are"
        assert ada.get(f"{RESPONSES}/{response['id']}").json() == response


# ------------------------------------------------------------------------------------------------------------- erasing


def keep(replies: Replies, name: str, *parts: str, client: str | None = None, after: str | None = None) -> None:
    """A reply with these parts, of no key."""
    pending = replies.begin(LOCAL, client, None)
    before = ()
    if after is not None:
        reply = pending.take(after)
        assert reply is not None
        before = reply.parts
    pending.asked(name.removeprefix("resp_"))
    pending.keep(name, [*before, *(part.encode() for part in parts)], {f"item-{name}": len(before)}, b"{}")


def test_an_erasure_takes_a_reply_and_all_that_continue_it() -> None:
    for selection in (Selection(ids=frozenset({"resp_1"})), Selection(client="eve")):
        replies = Replies(2**20)
        keep(replies, "resp_1", "secret", client="eve")
        keep(replies, "resp_2", "more", after="resp_1", client="ada")
        keep(replies, "resp_3", "more still", after="resp_2", client="ada")
        keep(replies, "resp_4", "of another", client="ada")
        replies.forget(selection)
        assert [name for name in ("resp_1", "resp_2", "resp_3", "resp_4") if replies.find(name, LOCAL)] == ["resp_4"]
        assert replies.begin(LOCAL, None, None).take_item("item-resp_3") is None
        replies.forget(Selection(before=datetime(2020, 1, 1, tzinfo=UTC)))
        assert replies.find("resp_4", LOCAL)
        replies.forget(Selection(everything=True))
        assert replies.size == 0 and not replies._parts and not replies._items


def test_an_erasure_takes_what_continues_a_reply_that_was_dropped_before() -> None:
    replies = Replies(2**20)
    keep(replies, "resp_1", "secret", client="eve")
    keep(replies, "resp_2", "more", after="resp_1")
    assert replies.drop("resp_1", LOCAL) and replies.find("resp_2", LOCAL)
    replies.forget(Selection(client="eve"))
    assert replies.find("resp_2", LOCAL) is None


def test_what_is_erased_while_it_is_said_is_not_kept() -> None:
    server = EchoServer(engine=EchoEngine(pause=0.01))
    asked = {"input": "x" * 50, "user": "eve", "stream": True}
    with server.served() as address, httpx.stream("POST", address + RESPONSES, json=asked, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data"))
        for line in lines:
            if "output_text.delta" in line:
                server.replies.forget(Selection(client="eve"))
                break
        *_, last = lines
    answer = json.loads(last.removeprefix("data: "))["response"]
    assert (answer["status"], answer["store"]) == ("completed", False)
    assert server.replies.size == 0
    # Nor what continues a reply that is erased meanwhile.
    keep(server.replies, "resp_1", "secret", client="eve")
    pending = server.replies.begin(LOCAL, "ada", None)
    assert pending.take("resp_1")
    server.replies.forget(Selection(client="eve"))
    pending.keep("resp_2", [b"secret"], {})
    assert server.replies.size == 0


# --------------------------------------------------------------------------------------------------------------- bound


def test_replies_stay_within_the_bound_and_the_least_used_go_first() -> None:
    replies = Replies(20 * (1000 + 4 * OVERHEAD_BYTES))
    for number in range(60):
        keep(replies, f"resp_{number}", str(number) * 400)
        assert replies.size <= replies.max_bytes
        assert replies.find("resp_0", LOCAL), "it was used"
    assert replies.find("resp_1", LOCAL) is None and replies.find("resp_59", LOCAL)
    before = replies.size
    keep(replies, "resp_large", "x" * replies.max_bytes)
    assert replies.find("resp_large", LOCAL) is None and replies.size == before, "nothing makes room in vain"


def test_turns_that_replies_have_in_common_are_kept_once() -> None:
    replies = Replies(2**20)
    keep(replies, "resp_0", "x" * 10_000)
    for number in range(1, 30):
        keep(replies, f"resp_{number}", f"turn {number}", after=f"resp_{number - 1}")
    assert replies.size < 100_000
    for number in range(29):
        assert replies.drop(f"resp_{number}", LOCAL)
    whole = replies.find("resp_29", LOCAL)
    assert whole is not None and whole.parts[0] == b"x" * 10_000 and whole.parts[-1] == b"turn 29"
    assert replies.drop("resp_29", LOCAL) and replies.size == 0
