"""A server of a model whose ids have gaps, and whose logits are wider than its vocabulary."""

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
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.tiny_server import in_process_server
from tests.support.typed import leaves

HELLO, WORLD, HOLE, BEYOND, WIDTH = 266, 267, 260, 275, 280


def write(folder: Path, seed: int) -> Path:
    """Bytes at 0 to 255, four tokens at 266 to 269, logits of 280."""
    folder.mkdir()
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"Hello": HELLO, "\u0120world": WORLD, "<go>": 268, "<end>": 269}
    tokenizer = Tokenizer(BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<go>", "<end>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    target = tiny_llama(0, vocabulary=WIDTH)
    model = noisy_copy(target, seed, 0.3) if seed else target
    names = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")
    config = {name: getattr(model.args, name) for name in names}
    config |= {
        name: getattr(model.args, name) for name in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")
    }
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(leaves(model.parameters())))
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["with a draft", "without"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    root = tmp_path_factory.mktemp("gaps")
    pair = write(root / "target", 0), write(root / "draft", 1)
    draft = str(pair[1]) if request.param else "none"
    made = in_process_server(root, pair, models={"target": str(pair[0]), "draft": draft})
    made.start()
    yield made
    assert made.stop() == 0


def complete(server: LocalServer, **body: Any) -> dict[str, Any]:
    answer = server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 6, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_beyond_a_gap_are_served(server: LocalServer, stream: bool) -> None:
    asked = {"prompt": [10, HELLO, WORLD], "max_tokens": 3, "temperature": 0, "logit_bias": {str(WORLD): 100}}
    answer = server.request("POST", "/v1/completions", asked | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        assert answer.json()["choices"][0]["text"] == " world" * 3
        return
    lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for line in lines for choice in line["choices"]) == " world" * 3


@pytest.mark.parametrize("id", [HOLE, BEYOND])
def test_an_id_without_a_token_has_no_text(server: LocalServer, id: int) -> None:
    """It is the target's to draw: its distribution stays as it is."""
    drawn = complete(server, prompt=[10, id], logit_bias={str(id): 100}, logprobs=0)
    assert (drawn["text"], drawn["finish_reason"]) == ("", "length")
    assert drawn["logprobs"]["tokens"] == [""] * 6


@pytest.mark.parametrize("field", ["prompt", "logit_bias"])
def test_ids_end_with_the_logits(server: LocalServer, field: str) -> None:
    wrong: dict[str, Any] = (
        {"prompt": [1, WIDTH]} if field == "prompt" else {"prompt": "x", "logit_bias": {str(WIDTH): 1}}
    )
    answer = server.request("POST", "/v1/completions", {"max_tokens": 2, **wrong})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (field, f"token ids must be below {WIDTH}")


GRAMMARS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "regex": ({"regex": "Hello world"}, {"Hello world"}),
    "choice": ({"choice": [" world", "Hello<go>"]}, {" world", "Hello<go>"}),
    "json": ({"json": {"enum": ["Hello world"]}}, {'"Hello world"'}),
    "lark by id": ({"grammar": f'start: <[{HELLO}]> <[{HOLE}]> " world"'}, {"Hello world"}),
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_every_kind_of_grammar(server: LocalServer, kind: str) -> None:
    asked, texts = GRAMMARS[kind]
    answer = complete(server, max_tokens=20, structured_outputs=asked)
    assert answer["text"] in texts
    assert answer["finish_reason"] == "stop"


def test_no_text_of_a_grammar_has_an_id_without_a_token(server: LocalServer) -> None:
    """Whatever the model would rather say."""
    bias = {str(HOLE): 100, str(BEYOND): 100}
    answer = complete(server, structured_outputs={"regex": "[a-z]{4}"}, logit_bias=bias, max_tokens=20)
    assert len(answer["text"]) == 4
    assert answer["finish_reason"] == "stop"
