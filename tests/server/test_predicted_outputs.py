"""`prediction` over HTTP: the same answers, and what became of the predicted text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service.evaluation.server_process import LocalServer
from tests.support.tiny_server import in_process_server, write_pair

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the same again "}],
    "max_completion_tokens": 60,
    "temperature": 0,
    # The random model would write bytes that are no text.
    "structured_outputs": {"regex": "[a-z ]{40}"},
}
GENERATE: dict[str, Any] = {"prompt": "the same again ", "chat_template": False, "max_tokens": 40}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    made = in_process_server(
        tmp_path_factory.mktemp("server"), write_pair(tmp_path_factory.mktemp("pair")), engine={"adaptive": True}
    )
    made.start()
    yield made
    assert made.stop() == 0


def ask(server: LocalServer, **fields: Any) -> dict[str, Any]:
    answer = server.request("POST", "/v1/chat/completions", {**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def details(answer: dict[str, Any]) -> tuple[int, int]:
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(server: LocalServer) -> None:
    plain = ask(server)
    said = text_of(plain)
    assert "completion_tokens_details" not in plain["usage"]
    right = ask(server, prediction={"type": "content", "content": said})
    assert text_of(right) == said
    accepted, rejected = details(right)
    assert accepted >= 30 and rejected <= 10
    parts = [{"type": "text", "text": said[:10]}, {"type": "text", "text": said[10:]}]
    assert details(ask(server, prediction={"type": "content", "content": parts})) == (accepted, rejected)
    wrong = ask(server, prediction={"type": "content", "content": "Nothing of the kind, whatever was asked."})
    assert text_of(wrong) == said and details(wrong)[1] > 5


def test_several_answers_share_a_prediction(server: LocalServer) -> None:
    said = text_of(ask(server))
    several = ask(server, n=3, prediction={"content": said})
    assert [choice["message"]["content"] for choice in several["choices"]] == [said] * 3
    assert details(several)[0] == 3 * details(ask(server, prediction={"content": said}))[0]


def test_a_stream_and_generate_tell_it_too(server: LocalServer) -> None:
    said = text_of(ask(server))
    body = {
        **CHAT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prediction": {"type": "content", "content": said},
    }
    stream = server.request("POST", "/v1/chat/completions", body)
    chunks = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert details(chunks[-1])[0] >= 30
    plain = server.request("POST", "/generate", GENERATE).json()
    predicted = server.request("POST", "/generate", {**GENERATE, "prediction": plain["text"]}).json()
    assert predicted["text"] == plain["text"] and details(predicted)[0] >= 4
    assert "completion_tokens_details" not in plain["usage"]


@pytest.mark.parametrize("nothing", [None, {}, [], "", False])
def test_neutral_predictions_are_none(server: LocalServer, nothing: object) -> None:
    assert "completion_tokens_details" not in ask(server, prediction=nothing)["usage"]


def test_a_prediction_without_text_is_refused_by_a_sentence(server: LocalServer) -> None:
    for prediction in ({"type": "content"}, {"type": "image", "content": "x"}, {"content": 5}):
        answer = server.request("POST", "/v1/chat/completions", {**CHAT, "prediction": prediction})
        assert answer.status_code == 400 and "prediction" in answer.json()["error"]["param"]


def test_the_metrics_know_who_proposed(server: LocalServer) -> None:
    said = text_of(ask(server))
    before = _accepted(server)
    ask(server, prediction={"content": said})
    assert _accepted(server) > before + 20


def _accepted(server: LocalServer) -> float:
    lines = server.request("GET", "/metrics").text.splitlines()
    (line,) = (each for each in lines if "source_num_accepted_tokens_total{" in each and '"prediction"' in each)
    return float(line.rsplit(" ", 1)[1])
