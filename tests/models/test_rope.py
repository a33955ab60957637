"""RoPE as config.json describes it reaches the model, in either spelling and in every family, or the model is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE
from mlx_lm.utils import MODEL_REMAPPING

from service.core import ModelError
from service.models.fingerprint import model_fingerprint
from service.models.pair import load_model, unread_pair
from service.models.rope import READ_BY_MLX_LM, context_length, with_rope_keys
from tests.support.rope import (
    BASES,
    FAMILIES,
    LOCAL_BASE,
    SCALINGS,
    Reading,
    built,
    computed,
    new_spelling,
    old_spelling,
    reading,
    same,
)
from tests.support.typed import layers_of

MakeModel = Callable[..., Path]
DOCUMENTED = Path(__file__).parents[2] / "docs" / "pairs.md"
DAILY = (
    "llama",
    "qwen2",
    "gemma",
    "gemma3_text",
    "gemma3",
    "exaone4",
    "qwen3",
    "qwen3_moe",
    "mistral3",
    "gpt_neox",
    "phi3",
)
OF_OTHER_KINDS = ("gptj", "mamba", "lfm2", "exaone_moe", "muse_spark")
"""One family of each kind and spelling, and those that most models are of."""
ALL = sorted(FAMILIES, key=str.lower)
EVERY = [each if each in DAILY + OF_OTHER_KINDS else pytest.param(each, marks=pytest.mark.nightly) for each in ALL]
READ_BY_VARIANT = {
    "mistral3": "reads it for ministral3 and mistral4",
    "exaone_moe": "reads the base and ignores the scaling",
}
"""Families that read `rope_parameters` in part; Redraft lifts them."""
LLAMA3 = {"rope_type": "llama3", **SCALINGS["llama3"]}
YARN = {"rope_type": "yarn", **SCALINGS["yarn"]}


def documented() -> dict[Reading, set[str]]:
    """The table of docs/pairs.md."""
    text = DOCUMENTED.read_text(encoding="utf-8")
    return {
        each: set(re.findall(r"`([^`]+)`", line.removeprefix(f"| {each} |")))
        for each in Reading
        for line in text.splitlines()
        if line.startswith(f"| {each} |")
    }


def test_every_family_is_in_the_documented_table_once() -> None:
    names = [name for names in documented().values() for name in names]
    assert sorted(names) == sorted(FAMILIES)


@pytest.mark.parametrize("family", EVERY)
def test_the_base_takes_effect_as_documented(family: str) -> None:
    found = reading(family)
    assert family in documented()[found]
    assert (family in READ_BY_MLX_LM | READ_BY_VARIANT.keys()) == (found == Reading.ITSELF)
    if found is Reading.LIFTED:
        lifted = built(family, {"rope_parameters": new_spelling(family, BASES[0])}, lift=True)
        assert same(computed(lifted, family), computed(built(family, old_spelling(family, BASES[0])), family))


def test_names_that_mlx_lm_maps_to_such_a_family_are_known() -> None:
    mapped = {name for name, family in MODEL_REMAPPING.items() if family in READ_BY_MLX_LM}
    assert mapped <= READ_BY_MLX_LM
    assert READ_BY_MLX_LM - mapped <= FAMILIES.keys()


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", EVERY)
def test_a_scaling_is_applied_or_refused(family: str, kind: str) -> None:
    if family == "deepseek_v41":
        pytest.skip("has a base and a scaling of its own for compressed layers, and is refused for its cache")
    keys = {"rope_parameters": new_spelling(family, BASES[0], kind)}
    try:
        scaled = built(family, keys, lift=True)
        found = computed(scaled, family)
    except (ValueError, KeyError, TypeError):
        return
    if kind == "dynamic":  # It changes nothing up to the model's own length.
        assert (
            any("Dynamic" in type(module).__name__ or "Yarn" in type(module).__name__ for module in scaled.modules())
            or family == "minicpm3"
        )
        return
    unscaled = built(family, {"rope_parameters": new_spelling(family, BASES[0])}, lift=True)
    assert not same(found, computed(unscaled, family))


# ---------------------------------------------------------------------------------------------------- members of the kind


def rope_of(folder: Path) -> Any:
    last: Any = layers_of(load_model(folder).model)[-1]
    return last.self_attn.rope


def rewritten(folder: Path, drop: tuple[str, ...] = ("rope_theta",), **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    for name in drop:
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma"])
def test_base_and_scaling_of_transformers_5_are_read(make_model: MakeModel, family: str) -> None:
    more: dict[str, Any] = {} if family in {"llama", "mistral", "qwen2"} else {"head_dim": 8}
    folder = make_model(family, model_type=family, **more)
    rewritten(folder, rope_parameters={"rope_theta": 54321.0, "rope_type": "default"})
    assert rope_of(folder).base == 54321.0
    if family == "gemma":
        return  # Without scaling in mlx-lm.
    rewritten(folder, rope_parameters={"rope_theta": 54321.0, **LLAMA3})
    rope = rope_of(folder)
    expected = Llama3RoPE(8, 128, False, 54321.0, LLAMA3)
    assert isinstance(rope, Llama3RoPE) and mx.array_equal(rope._freqs, expected._freqs)


SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({"rope_theta": 5e4, "rope_type": "default"}, {"rope_theta": 5e4, "rope_scaling": None}),
    "no type": ({"rope_theta": 5e4}, {"rope_theta": 5e4, "rope_scaling": None}),
    "type instead of rope_type": (
        {"rope_theta": 5e4, "type": "linear", "factor": 2.0},
        {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "no base": ({"rope_type": "linear", "factor": 2.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama3": ({"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "yarn": ({"rope_theta": 5e5, **YARN}, {"rope_theta": 5e5, "rope_scaling": YARN}),
    "longrope": (
        {"rope_theta": 5e5, "rope_type": "longrope", **SCALINGS["longrope"]},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "longrope", **SCALINGS["longrope"]}},
    ),
    "mrope": (
        {"rope_theta": 5e5, "rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]},
        {"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    ),
    "equal for every type of layer": (
        {name: {"rope_theta": 5e4, "rope_type": "default"} for name in ("full_attention", "sliding_attention")},
        {"rope_theta": 5e4},
    ),
    "a type of layer without RoPE": (
        {"full_attention": {"rope_theta": 5e4, "rope_type": "default"}, "sliding_attention": None},
        {"rope_theta": 5e4},
    ),
    "empty": ({}, {}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_both_spellings_make_the_same_model(make_model: MakeModel, spelling: str) -> None:
    new, old = SPELLINGS[spelling]
    texts = mx.array([[5, 9, 13, 60, 2, 7, 41, 33, 12, 3]])
    folder = make_model("m")
    results: list[mx.array] = []
    for keys in ({"rope_parameters": new}, old, {**old, "rope_parameters": new}):
        (folder / "config.json").write_text((folder / "config.json").read_text())
        written = rewritten(folder, ("rope_theta", "rope_scaling", "rope_parameters"), **keys)
        results.append(load_model(written).model(texts))
    assert mx.array_equal(results[0], results[1]), "moved"
    assert mx.array_equal(results[0], results[2]), "both, and they agree"


def test_a_missing_original_length_is_the_models_own(make_model: MakeModel) -> None:
    """As transformers fills it in; mlx-lm would take 4,096."""
    scaling = {"rope_type": "yarn", "factor": 4.0}
    folder = rewritten(make_model("m"), rope_parameters={"rope_theta": 1e4, **scaling})
    expected = YarnRoPE(8, base=10000, scaling_factor=4.0, original_max_position_embeddings=128)
    assert mx.array_equal(rope_of(folder)._freqs, expected._freqs)


def test_gemma_3_gets_a_base_for_each_type_of_layer(make_model: MakeModel) -> None:
    types = ["sliding_attention", "full_attention"]
    by_type = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": LOCAL_BASE, "rope_type": "default"},
    }
    shape = {"model_type": "gemma3_text", "head_dim": 8, "sliding_window_pattern": 2, "layer_types": types}
    folder = rewritten(make_model("m", **shape), rope_parameters=by_type)
    ropes = [cast("Any", layer).self_attn.rope for layer in layers_of(load_model(folder).model)]
    assert [(rope.base, rope.scale) for rope in ropes] == [(LOCAL_BASE, 1.0), (1e6, 1 / 8)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two bases": ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0"),
    "two types": ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e4, **YARN}}, "rope_scaling is"),
    "two factors": ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}}, "rope_scaling is"),
    "scaled and not": ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "rope_scaling is"),
    "rope_type and type": ({"rope_parameters": {**YARN, "type": "linear"}}, "rope_type is yarn, and type linear"),
    "unknown type": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "spiral"}}, "Unsupported RoPE type spiral"),
    "bases by type of layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        "code for llama uses the rope base 1e+06, and rope_parameters of config.json ask for 10000, 1e+06",
    ),
    "a scaling of sliding layers": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6, **YARN}}},
        "the rope type yarn in sliding_attention layers alone",
    ),
    "types of layers that mlx-lm does not know": (
        {"rope_parameters": {"main": {"rope_theta": 1e6}, "compress": {"rope_theta": 1e4}}},
        "no key for compress, main",
    ),
    "flat and by type": ({"rope_parameters": {"rope_theta": 1e4, "main": {"rope_theta": 1e6}}}, "mix values"),
    "part of each head": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "ignores partial_rotary",
    ),
    "attention factor": ({"rope_parameters": {**YARN, "attention_factor": 2.0}}, "ignores attention_factor 2"),
    "a list": ({"rope_parameters": [1e4]}, "are not an object"),
    "a base in words": (
        {"rope_parameters": {"rope_theta": "large"}},
        "rope_theta in rope_parameters of config.json is no",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(make_model: MakeModel, case: str) -> None:
    keys, named = REFUSED[case]
    folder = rewritten(make_model("m"), **keys)
    for load in (load_model, lambda folder: unread_pair(folder, None)):
        with pytest.raises(
            ModelError, match=rf"^{re.escape(str(folder))} cannot be loaded by mlx-lm: .*{re.escape(named)}"
        ):
            load(folder)
    assert model_fingerprint(folder), "the list of models names it all the same"


def test_an_old_scaling_that_the_family_ignores_is_refused(make_model: MakeModel) -> None:
    """Qwen3's mixtures of experts: their cards recommend YaRN, and mlx-lm has none for them."""
    shape: dict[str, Any] = {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1}
    shape |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True}
    folder = make_model("m", **shape)
    load_model(folder)
    with pytest.raises(ModelError, match="its code for qwen3_moe ignores the rope type yarn"):
        load_model(rewritten(folder, (), rope_scaling=YARN))


