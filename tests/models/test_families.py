"""Every architecture mlx-lm ships: in ragged rows and past its window the tokens mlx-lm decodes, or refused by name."""

import contextlib
import importlib
import math
import pkgutil
import re
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from batches import decode
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.llama import Model as Llama
from oracle import relative, tiny_llama

from service.core import PairError, Prompt, Sampling
from service.engine.cache import RowLayer
from service.engine.prefix import PrefixCache
from service.engine.probe import check_rows
from service.models.pair import check_cache

V, H = 97, 32
TOKENS = 48
PROMPTS = (tuple(range(5, 90, 4)), (11, 7, 3), (60,))
"""Longer than the window, shorter, and a single token."""
SMALL: dict[str, Any] = {
    name: value
    for value, names in (
        (V, "vocab_size num_vocab vocab_size_per_layer_input"),
        (H, "hidden_size hidden_dim n_embd model_dim d_model dim_model_base block_dim"),
        (48, "intermediate_size ff_intermediate_size ffn_hidden_size n_inner intermediate_size_mlp"),
        (
            24,
            "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size moe_hidden_size",
        ),
        (24, "share_expert_dim shared_intermediate_size expert_ffn_hidden_size"),
        (2, "num_hidden_layers num_layers n_layer n_layers num_transformer_layers"),
        (4, "num_attention_heads num_heads n_head n_heads swa_num_attention_heads index_n_heads"),
        (2, "num_key_value_heads num_kv_heads n_kv_heads num_attention_groups swa_num_key_value_heads"),
        (8, "head_dim global_head_dim hidden_size_per_head kv_channels rotary_dim index_head_dim swa_head_dim"),
        (8, "qk_rope_head_dim qk_nope_head_dim v_head_dim swa_v_head_dim hidden_size_per_layer_input"),
        (8, "query_pre_attn_scalar laurel_rank ffn_dim_divisor"),
        (16, "kv_lora_rank q_lora_rank o_lora_rank index_topk"),
        (16, "sliding_window sliding_window_size window_size attention_window_size loop_window_size"),
        (16, "attention_chunk_size"),
        (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_top_k moe_k"),
        (1, "num_shared_experts n_shared_experts num_shared_expert moe_num_shared_experts zero_expert_num"),
        (1, "first_k_dense_replace num_dense_layers moe_layer_freq decoder_sparse_step num_kv_reuse_layers"),
        (1, "n_group topk_group num_expert_group mamba_n_groups n_groups"),
        (2, "sliding_window_pattern layer_group_size group_norm_size o_groups conv_window"),
        (512, "max_position_embeddings n_positions n_ctx block_size model_max_length"),
        (1e-5, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon layernorm_epsilon post_norm_eps"),
        (10000.0, "rope_theta rotary_emb_base rope_local_base_freq"),
        (0.5, "partial_rotary_factor rotary_pct"),
        (0.35, "attention_multiplier"),
        (1.0, "logits_scaling embedding_multiplier residual_multiplier logit_scale scale_emb scale_depth"),
        (1.0, "routed_scaling_factor output_multiplier qk_scale_factor"),
        (30.0, "final_logit_softcapping logits_soft_cap"),
        (
            False,
            "attention_bias mlp_bias use_bias use_qkv_bias post_norm tie_word_embeddings conv_bias mamba_proj_bias",
        ),
        (True, "use_qk_norm qk_norm norm_topk_prob use_conv_bias use_expert_bias mamba_conv_bias"),
        (True, "mla_scale_q_lora mla_scale_kv_lora linear_allow_neg_eigval"),
        (
            4,
            "conv_kernel conv1d_width mamba_d_conv linear_conv_kernel_dim time_step_rank mamba_n_heads mamba_num_heads",
        ),
        (8, "state_size ssm_state_size mamba_d_state linear_key_head_dim linear_value_head_dim"),
        (8, "a_low_rank_dim v_low_rank_dim gate_low_rank_dim decay_low_rank_dim"),
        (2, "linear_num_key_heads linear_num_value_heads mamba_expand"),
        (16, "mamba_d_head mamba_head_dim"),
        (64, "mamba_d_ssm"),
        (3, "conv_L_cache"),
        (None, "rope_scaling"),
        ([], "mlp_only_layers"),
        (["sliding_attention", "full_attention"], "layer_types"),
        ((0.001, 100.0), "time_step_limit"),
        ("noaux_tc", "topk_method"),
        ("sigmoid", "scoring_func"),
        ("identity", "zero_expert_type"),
    )
    for name in names.split()
}
"""Small values for the names that configurations share; each family takes those it knows."""

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 16}
BY_TYPE = {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN}}
TUNED = {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}
FULL = {"layer_types": ["full_attention"] * 2}
SHARED_KV = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": SMALL["layer_types"] * 2}
DELTA = {"linear_attn_config": {"kda_layers": [1], "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4}}
LFM = {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
CONV = {"layer_types": ["conv", "full_attention"]}

IDENTICAL: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afmoe": {},
    "apertus": {},
    "bailing_moe": {},
    "cohere": {},
    "cohere2": {},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek": {},
    "deepseek_v2": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3": {},
    "deepseek_v3+yarn": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "dots1": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone": {},
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "gemma": {},
    "gemma3": {},
    "gemma3_text": {},
    "gemma3n": SHARED_KV
    | {
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "altup_num_inputs": 4,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
    },
    "gemma4": SHARED_KV,
    "gemma4_text": SHARED_KV,
    "gemma4_text+experts": {"num_kv_shared_layers": 0, "enable_moe_block": True, "attention_k_eq_v": True},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {},
    "granite": {},
    "granitemoe": {},
    "granitemoehybrid+attention alone": {"layer_types": ["attention"] * 2},
    "helium": {},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 100.0},
    },
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {},
    "kimi_k25": {},
    "kimi_vl": {},
    "laguna": BY_TYPE,
    "lille-130m": {"n_embd": 256},
    "llama": {},
    "llama+full": FULL,
    "llama+linear": FULL | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama+llama3": FULL | {"rope_scaling": YARN | {"rope_type": "llama3"}},
    "llama+yarn": FULL | {"rope_scaling": YARN},
    "llama+longrope": FULL | {"rope_scaling": LONG},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "mellum": BY_TYPE,
    "mimo": {},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 1000.0,
    },
    "minicpm": {},
    "minicpm3": {"rope_scaling": LONG},
    "minimax": {},
    "ministral3": TUNED,
    "mistral3": TUNED | {"model_type": "ministral3"},
    "mistral4": TUNED,
    "mixtral": {},
    "muse_glimmer": {},
    "nanbeige": {"num_loops": 2},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
        ],
    },
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "openelm": {"num_query_heads": [4, 4], "num_kv_heads": [2, 2], "ffn_multipliers": [1.0, 2.0]},
    "phi": {},
    "phi3": {},
    "phi3+longrope": {"rope_scaling": LONG, "partial_rotary_factor": 1.0},
    "phimoe": {"rope_scaling": LONG | {"long_mscale": 1.2, "short_mscale": 1.0}},
    "phixtral": {},
    "pixtral": {},
    "plamo": {"n_shared_head": 2},
    "qwen": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen2_vl": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "spark2_5": BY_TYPE,
    "stablelm": {},
    "starcoder2": {},
    "step3p5": {},
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {},
}
"""What each family needs beyond SMALL. After a plus: a configuration of a family that is (also) listed without it."""

