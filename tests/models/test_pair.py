"""Pairs of tiny models: which are served, and which are refused and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from service.core import ModelError, PairError
from service.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from service.models.pair import check_cache, load_model, load_pair, unread_pair
from service.models.text import TextEncoder
from tests.support.typed import leaves, load_arrays

MakeModel = Callable[..., Path]

on_cpu = pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="stored precision is kept on accelerators")


@on_cpu
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_on_the_cpu_everything_computes_in_float32(make_model: MakeModel, bits: int | None) -> None:
    loaded = load_model(make_model("m", bits=bits))
    kinds = {value.dtype for _, value in leaves(loaded.model.parameters())}
    assert kinds == ({mx.float32} if bits is None else {mx.float32, mx.uint32})
    logits = loaded.model(mx.array([[1, 2, 3]]))
    assert logits.dtype == mx.float32
    assert mx.isfinite(logits).all().item()
    assert not loaded.model.training
    assert loaded.context == 128


def test_a_pair_shares_its_embeddings_once(tmp_path: Path, make_model: MakeModel) -> None:
    target, draft = make_model("target", seed=1), make_model("draft", seed=2, num_hidden_layers=1)
    weights = load_arrays(draft / "model.safetensors")
    weights["model.embed_tokens.weight"] = load_arrays(target / "model.safetensors")["model.embed_tokens.weight"]
    mx.eval(weights)
    joined = tmp_path / "joined"
    joined.mkdir()
    for path in draft.glob("*.json"):
        (joined / path.name).write_bytes(path.read_bytes())
    mx.save_safetensors(str(joined / "model.safetensors"), weights)
    pair = load_pair(target, joined)
    assert pair.draft is not None
    assert pair.draft.model["model"].embed_tokens.weight is pair.target.model["model"].embed_tokens.weight
    assert (pair.vocabulary, pair.eos) == (258, {0})
    assert pair.provenance.target == model_fingerprint(target)
    assert pair.provenance.draft == model_fingerprint(joined)
    assert pair.provenance.tokenizer == tokenizer_fingerprint(target)

    apart = load_pair(target, draft)
    assert apart.draft is not None
    assert apart.draft.model["model"].embed_tokens.weight is not apart.target.model["model"].embed_tokens.weight
    own = load_model(draft).model["model"].embed_tokens.weight
    assert mx.array_equal(apart.draft.model["model"].embed_tokens.weight, own).item()


def test_a_target_alone_is_a_pair_without_a_draft(make_model: MakeModel) -> None:
    pair = load_pair(make_model("target"), None)
    assert pair.draft is None
    assert pair.provenance.draft == ""


def test_padded_logits_meet_at_the_common_width(make_model: MakeModel) -> None:
    pair = load_pair(make_model("target", vocab_size=320), make_model("draft", vocab_size=264))
    assert (pair.vocabulary, pair.shared_vocabulary) == (320, 264), "tokens are drawn at the target's own width"
    pair = load_pair(make_model("narrow", vocab_size=264), make_model("wide", vocab_size=320))
    assert (pair.vocabulary, pair.shared_vocabulary) == (264, 264)


@pytest.mark.promise(5)
def test_logits_that_do_not_cover_the_tokenizer_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(PairError, match=r"draft's logits cover 250 tokens.*258"):
        load_pair(make_model("target"), make_model("draft", vocab_size=250))


def _byte_vocabulary(make_model: MakeModel) -> tuple[Path, dict[str, int]]:
    target = make_model("target")
    return target, json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]


@pytest.mark.promise(5)
def test_two_tokens_exchanged_are_refused_though_the_sizes_agree(make_model: MakeModel) -> None:
    target, vocabulary = _byte_vocabulary(make_model)
    exchanged = vocabulary | {"a": vocabulary["b"], "b": vocabulary["a"]}
    with pytest.raises(PairError, match=r"4 entries differ, the first is '[ab]'"):
        load_pair(target, make_model("draft", vocabulary=exchanged))


@pytest.mark.promise(5)
def test_another_end_token_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(PairError, match=r"end tokens: \[0\] and \[1\]"):
        load_pair(make_model("target"), make_model("draft", eos="<s>"))


def test_conversions_may_list_more_or_fewer_of_the_same_end_tokens(make_model: MakeModel) -> None:
    draft = make_model("draft")
    (draft / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    pair = load_pair(make_model("target"), draft)
    assert pair.draft is not None
    assert pair.draft.tokenizer.eos_token_ids == {0, 1}
    assert pair.eos == {0}, "the target's own end an answer"


def test_models_may_lack_added_tokens(make_model: MakeModel) -> None:
    """Gemma 3's image token is in the tokenizers of all sizes, and only the larger models have an embedding for it."""
    special = ("</s>", "<s>", "<image>")
    target, draft = make_model("target", special=special, vocab_size=259), make_model("draft", special=special)
    pair = load_pair(target, draft)
    assert (pair.vocabulary, pair.shared_vocabulary) == (259, 258)
    alone = load_pair(draft, None)
    assert (alone.vocabulary, alone.eos) == (258, {0})
    narrow = make_model("narrow", special=special, vocab_size=257)
    with pytest.raises(PairError, match="draft's logits cover 257 tokens, but the tokenizer has 259"):
        load_pair(target, narrow)
    for use in (load_pair, unread_pair):
        with pytest.raises(PairError, match="target's logits cover 257 tokens, but the tokenizer has 259"):
            use(narrow, None)
    ends = make_model(
        "ends", special=("</s>", "<s>", "<a>", "<end>"), eos="<end>", vocab_size=259, eos_token_id=[0, 259]
    )
    assert load_pair(ends, None).eos == {0}, "an end token that the model lacks is never said"