def test_the_default_attention_factor_is_accepted(make_model: MakeModel) -> None:
    factor = 0.1 * math.log(4.0) + 1
    assert isinstance(
        rope_of(rewritten(make_model("m"), rope_parameters={**YARN, "attention_factor": factor})), YarnRoPE
    )


def test_a_family_that_reads_them_itself_is_left_alone() -> None:
    text = {"model_type": "qwen3_5_text", "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}}
    for config in (
        {"model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6}},
        {"model_type": "qwen3_5", "text_config": text},
    ):
        assert with_rope_keys(config) == config


def test_text_config_is_lifted_by_its_own_family() -> None:
    inner = {"rope_theta": 1e9, "rope_type": "default"}
    lifted = with_rope_keys(
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", "rope_parameters": inner}}
    )
    assert lifted["text_config"] == {"model_type": "mistral", "rope_theta": 1e9}
    written = {"model_type": "mistral3", "text_config": {"model_type": "ministral3", "rope_parameters": inner}}
    assert with_rope_keys(written) == written


# ------------------------------------------------------------------------------------------------ fingerprint and context


def test_the_fingerprint_covers_what_was_read(make_model: MakeModel) -> None:
    folder = make_model("m", rope_scaling=None)
    old = model_fingerprint(folder)
    seen = {old}
    rewritten(folder, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    assert model_fingerprint(folder) == old == load_model(folder).fingerprint, "the same model in the other spelling"
    for parameters in (
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, **LLAMA3},
        {"rope_theta": 5e5, **LLAMA3, "factor": 4.0},
    ):
        rewritten(folder, rope_parameters=parameters)
        assert model_fingerprint(folder) not in seen
        seen.add(model_fingerprint(folder))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        # As the cards of Qwen2.5 and Qwen3 say.
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 40960,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        # What was lengthened already: gpt-oss, Llama 3.1, Phi-3, Gemma 3.
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768},
            },
            40960,
        ),
        ({"text_config": {"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 2.0}}}, 200),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 3.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            300,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, None),
    ],
)
def test_yarn_lengthens_the_context(config: dict[str, Any], length: int | None) -> None:
    assert context_length(config) == length


def test_a_loaded_model_has_the_lengthened_context(make_model: MakeModel) -> None:
    folder = make_model("m")
    assert load_model(folder).context == 128
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert load_model(rewritten(folder, rope_parameters={"rope_theta": 1e4, **scaling})).context == 512


def test_longrope_is_read(make_model: MakeModel) -> None:
    parameters = {"rope_theta": 2e4, "rope_type": "longrope", **SCALINGS["longrope"]}
    rope = rope_of(rewritten(make_model("m"), rope_parameters=parameters))
    assert isinstance(rope, SuScaledRoPE)
    assert mx.allclose(rope._freqs, 3.0 * 2e4 ** (mx.arange(0, 8, 2) / 8))
