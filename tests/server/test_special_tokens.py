"""A server of a model whose tokenizer has special tokens, and one token more than the model has rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from service.evaluation.server_process import LocalServer
from service.models.pair import load_model
from service.models.text import TextEncoder
from service.models.tokens import token_table
from tests.support.oracle import tiny_llama
from tests.support.tiny_server import TEMPLATE, in_process_server
from tests.support.typed import leaves

SPECIAL = ["<end>", "<s>", "<|pad|>", "<|mark|>", "[TOOL_CALLS]", "[ARGS]"]
PAD, ROWS = 258, 262


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("special") / "target"
    folder.mkdir()
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in (*SPECIAL, "<soft>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    template = "{# [TOOL_CALLS] #}" + TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    model = tiny_llama(0, vocabulary=ROWS)
    names = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
    names += ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    config = {name: getattr(model.args, name) for name in names}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(leaves(model.parameters())))
    return folder


@pytest.fixture(scope="module")
def server(target: Path) -> Iterator[LocalServer]:
    made = in_process_server(target.parent, (target, target), models={"target": str(target), "draft": "none"})
    made.start()
    yield made
    assert made.stop() == 0


def ask(server: LocalServer, path: str, **body: Any) -> dict[str, Any]:
    answer = server.request("POST", path, {"max_tokens": 4, "temperature": 0, "logit_bias": {str(PAD): 100}, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_special_tokens_are_hidden_unless_they_are_asked_for(server: LocalServer) -> None:
    turns = [{"role": "user", "content": "x"}]
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": turns})):

        def text(path: str = path, body: dict[str, Any] = body, **more: Any) -> str:
            choice = ask(server, path, **body, **more)
            return choice["text"] if "text" in choice else choice["message"]["content"]

        assert text() == text(skip_special_tokens=True) == ""
        assert text(skip_special_tokens=False) == "<|pad|>" * 4
        assert text(logit_bias={"65": 100}) == text(logit_bias={"65": 100}, skip_special_tokens=False)
    chosen = ask(server, "/v1/completions", prompt="x", logprobs=0)
    assert chosen["logprobs"]["tokens"] == [] and chosen["finish_reason"] == "length"


def test_a_stop_string_of_a_special_token_still_stops(server: LocalServer) -> None:
    """Clients send the end markers of chat templates as stop strings."""
    choice = ask(server, "/v1/completions", prompt="x", stop=["<|pad|>"])
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_a_token_that_the_model_lacks(server: LocalServer) -> None:
    """The model is served; what it cannot read is refused."""
    for body in ({"prompt": "a <soft>"}, {"prompt": [65, ROWS]}):
        answer = server.request("POST", "/v1/completions", {"max_tokens": 2, **body})
        assert answer.status_code == 400 and f"below {ROWS}" in answer.json()["error"]["message"]
    assert ask(server, "/v1/completions", prompt="a < soft>", logit_bias={"65": 100})["text"]
    structured = {"structured_outputs": {"choice": ["<soft>"]}, "max_tokens": 9, "logit_bias": {}}
    assert ask(server, "/v1/completions", prompt="a", **structured)["text"] == "<soft>"


def test_markers_that_a_reader_needs_are_kept(target: Path) -> None:
    tokenizer = load_model(target).tokenizer
    encoder, table = TextEncoder(tokenizer, ROWS), token_table(tokenizer)

    def hidden(*stop: str, split: bool = True, tools: bool = False) -> set[str]:
        found = encoder.hidden_tokens(split=split, tools=tools, stop=stop)
        assert (found.start, found.end) == ("[TOOL_CALLS]" if tools and split else "", "")
        return {table[id].decode() for id in found.ids}

    everything = {*SPECIAL, "<soft>"}
    assert hidden() == everything == hidden(split=False, tools=True)
    assert hidden(tools=True) == everything - {"[TOOL_CALLS]"}
    assert hidden("\n<|mark|>", "[ARGS]") == everything - {"<|mark|>", "[ARGS]"}