def test_other_special_tokens_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(PairError, match=r"special tokens: \[0, 1\] and \[0, 1, \d+\]"):
        load_pair(make_model("target"), make_model("draft", special=("</s>", "<s>", "!")))


def test_a_draft_may_be_recurrent(make_model: MakeModel) -> None:
    mamba = make_model(
        "mamba",
        model_type="mamba",
        state_size=8,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=4,
    )
    assert load_pair(make_model("target"), mamba).draft is not None


class _Custom(nn.Module):
    """A minimal model family; the test sets its caches and its call."""

    model_type = "custom"

    def __init__(self, *caches: Any) -> None:
        super().__init__()
        self._caches = list(caches)

    def make_cache(self) -> list[Any]:
        return self._caches

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return tokens


class _Pictured(_Custom):
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: mx.array, pixels: mx.array, cache: Any = None
    ) -> mx.array:
        return tokens


class _Stateless(_Custom):
    def __call__(self, tokens: mx.array) -> mx.array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tokens


class _OwnCache(KVCache):
    """A subclass of KVCache, which may behave differently."""


def test_attention_and_states_are_accepted() -> None:
    check_cache(_Custom(KVCache(), RotatingKVCache(max_size=8), CacheList(ArraysCache(2), KVCache())), "target")


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            _Custom(KVCache(), RotatingKVCache(max_size=8, keep=4)),
            "RotatingKVCache that keeps its first tokens in layer 1",
        ),
        (_Custom(_OwnCache()), "_OwnCache"),
        (_Custom(ConcatenateKVCache()), "ConcatenateKVCache"),
        (_Custom(KVCache(), CacheList(ArraysCache(2), QuantizedKVCache())), "QuantizedKVCache in layer 1"),
        (_Pictured(KVCache()), r"called with \(tokens, pixels\)"),
        (_Stateless(KVCache()), r"called with \(tokens\)"),
    ],
)
def test_anything_else_is_refused_by_name(model: nn.Module, named: str) -> None:
    with pytest.raises(PairError, match=rf"the target \(custom\).*{named}"):
        check_cache(model, "target")


def test_a_model_mlx_lm_cannot_load_names_place_and_reason(make_model: MakeModel) -> None:
    folder = make_model("m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_family"}))
    with pytest.raises(ModelError, match="no_such_family"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(folder)


def test_text_goes_through_the_template_and_the_tokenizer(make_model: MakeModel) -> None:
    tokenizer = load_model(make_model("m")).tokenizer
    encoder = TextEncoder(tokenizer)
    chat = encoder.encode_chat([{"role": "system", "content": "be kind"}, {"role": "user", "content": "größe"}]).tokens
    assert tokenizer.decode(list(chat)) == "<s>system be kind</s><s>user größe</s><s>assistant "
    assert tokenizer.decode(list(encoder.encode_text("12 größe"))) == "12 größe"


def test_a_sentencepiece_vocabulary_with_a_gap_is_refused_by_name(make_model: MakeModel) -> None:
    """mlx-lm reads every id up to the number of tokens, and finds no token at one of them."""
    folder = make_model("target")
    vocabulary = {f"<0x{byte:02X}>": byte + 9 for byte in range(256)}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match=f"the tokenizer of {folder} cannot be read"):
        load_model(folder)