STATE, SEVERAL = "keeps a ArraysCache in layer 0", "keeps a CacheList in layer 0"
OTHER, RAGGED = "gives other logits in a batch than alone", "does not run on rows of unlike length"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "afm7": (OTHER, {}),
    "baichuan_m1": (SEVERAL, {"sliding_window_layers": [0]}),
    "bailing_hybrid": (STATE, {}),
    "bailing_moe_linear": (STATE, {}),
    "bailing_moe_v3": (STATE, {}),
    "deepseek_v32": (SEVERAL, {}),
    "deepseek_v41": ("keeps a LayerCache in layer 0", {}),
    "falcon_h1": (SEVERAL, {}),
    "gear": (STATE, CONV),
    "gemma2": (OTHER, {}),
    "glm_moe_dsa": (SEVERAL, {"rope_parameters": PLAIN}),
    "gpt_bigcode": (RAGGED, {}),
    "granitemoehybrid": (STATE, {"layer_types": ["mamba", "attention"]}),
    "jamba": (
        STATE,
        {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    ),
    "kimi_k3": (STATE, DELTA),
    "kimi_linear": (STATE, DELTA),
    "lfm2": (STATE, LFM | CONV),
    "lfm2-vl": (STATE, LFM | CONV),
    "lfm2_moe": (STATE, CONV),
    "llama+dynamic": (RAGGED, FULL | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama4": (
        "keeps a ChunkedKVCache in layer 0",
        {"num_hidden_layers": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    ),
    "longcat_flash": (SEVERAL, {"attention_method": "MLA"}),
    "longcat_flash_ngram": (STATE, {"ngram_vocab_size_ratio": 2}),
    "mamba": (STATE, {}),
    "mamba2": (STATE, {}),
    "minimax_m3_vl": (SEVERAL, {"moe_layer_freq": [0, 1], "dense_intermediate_size": 48}),
    "nemotron_h": (STATE, {"layer_types": ["mamba", "attention"]}),
    "olmo_hybrid": (STATE, {"layer_types": ["linear_attention", "full_attention"]}),
    "phi3small": (
        OTHER,
        {"vocab_size": 100352, "dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "blocksparse_block_size": 32},
    ),
    "plamo2": (STATE, {}),
    "plamo3": ("reads prompts through a window of 17 and generates through 16", {}),
    "prism_hadamard_qwen35": (
        STATE,
        {
            "hidden_size": 128,
            "schema_version": 1,
            "tensor_namespace": "mlx-lm-text",
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
        },
    ),
    "qwen3_5": (STATE, {}),
    "qwen3_5_moe": (STATE, {}),
    "qwen3_next": (STATE, {}),
    "recurrent_gemma": (STATE, {"block_types": ["recurrent", "attention"]}),
    "rwkv7": (STATE, {}),
}
"""The words that must name the cause, and what the family needs beyond SMALL."""

METAL: dict[str, dict[str, Any]] = {
    "bitnet": {},
    "muse_spark": {"num_shared_experts": 0, "rope_parameters": PLAIN, "layer_rope_theta": [10000.0, 0.0]},
}
"""Families whose layers are Metal kernels without any other form."""

NOT_BUILT = {"olmo": "its module ends the process that imports it when the package ai2-olmo is not there"}


ordinary_mask = RowLayer.make_mask


@cache
def installed() -> frozenset[str]:
    """Modules of mlx-lm that define a model, and those that cannot be imported to find out."""
    found: set[str] = set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            names = vars(importlib.import_module(f"mlx_lm.models.{module.name}"))
        except (ImportError, SystemExit):
            found.add(module.name)
        else:
            found |= {module.name} if {"Model", "ModelArgs"} <= names.keys() else set()
    return frozenset(found)


def family_of(name: str) -> str:
    return name.partition("+")[0]


def floating(model: nn.Module) -> list[tuple[str, mx.array]]:
    weights: Any = tree_flatten(model.parameters())
    return [(name, array) for name, array in weights if mx.issubdtype(array.dtype, mx.floating)]


def build(name: str, needs: dict[str, Any]) -> Any:
    """Random weights at a scale where the output wanders; zeros, with which some layers begin, would hide mistakes."""
    family = family_of(name)
    config = SMALL | {"model_type": family} | needs
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config | {"text_config": config}))
    model.update(tree_unflatten([(name, scattered(array)) for name, array in floating(model)]))
    model.eval()
    mx.eval(model.parameters())
    return model


