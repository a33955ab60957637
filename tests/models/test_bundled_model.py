"""The bundled model: converted by two processes at once, and loaded like any other model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate

from service.core import ModelError, Prompt, Sampling
from service.engine.adapters import served
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.evaluation.server_process import LocalServer
from service.models import catalog
from service.models.pair import Loaded, Pair, load_model, load_pair
from service.models.text import TextEncoder
from service.models.tokens import streaming_detokenizer
from tests.support.moved_rope import with_moved_rope
from tests.support.oracle import forced, naive
from tests.support.schemas import complete_answers
from tests.support.typed import layers_of, load_arrays

pytestmark = pytest.mark.skipif(
    not catalog.entries()[0].installed, reason="the package with the bundled weights is not installed"
)

_RESOLVE = """
import json, sys
from pathlib import Path
from service.models.catalog import resolve
steps = []
folder = resolve("smollm2-135m", Path(sys.argv[1]), on_step=steps.append)
print(json.dumps({"folder": str(folder), "steps": steps, "files": sorted(p.name for p in folder.iterdir())}))
"""


@dataclass
class Conversion:
    home: Path
    folder: Path
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversion]:
    home = tmp_path_factory.mktemp("bundled")
    leftover = home / "models" / ".smollm2-135m.making-1"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half a file")
    children = [
        subprocess.Popen([sys.executable, "-c", _RESOLVE, str(home)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        answers = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
    yield Conversion(home, Path(answers[0]["folder"]), answers)
    shutil.rmtree(home)  # half a gigabyte


@pytest.fixture(scope="module")
def with_draft(conversion: Conversion) -> Callable[[str], Pair]:
    """with_draft(name) -> the bundled model and a draft that ships for it, loaded once."""
    return cache(lambda name: load_pair(conversion.folder, catalog.resolve(name, conversion.home)))


@pytest.fixture(scope="module")
def bundled(with_draft: Callable[[str], Pair]) -> Loaded:
    return with_draft("smollm2-135m-draft").target


def test_two_processes_at_once_convert_the_model_once(conversion: Conversion) -> None:
    assert {answer["folder"] for answer in conversion.answers} == {str(conversion.home / "models" / "smollm2-135m")}
    assert sum(len(answer["steps"]) for answer in conversion.answers) == 1
    assert conversion.answers[0]["files"] == conversion.answers[1]["files"]
    left = sorted(path.name for path in (conversion.home / "models").iterdir())
    assert left == [".smollm2-135m.lock", "smollm2-135m"]


@pytest.mark.parametrize("step", [48, pytest.param(1, marks=pytest.mark.nightly)])
def test_nothing_is_lost_in_conversion(conversion: Conversion, step: int) -> None:
    """step: one of this many rows of a weight is compared."""
    gguf = catalog._bundled_gguf()
    assert gguf is not None
    stored = load_arrays(gguf)
    converted = load_arrays(conversion.folder / "model.safetensors")
    for theirs, ours in (("token_embd", "model.embed_tokens"), ("blk.7.ffn_down", "model.layers.7.mlp.down_proj")):
        packed, scales, biases = (
            np.array(stored[f"{theirs}.{part}"][::step]) for part in ("weight", "scales", "biases")
        )
        bits = packed.shape[1] * 32 // (scales.shape[1] * 32)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        integers = ((packed[..., None] >> shifts) & (2**bits - 1)).reshape(*scales.shape, 32)
        exact = integers * scales[..., None].astype(np.float64) + biases[..., None].astype(np.float64)
        shape = converted[f"{ours}.weight"].shape
        assert shape[0] == stored[f"{theirs}.weight"].shape[0]
        np.testing.assert_array_equal(np.array(converted[f"{ours}.weight"][::step]), exact.reshape(-1, shape[1]))


@pytest.mark.nightly
def test_it_answers_in_english(bundled: Loaded) -> None:
    prompt = (
        TextEncoder(bundled.tokenizer)
        .encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        .tokens
    )
    answer = generate(bundled.model, bundled.tokenizer, list(prompt), max_tokens=8)
    assert "Paris" in answer


def test_a_bundled_models_tokenizer_is_the_trained_one(bundled: Loaded) -> None:
    encoder = TextEncoder(bundled.tokenizer)
    for text in ("Hello wörld 2024!\n\n  def f(x):\n\treturn x", "日本語 🎉", "it's <|im_end|> done"):
        tokens = encoder.encode_text(text)
        assert bundled.tokenizer.decode(list(tokens)) == text
    digits = encoder.encode_text("2024")
    assert len(digits) == 4
    end = encoder.encode_text("<|im_end|>")
    assert set(end) == bundled.tokenizer.eos_token_ids
    chat = bundled.tokenizer.decode(list(encoder.encode_chat([{"role": "user", "content": "Hi"}]).tokens))
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture(scope="module")
def moved(conversion: Conversion, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Target and draft with their RoPE base inside rope_parameters."""
    root, draft = tmp_path_factory.mktemp("moved"), catalog.resolve("smollm2-135m-draft", conversion.home)
    return with_moved_rope(conversion.folder, root / "target"), with_moved_rope(draft, root / "draft")


