"""A tiny model of every architecture in mlx-lm, and which of them are served."""

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

V, H = 97, 32
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
"""Small values for common configuration names; each family takes those it knows."""

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
    "deepseek_v32": {},
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
    "glm_moe_dsa": {"rope_parameters": PLAIN},
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
    "longcat_flash": {"attention_method": "MLA"},
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
    "minimax_m3_vl": {"moe_layer_freq": [0, 1], "dense_intermediate_size": 48},
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

FOUR = {"num_hidden_layers": 4}
RECURRENT: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {},
    "bailing_moe_linear": {},
    "bailing_moe_v3": {},
    "falcon_h1": {},
    "gear": {"num_hidden_layers": 3, "layer_types": ["conv_mixer", "full_attention", "sliding_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "kimi_k3": DELTA,
    "kimi_linear": DELTA,
    "lfm2": LFM | CONV,
    "lfm2-vl": LFM | CONV,
    "lfm2_moe": CONV,
    "mamba": {},
    "mamba2": {},
    "nemotron_h": {"layer_types": ["mamba", "attention"]},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "plamo2": {},
    "prism_hadamard_qwen35": FOUR
    | {
        "hidden_size": 128,
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "lm_head", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "qwen3_5": FOUR,
    "qwen3_5_moe": FOUR,
    "qwen3_next": FOUR,
    "rwkv7": {},
}
"""Families with recurrent state in some or all layers; values beyond SMALL, as above."""

OTHER, RAGGED = "gives other results in a batch than alone", "does not run on rows of unlike length"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "afm7": (OTHER, {}),
    "baichuan_m1": ("no module takes its recurrent state", {"sliding_window_layers": [0]}),
    "deepseek_v41": ("keeps a LayerCache in layer 0", {}),
    "gemma2": (RAGGED, {}),
    "gpt_bigcode": (RAGGED, {}),
    "llama+dynamic": (RAGGED, FULL | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama4": (
        "keeps a ChunkedKVCache in layer 0",
        {"num_hidden_layers": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
    ),
    "longcat_flash_ngram": (RAGGED, {"ngram_vocab_size_ratio": 2}),
    "phi3small": (
        RAGGED,
        {"vocab_size": 100352, "dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "blocksparse_block_size": 32},
    ),
    "plamo3": ("prefills with a window of 17 tokens but generates with one of 16", {}),
    "recurrent_gemma": (OTHER, {"block_types": ["recurrent", "attention"]}),
}
"""The text that the error must contain, and what the family needs beyond SMALL."""

METAL: dict[str, dict[str, Any]] = {
    "bitnet": {},
    "muse_spark": {"num_shared_experts": 0, "rope_parameters": PLAIN, "layer_rope_theta": [10000.0, 0.0]},
}
"""Families with layers that exist only as Metal kernels."""

NOT_BUILT = {"olmo": "its module ends the process that imports it when the package ai2-olmo is not there"}


def family_of(name: str) -> str:
    return name.partition("+")[0]


def floating(model: nn.Module) -> list[tuple[str, mx.array]]:
    weights: Any = tree_flatten(model.parameters())
    return [(name, array) for name, array in weights if mx.issubdtype(array.dtype, mx.floating)]


Prepare = Callable[[dict[str, Any]], dict[str, Any]]


def build(name: str, needs: dict[str, Any], prepare: Prepare = dict) -> Any:
    """Random weights at a scale where the output varies; zeros, with which some layers begin, would hide errors. prepare: the
    configuration, with a text_config, before the family reads it."""
    family = family_of(name)
    config = SMALL | {"model_type": family} | needs
    module = importlib.import_module(f"mlx_lm.models.{family}")
    arguments, given = module.ModelArgs, prepare(config | {"text_config": dict(config)})
    if "from_dict" not in vars(arguments):
        # mlx-lm's own from_dict inspects the class once a name.
        known = inspect.signature(arguments).parameters
        given = {each: value for each, value in given.items() if each in known}
    mx.random.seed(0)
    model = module.Model(arguments.from_dict(given))
    model.update(tree_unflatten([(name, with_noise(array)) for name, array in floating(model)]))
    model.eval()
    mx.eval(model.parameters())
    return model


def with_noise(array: mx.array) -> mx.array:
    noise = mx.random.normal(array.shape)
    return array + 0.2 * noise if array.ndim < 2 else noise / math.sqrt(array.shape[-1])


def noisy_draft(name: str, needs: dict[str, Any], target: nn.Module) -> nn.Module:
    """A draft of the same family that is right some of the time."""
    draft = build(name, needs)
    mx.random.seed(1)
    near = [(n, a + 0.1 * mx.sqrt(mx.mean(a**2)) * mx.random.normal(a.shape)) for n, a in floating(target)]
    draft.update(tree_unflatten(near))
    mx.eval(draft.parameters())
    return draft