def scattered(array: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape)
    return array + 0.2 * noise if array.ndim < 2 else noise / math.sqrt(array.shape[-1])


def likeness(name: str, needs: dict[str, Any], target: nn.Module) -> nn.Module:
    """A draft of the same family that is right some of the time."""
    draft = build(name, needs)
    mx.random.seed(1)
    near = [(n, a + 0.1 * mx.sqrt(mx.mean(a**2)) * mx.random.normal(a.shape)) for n, a in floating(target)]
    draft.update(tree_unflatten(near))
    mx.eval(draft.parameters())
    return draft


def by_mlx_lm(model: nn.Module, prompt: tuple[int, ...]) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS)]


def asked() -> list[Prompt]:
    return [Prompt(tokens, Sampling(max_tokens=TOKENS)) for tokens in PROMPTS]


def start(model: nn.Module) -> None:
    """The checks a server makes of each model before it serves."""
    check_cache(model, "target")
    check_rows(model, "target")


def without_window(layer: RowLayer, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
    whole = RowLayer(layer.lengths, None)
    whole.ahead = layer.ahead
    return ordinary_mask(whole, N, return_array)


def compare(name: str, needs: dict[str, Any]) -> None:
    """The same tokens, in a comparison that would have seen a wrong rollback or a wrong window."""
    target = build(name, needs)
    start(target)
    expected = [by_mlx_lm(target, prompt) for prompt in PROMPTS]
    draft, prefix = likeness(name, needs, target), PrefixCache(2**24)
    rows = decode(target, draft, asked(), k=3, vocabulary=V, prefix=prefix)
    assert [row.output for row in rows] == expected
    chat = Prompt((*PROMPTS[0], *expected[0][:40]), Sampling(max_tokens=TOKENS - 40))
    (later,) = decode(target, draft, [chat], k=3, vocabulary=V, prefix=prefix)
    assert later.reused > 0 and later.output == expected[0][40:]
    rounds = [round for row in rows for round in row.rounds]
    accepted, drafted = sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)
    assert 0 < accepted < drafted, "accepting or rolling back was not tested"
    if any(isinstance(layer, RotatingKVCache) for layer in make_prompt_cache(target)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowLayer, "make_mask", without_window)
            blind = decode(target, None, asked(), k=0, vocabulary=V)
        assert any(row.output != tokens for row, tokens in zip(blind, expected, strict=True)), (
            "the window did not matter"
        )