LONG_TEXT = 308
"""Tokens of a prompt behind which a wrong base shows: 65 of 300 next tokens differ."""


def long_prompt(bundled: Loaded) -> tuple[int, ...]:
    text = "The history of printing begins long before movable type. " * 40
    return TextEncoder(bundled.tokenizer).encode_text(
        text + "Once upon a time, in a small village by the sea, there lived"
    )[-LONG_TEXT:]


@pytest.mark.parametrize(("following", "tokens"), [(40, 4), pytest.param(300, 32, marks=pytest.mark.nightly)])
def test_a_base_inside_rope_parameters_changes_no_token(
    with_draft: Callable[[str], Pair], moved: tuple[Path, Path], following: int, tokens: int
) -> None:
    old, new = with_draft("smollm2-135m-draft"), load_pair(*moved)
    assert old.draft is not None and new.draft is not None
    assert new.provenance == old.provenance
    prompt = long_prompt(old.target)
    assert len(prompt) == LONG_TEXT
    prompt = prompt[: following + 8]
    for before, after in ((old.target, new.target), (old.draft, new.draft)):
        found = [
            mx.argmax(each.model(mx.array([prompt])), axis=-1)[0, -following:].tolist() for each in (before, after)
        ]
        assert sum(a == b for a, b in zip(*found, strict=True)) == following
    sampling = Sampling(max_tokens=tokens)
    assert naive(new.target.model, prompt, sampling) == naive(old.target.model, prompt, sampling)


@pytest.mark.nightly
@pytest.mark.parametrize("drafting", [False, True])
def test_a_server_answers_the_same_with_a_base_inside_rope_parameters(
    with_draft: Callable[[str], Pair], moved: tuple[Path, Path], tmp_path: Path, drafting: bool
) -> None:
    pair = with_draft("smollm2-135m-draft")
    prompt = long_prompt(pair.target)
    expected = naive(pair.target.model, prompt, Sampling(max_tokens=32))
    text = pair.target.tokenizer.decode(list(prompt))
    assert TextEncoder(pair.target.tokenizer).encode_text(text) == prompt
    accepted: list[int] = []
    for name, folders in (("old", (pair.target.folder, pair.draft.folder if pair.draft else None)), ("new", moved)):
        draft = str(folders[1]) if drafting else "none"
        sections: dict[str, dict[str, object]] = {"models": {"target": str(folders[0]), "draft": draft}}
        sections |= {"training": {"enabled": False}, "engine": {"num_lookup_tokens": 0, "adaptive": False}}
        server = LocalServer(tmp_path / name, sections, tmp_path / "home")
        server.start()
        try:
            body = {"prompt": text, "max_tokens": 32, "temperature": 0.0, "chat_template": False, "return_tokens": True}
            answer = server.request("POST", "/generate", body, timeout=300.0).json()
        finally:
            assert server.stop() == 0
        assert answer["tokens"] == expected
        accepted.append(answer["timings"]["draft_n_accepted"])
    assert accepted[0] == accepted[1] and (accepted[0] > 0) == drafting


def test_its_facts_come_from_the_file(bundled: Loaded) -> None:
    assert bundled.context == 8192
    assert len(layers_of(bundled.model)) == 30
    assert bundled.config["rope_theta"] == 100000.0


