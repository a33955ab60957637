"""Prompts that clients measure: `echo` and `prompt_logprobs` of a real server, as lm-evaluation-harness reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from service.core import Selection
from service.models.pair import load_model
from service.settings import load_settings
from service.store.stores import Stores, open_stores
from tests.support.oracle import read
from tests.support.tiny_server import InProcessServer, in_process_server, write_pair
from tests.support.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Once upon a time, a café"
# What lm-evaluation-harness sends for a log-likelihood.
LIKELIHOOD: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def target(pair: tuple[Path, Path]) -> nn.Module:
    return load_model(pair[0]).model


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcessServer]:
    made = in_process_server(
        tmp_path_factory.mktemp("server"), pair, engine={"max_rows": 4, "max_waiting": 4, "prefix_cache_mb": 64}
    )
    made.start()
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def ids(pair: tuple[Path, Path]) -> list[int]:
    return list(load_model(pair[0]).tokenizer.encode(TEXT))


def asked(server: InProcessServer, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    answer = server.request("POST", path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server: InProcessServer, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = server.request("POST", path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def naive(target: nn.Module, tokens: list[int]) -> np.ndarray:
    """(n, V) log-probabilities after each token."""
    logits = read(target, tokens, make_prompt_cache(target)).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def likelihood(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """As lm_eval.models.openai_completions reads an answer."""
    own, likely = (choice["logprobs"][name][context:-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(own), all(logprob == max(top.values()) for logprob, top in zip(own, likely, strict=True))


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_log_likelihood_is_the_naive_decoders(
    server: InProcessServer, target: nn.Module, ids: list[int], draft_tokens: int
) -> None:
    answer = asked(server, prompt=[ids], num_draft_tokens=draft_tokens, **LIKELIHOOD)
    (choice,), after = answer["choices"], naive(target, ids)
    own = [float(after[i, token]) for i, token in enumerate(ids[1:])]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    assert logprobs["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
    assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
    assert [max(top.values()) for top in logprobs["top_logprobs"][1:]] == pytest.approx(after.max(axis=-1), abs=1e-4)
    for context in range(1, len(ids)):
        expected = sum(own[context - 1 :]), bool((after[context - 1 : -1].argmax(-1) == ids[context:]).all())
        total, greedy = likelihood(choice, context)
        assert (total, greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 1)
    assert answer["timings"]["cache_n"] == 0


def test_a_greedy_continuation_is_known_for_one(server: InProcessServer, target: nn.Module, ids: list[int]) -> None:
    text = [*ids, int(naive(target, ids)[-1].argmax())]
    (choice,) = asked(server, prompt=text, **LIKELIHOOD)["choices"]
    assert likelihood(choice, len(ids)) == (pytest.approx(float(naive(target, ids)[-1].max()), abs=1e-4), True)


def test_an_answer_that_ends_at_once_has_an_entry_for_its_end(
    server: InProcessServer, target: nn.Module, ids: list[int]
) -> None:
    """Tools take all entries but the last for the prompt's."""
    bias: dict[str, Any] = {"logit_bias": {"0": 100}}
    (choice,) = asked(server, prompt=[ids], **LIKELIHOOD, **bias)["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"] == TEXT
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1 and choice["logprobs"]["tokens"][-1] == "</s>"
    # Without the prompt an end is no part of the answer, as ever.
    (plain,) = asked(server, prompt=[ids], max_tokens=1, logprobs=1, **bias)["choices"]
    assert plain["logprobs"]["tokens"] == []


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_prompt_comes_before_the_answer(server: InProcessServer, ids: list[int], as_ids: bool) -> None:
    body: dict[str, Any] = {"prompt": ids if as_ids else TEXT, "max_tokens": 6, "temperature": 0}
    plain = asked(server, logprobs=2, **body)["choices"][0]
    whole = asked(server, logprobs=2, echo=True, **body)["choices"][0]
    assert whole["text"] == TEXT + plain["text"]
    logprobs = whole["logprobs"]
    # The é is two tokens here, both of which begin where it does.
    expected = [len(TEXT.encode()[:at].decode(errors="ignore")) for at in range(len(ids))]
    assert logprobs["text_offset"][: len(ids)] == expected
    assert logprobs["text_offset"][len(ids)] == len(TEXT)
    assert all(len(top) in {2, 3} for top in logprobs["top_logprobs"][1 : len(ids)])
    assert logprobs["tokens"][len(ids) :][: len(plain["logprobs"]["tokens"])] == plain["logprobs"]["tokens"]
    # Without log-probabilities the text alone.
    bare = asked(server, echo=True, **body)["choices"][0]
    assert (bare["text"], bare["logprobs"]) == (whole["text"], None)
    chunks = streamed(server, COMPLETIONS, logprobs=2, echo=True, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    assert chunks[0]["choices"][0]["text"].startswith(TEXT)
    parts = [part for chunk in chunks if (part := chunk["choices"][0]["logprobs"])]
    for name, values in logprobs.items():
        found = [value for part in parts for value in part[name]]
        if name == "top_logprobs":
            found, values = ([top and sorted(top) for top in likely] for likely in (found, values))
        assert found == (pytest.approx(values, abs=1e-4) if name == "token_logprobs" else values)


def test_nothing_need_be_generated(server: InProcessServer, ids: list[int]) -> None:
    silent: dict[str, Any] = {**LIKELIHOOD, "max_tokens": 0}
    scored = asked(server, prompt=[ids, ids[:1]], **silent)
    one = asked(server, prompt=[ids], **LIKELIHOOD)["choices"][0]
    first, second = scored["choices"]
    assert (first["text"], first["finish_reason"]) == (TEXT, "length")
    assert first["logprobs"]["token_logprobs"] == pytest.approx(one["logprobs"]["token_logprobs"][:-1], abs=1e-5)
    assert second["logprobs"]["token_logprobs"] == [None]
    assert scored["usage"]["completion_tokens"] == 0
    nothing = asked(server, prompt=TEXT, max_tokens=0)["choices"][0]
    assert (nothing["text"], nothing["finish_reason"]) == ("", "length")
    (end,) = streamed(server, COMPLETIONS, prompt=TEXT, max_tokens=0, echo=True)
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == (TEXT, "length")


def test_a_batch_of_any_size_is_answered_in_order(server: InProcessServer, target: nn.Module, ids: list[int]) -> None:
    """Far more prompts than rows and queue hold, while others are answered too."""
    prompts = [ids[: 2 + i % (len(ids) - 2)] for i in range(60)]
    with ThreadPoolExecutor(4) as pool:
        batch = pool.submit(asked, server, prompt=prompts, **LIKELIHOOD)
        others = [pool.submit(asked, server, prompt=TEXT, max_tokens=9, temperature=0) for _ in range(3)]
        assert len({other.result()["choices"][0]["text"] for other in others}) == 1
        answer = batch.result()
    after = naive(target, ids)
    assert [choice["index"] for choice in answer["choices"]] == list(range(60))
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        expected = [float(after[i, token]) for i, token in enumerate(prompt[1:])]
        assert choice["logprobs"]["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs_are_vllms(server: InProcessServer, target: nn.Module, path: str) -> None:
    body: dict[str, Any] = {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    body |= {"max_tokens": 4, "temperature": 0}
    answer = asked(server, path, prompt_logprobs=2, **body)
    found = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_logprobs"]
    assert found[0] is None and len(found) == answer["usage"]["prompt_tokens"]
    tokens = [int(next(iter(each))) for each in found[1:]]
    after = naive(target, [1 if path == CHAT else ord("O"), *tokens]) if path == CHAT else None
    if after is not None:
        for row, token, each in zip(after, tokens, found[1:], strict=False):
            own = each[str(token)]
            assert own["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
            assert own["rank"] == 1 + int((row > row[token]).sum()) and len(each) in {2, 3}
            assert {value["rank"] for value in each.values()} >= {1, 2}
            assert set(own) == {"logprob", "rank", "decoded_token"}
    chunks = streamed(server, path, prompt_logprobs=2, **body)
    ends = [(chunk["choices"][0] if path == COMPLETIONS else chunk).get("prompt_logprobs") for chunk in chunks]
    assert [end for end in ends if end] == [found]
    alone = asked(server, path, prompt_logprobs=0, **body)
    least = (alone["choices"][0] if path == COMPLETIONS else alone)["prompt_logprobs"]
    assert [list(each) for each in least[1:]] == [[str(token)] for token in tokens]
    plain = asked(server, path, **body)
    assert "prompt_logprobs" not in plain and "prompt_logprobs" not in plain["choices"][0]


def recorded(stores: Stores) -> set[str]:
    return set(stores.generations.names(Selection(everything=True)))


def test_what_is_measured_is_recorded_only_where_the_request_says_so(server: InProcessServer) -> None:
    stores, number = open_stores(load_settings(server.config)), count()

    def ask(**body: Any) -> str:
        # A text that is in the log already is counted there.
        answer = asked(server, prompt=f"{next(number)} {TEXT}", max_tokens=4, temperature=0, **body)
        return answer["id"].removeprefix("cmpl-")

    measures: list[dict[str, Any]] = [{"echo": True, "logprobs": 1}, {"echo": True}, {"prompt_logprobs": 0}]
    silent = [ask(**measure, **more) for measure in measures for more in ({}, {"store": None}, {"store": False})]
    said = {ask(), *(ask(**measure, store=True) for measure in measures)}
    until(lambda: said <= recorded(stores))
    assert not recorded(stores) & set(silent)
    stores.close()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"prompt": [[5], [2**30]]}, "prompt"),
        ({"prompt": [[5], []]}, "prompt.1"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(server: InProcessServer, body: dict[str, Any], param: str) -> None:
    answer = server.request("POST", COMPLETIONS, {"prompt": TEXT, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_prompt_may_fill_the_context_where_nothing_is_generated(server: InProcessServer) -> None:
    assert asked(server, prompt=[5] * 2048, max_tokens=0)["usage"]["prompt_tokens"] == 2048
    refused = server.request("POST", COMPLETIONS, {"prompt": [5] * 2048, "max_tokens": 1})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