def test_every_installed_family_is_listed_once() -> None:
    tables = (IDENTICAL, REFUSED, METAL, NOT_BUILT)
    listed = [{name for name in table if "+" not in name} for table in tables]
    assert frozenset().union(*listed) == installed()
    assert sum(map(len, listed)) == len(installed())


@pytest.mark.parametrize("name", IDENTICAL)
def test_decodes_as_mlx_lm_does(name: str) -> None:
    compare(name, IDENTICAL[name])


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    cause, needs = REFUSED[name]
    model = build(name, needs)
    with pytest.raises(PairError, match=rf"^the target \({family_of(name)}\) .*{re.escape(cause)}"):
        start(model)


@pytest.mark.parametrize("name", METAL)
def test_without_metal_its_kernels_are_named(name: str) -> None:
    """With Metal, identical and refused are both in order: which of them was not looked at yet."""
    if mx.metal.is_available():
        with contextlib.suppress(PairError):
            compare(name, METAL[name])
        return
    with pytest.raises(PairError, match=rf"^the target \({name}\) .*does not run on this device: .*No Metal back-end"):
        start(build(name, METAL[name]))


@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_cannot_be_built_still_cannot(name: str) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"mlx_lm.models.{name}")


def test_the_draft_may_be_of_another_family() -> None:
    target = build("gemma3_text", {})
    rows = decode(target, tiny_llama(1, vocabulary=V), asked(), k=3, vocabulary=V)
    assert [row.output for row in rows] == [by_mlx_lm(target, prompt) for prompt in PROMPTS]


def test_quantised_weights_decode_as_mlx_lm_does() -> None:
    target = tiny_llama(0, hidden=64)
    draft = relative(target, 1, 0.2)
    for model in (target, draft):
        nn.quantize(model, group_size=32, bits=4)
        assert isinstance(model.layers[0].self_attn.q_proj, nn.QuantizedLinear)
        start(model)
    rows = decode(target, draft, asked(), k=3, vocabulary=V)
    assert [row.output for row in rows] == [by_mlx_lm(target, prompt) for prompt in PROMPTS]
    assert any(round.accepted for row in rows for round in row.rounds)


class QuantisedCache(Llama):
    def make_cache(self) -> Any:
        return [QuantizedKVCache(group_size=32, bits=8) for _ in self.layers]


def test_a_quantised_cache_is_refused_by_name() -> None:
    with pytest.raises(PairError, match=r"^the target \(llama\) keeps a QuantizedKVCache in layer 0"):
        start(QuantisedCache(tiny_llama(0).args))