@pytest.mark.nightly
def test_the_shipped_draft_is_assembled_once_and_again_when_it_changes(conversion: Conversion, tmp_path: Path) -> None:
    source = tmp_path / "smollm2-135m-draft"
    source.mkdir()
    weights = load_arrays(conversion.folder / "model.safetensors")
    first = {name: value.astype(mx.float16) for name, value in weights.items() if name.startswith("model.layers.0.")}
    config = json.loads((conversion.folder / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))

    def ship_and_resolve(scale: float) -> tuple[Path, list[str]]:
        layers = {name: value * scale for name, value in first.items()} | {
            "model.norm.weight": weights["model.norm.weight"]
        }
        mx.save_safetensors(str(source / "layers.safetensors"), layers)
        steps: list[str] = []
        folder = catalog.resolve("smollm2-135m-draft", conversion.home, on_step=steps.append, data=tmp_path)
        return folder, steps

    folder, steps = ship_and_resolve(1.0)
    assert len(steps) == 1
    pair = load_pair(conversion.folder, folder)
    assert pair.draft is not None
    assert pair.draft.model["model"].embed_tokens.weight is pair.target.model["model"].embed_tokens.weight
    assert ship_and_resolve(1.0) == (folder, [])
    again, steps = ship_and_resolve(0.5)
    assert (again, len(steps)) == (folder, 1)
    assert load_model(folder).fingerprint != pair.draft.fingerprint
    left = {path.name for path in folder.parent.iterdir() if "lock" not in path.name}
    assert left == {"smollm2-135m", "smollm2-135m-draft"}


@pytest.mark.parametrize("name", ["smollm2-135m-draft", pytest.param("smollm2-135m-eagle", marks=pytest.mark.nightly)])
def test_shipped_drafts_are_accepted_often_and_keep_the_output(with_draft: Callable[[str], Pair], name: str) -> None:
    pair = with_draft(name)
    assert pair.draft is not None
    asked = (
        TextEncoder(pair.target.tokenizer)
        .encode_chat([{"role": "user", "content": "Count from one to twenty."}])
        .tokens
    )
    decoder = Decoder(pair.target.model, served(pair.draft), vocabulary=pair.vocabulary, k=3)
    row = Request("0", Prompt(asked, Sampling(max_tokens=20)), pair.eos, None)
    decoder.admit(row)
    while decoder.rows:
        decoder.round()
    assert row.output == forced(pair.target.model, asked, row.output, row.prompt.sampling, pair.eos)
    assert row.emitted / len(row.rounds) > 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["smollm2-135m-draft", "smollm2-135m-eagle"])
def test_answers_under_generated_schemas_are_valid(with_draft: Callable[[str], Pair], name: str) -> None:
    pair = with_draft(name)
    assert pair.draft is not None
    encoder, target = TextEncoder(pair.target.tokenizer), pair.target.model
    decoders = [
        Decoder(target, draft, vocabulary=pair.vocabulary, k=4, adaptive=True, lookup=8)
        for draft in (served(pair.draft), None)
    ]
    found = [complete_answers(number, decoders[number % 2], target, encoder, pair.eos, 96) for number in range(50)]
    compiled = [complete for complete in found if complete is not None]
    assert len(compiled) > 45 and sum(compiled) > 2 * len(compiled)


def test_an_older_conversion_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "thing"

    def build(version: str) -> Path:
        def make(scratch: Path) -> None:
            (scratch / "made").write_text(version)

        return catalog._make_once(folder, version, make)

    assert (build("1") / "made").read_text() == "1"
    (folder / "mark").touch()
    assert (build("1") / "mark").exists()
    assert (build("2") / "made").read_text() == "2"
    assert not (folder / "mark").exists()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "thing"

    def build(scratch: Path) -> None:
        (scratch / "half").touch()
        raise RuntimeError("disk full")

    with pytest.raises(ModelError, match="disk full"):
        catalog._make_once(folder, "1", build)
    assert [path.name for path in folder.parent.iterdir()] == [".thing.lock"]


@pytest.mark.parametrize("text", [" Paris is", "    return x", "no space", "  "])
def test_an_answers_text_is_all_of_its_tokens(bundled: Loaded, text: str) -> None:
    """Also where it begins with a space, as what goes on from a plain text does."""
    made = streaming_detokenizer(bundled.tokenizer)
    for token in bundled.tokenizer.encode(text, add_special_tokens=False):
        made.add_token(token)
    made.finalize()
    assert made.text == text
