"""A model split into body and head computes the same as the whole, or is not split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from service.core import ModelError
from service.models.heads import CutHead, cut, cut_head, full_head, ids_allowed, narrow_heads, split, uncut

Build = Callable[[dict[str, Any]], nn.Module]

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_WHOLE: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "tie_word_embeddings": False},
    {"model_type": "mistral"},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "tie_word_embeddings": False},
    {"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 2},
]
_MORE: list[dict[str, Any]] = [
    {"model_type": "gemma2", "final_logit_softcapping": 30.0},
    {"model_type": "cohere", "logit_scale": 0.0625, "layer_norm_bias": False, "use_qk_norm": False},
    {"model_type": "granite", "logits_scaling": 8.0, "attention_multiplier": 0.1, "embedding_multiplier": 2.0,
     "residual_multiplier": 0.5, "attention_bias": False, "mlp_bias": False},
]  # fmt: skip


def _name(config: dict[str, Any]) -> str:
    return f"{config['model_type']}-{'tied' if config.get('tie_word_embeddings', True) else 'untied'}"


@pytest.mark.parametrize("config", _WHOLE, ids=_name)
def test_backbone_and_head_compute_what_the_model_computes(build_family: Build, config: dict[str, Any]) -> None:
    model = build_family(_COMMON | config)
    parts = split(model)
    assert parts is not None
    backbone, head = parts
    cache, other = make_prompt_cache(model), make_prompt_cache(model)
    for tokens in (mx.array([[7, 8, 9, 10, 11], [3, 2, 1, 0, 5]]), mx.array([[4], [6]])):
        hidden = backbone(tokens, cache)
        whole = model(tokens, cache=other)
        assert mx.allclose(head(hidden), whole, rtol=1e-5, atol=1e-5).item()
        assert mx.allclose(head(hidden[:, -1]), whole[:, -1], rtol=1e-5, atol=1e-5).item()


@pytest.mark.parametrize("config", _MORE, ids=_name)
def test_a_family_that_does_more_to_its_logits_is_not_split(build_family: Build, config: dict[str, Any]) -> None:
    assert split(build_family(_COMMON | config)) is None


def test_layers_replaced_later_are_the_ones_that_run(build_family: Build) -> None:
    model = build_family(_COMMON | {"model_type": "llama", "tie_word_embeddings": False})
    parts = split(model)
    assert parts is not None
    backbone, head = parts
    tokens = mx.array([[7, 8, 9]])
    before = head(backbone(tokens, None))
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]})
    for layer in model["model"].layers:
        layer.self_attn.q_proj.lora_b = mx.ones_like(layer.self_attn.q_proj.lora_b)
    model.lm_head = nn.Linear(32, 64, bias=False)
    after = head(backbone(tokens, None))
    assert mx.allclose(after, model(tokens), rtol=1e-5, atol=1e-5).item()
    assert not mx.allclose(after, before).item()


@pytest.mark.parametrize("config", [*_WHOLE, *_MORE], ids=_name)
@pytest.mark.parametrize("bits", [None, 4])
def test_a_reduced_head_gives_the_same_logits_for_its_ids(
    build_family: Build, config: dict[str, Any], bits: int | None
) -> None:
    model = build_family(_COMMON | config | {"intermediate_size": 64})
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    tokens, reduced = mx.array([[7, 8, 9, 10, 11], [3, 2, 1, 0, 5]]), [40, 3, 63, 0, 17]
    others = mx.array([i for i in range(64) if i not in reduced])
    before = model(tokens)
    cut(model, [9, 8])
    cut(model, reduced)
    after = model(tokens)
    assert after.shape == before.shape
    assert mx.allclose(after[..., mx.array(reduced)], before[..., mx.array(reduced)], rtol=1e-4, atol=1e-5)
    assert (after[..., others].max() < after[..., mx.array(reduced)].min() - 10).item()
    if (parts := split(model)) is not None:
        assert mx.array_equal(parts[1](parts[0](tokens, None)), after)
    with narrow_heads([model], np.array([2, *reduced, 50], dtype=np.int32)):
        narrow = model(tokens)
    assert mx.allclose(narrow, before[..., mx.array([*sorted(reduced), 2, 50])], rtol=1e-4, atol=1e-5)
    assert mx.array_equal(model(tokens), after), "outside of the block logits are as wide as before"
    uncut(model)
    with narrow_heads([model], np.array([2], dtype=np.int32)):
        assert mx.array_equal(model(tokens), before), "a whole head stays whole"
    assert mx.array_equal(model(tokens), before)


@pytest.mark.parametrize("config", _WHOLE, ids=_name)
@pytest.mark.parametrize("bits", [None, 4])
def test_each_row_of_a_batch_may_have_extra_ids(build_family: Build, config: dict[str, Any], bits: int | None) -> None:
    model = build_family(_COMMON | config | {"intermediate_size": 64})
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    tokens, reduced = mx.array([[7, 8, 9], [3, 2, 1]]), [40, 3, 63]
    whole = model(tokens)
    cut(model, reduced)
    alone = model(tokens)
    head = cut_head(model)
    assert head is not None and head.in_vocabulary.nonzero()[0].tolist() == sorted(reduced)
    # Duplicates, and an id of the reduced vocabulary, as in a padded list.
    extra = [[5, 9, 3], [20, 20, 3]]
    head.allow_extra_ids(mx.array(extra))
    given = model(tokens)
    head.allow_extra_ids(None)
    for row, ids in enumerate(extra):
        here = mx.array(sorted({*reduced, *ids}))
        others = mx.array([i for i in range(64) if i not in {*reduced, *ids}])
        assert mx.allclose(given[row][:, here], whole[row][:, here], rtol=1e-4, atol=1e-5)
        assert mx.array_equal(given[row][:, others], alone[row][:, others])
    assert mx.array_equal(model(tokens), alone)
    # Ids that the head does not have are passed over.
    with ids_allowed(model, np.array([[5, 9, 70], [20, 20, 3]], dtype=np.int32)) as in_vocabulary:
        assert in_vocabulary is not None and in_vocabulary.sum() == len(reduced)
        given = model(tokens)
    here = mx.array(sorted({*reduced, 5, 9, 20}))
    assert mx.allclose(given[..., here], whole[..., here], rtol=1e-4, atol=1e-5)
    assert (given > alone).sum().item() == 3 * tokens.size
    assert mx.array_equal(model(tokens), alone)
    with full_head(model) as in_vocabulary:
        assert in_vocabulary is not None and in_vocabulary.sum() == len(reduced)
        assert mx.array_equal(model(tokens), whole)
    assert mx.array_equal(model(tokens), alone)


def test_extra_ids_of_a_head_with_a_bias_have_their_bias() -> None:
    head = nn.Linear(8, 20)
    short = CutHead(head, [1, 4])
    x = mx.random.normal((2, 3, 8), key=mx.random.key(0))
    short.allow_extra_ids(mx.array([[7], [19]]))
    got = short(x)
    assert mx.allclose(got[0, :, 7], head(x)[0, :, 7], atol=1e-6) and mx.allclose(
        got[1, :, 19], head(x)[1, :, 19], atol=1e-6
    )
    assert mx.isinf(got[0, :, 19]).all()


def test_a_full_head_needs_no_extra_ids(build_family: Build) -> None:
    model = build_family(_COMMON | {"model_type": "llama"})
    assert cut_head(model) is None
    with full_head(model) as in_vocabulary:
        assert in_vocabulary is None


@pytest.mark.parametrize("ids", [[], [64], [-1]])
def test_a_vocabulary_of_another_model_is_refused(build_family: Build, ids: list[int]) -> None:
    model = build_family(_COMMON | {"model_type": "llama"})
    before = model(mx.array([[1, 2]]))
    with pytest.raises(ModelError, match="token ids"):
        cut(model, ids)
    assert mx.array_equal(model(mx.array([[1, 2]])), before)
