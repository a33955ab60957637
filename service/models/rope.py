"""Rotary position embeddings (RoPE) as described in config.json, in the keys that mlx-lm reads.

transformers 5 writes base and scaling inside `rope_parameters`, either flat or by layer type. Most model families in mlx-lm
read `rope_theta`, `rope_scaling` and similar keys instead, and silently fall back to their defaults. Imports only the standard
library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

READ_BY_MLX_LM = frozenset(
    {
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "glm_moe_dsa",
        "granitemoehybrid",
        "laguna",
        "lfm2",
        "lfm2-vl",
        "lfm2_moe",
        "mellum",
        "minimax_m3_vl",
        "ministral3",
        "mistral4",
        "muse_glimmer",
        "muse_spark",
        "olmo_hybrid",
        "prism_hadamard_qwen35",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "spark2_5",
    }
)
"""Values of `model_type` whose `rope_parameters` mlx-lm reads itself. tests/models/test_rope.py compares this set with
mlx-lm."""
_THETA = {"gpt_neox": "rotary_emb_base"}
_PARTIAL = {"gpt_neox": "rotary_pct"}
_LOCAL_THETA = {"mimo_v2_flash": "swa_rope_theta", "plamo3": "rope_local_theta"}
"""Keys of families that do not use the common `rope_theta`, `partial_rotary_factor` and `rope_local_base_freq`."""
_REQUIRE_SCALING = {"exaone4", "glm4_moe", "llama4"}
"""Families whose `rope_scaling` has no default."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_UNSCALED = {"default", "mrope"}
"""Types that leave the frequencies unchanged. mrope assigns positions to images; text has the usual ones."""
_YARN = frozenset({"yarn", "deepseek_yarn", "telechat3-yarn"})
_NEED_ORIGINAL_LENGTH = _YARN | {"llama3", "longrope"}

Config = dict[str, Any]


class _Model(Protocol):
    """An MLX model."""

    def modules(self) -> list[Any]: ...


def with_rope_keys(config: Mapping[str, Any]) -> Config:
    """A copy of a config.json in which `rope_parameters`, at the top level and in `text_config`, is replaced by the keys that
    the family's mlx-lm code reads. Families that read `rope_parameters` themselves are left unchanged.

    Raises ValueError if `rope_parameters` is malformed, contradicts another key, or cannot be expressed in these keys.
    """
    lifted = _with_keys(config, {_family(config)})
    if isinstance(text := config.get("text_config"), dict):
        lifted["text_config"] = _with_keys(text, {_family(config), _family(text)})
    return lifted


def check_rope(model: _Model, config: Mapping[str, Any]) -> None:
    """Compare the RoPE that mlx-lm built with the original config.json. Raises ValueError if the family's code ignores a
    scaling type, an attention factor, or the lifted base or rotated dimensions."""
    family = _family(config) or "model"
    # Image towers are not called.
    ropes = [each for each in model.modules() if _is_rope(each) and "Vision" not in type(each).__name__]
    plain = [rope for rope in ropes if type(rope).__name__ == "RoPE"]
    scales = any(type(rope).__name__ != "RoPE" or rope.scale != 1 for rope in ropes)
    for part, read in _parts(config):
        for entry in _entries(part):
            kind = _type(entry)
            scaled = kind not in _UNSCALED and not (kind == "linear" and entry.get("factor") == 1)
            if scaled and not scales:
                raise ValueError(f"its code for {family} ignores the rope type {kind} that config.json asks for")
            factor = entry.get("attention_factor")
            if kind in _YARN and factor is not None and any(_differ(rope, "mscale", factor) for rope in ropes):
                raise ValueError(f"its code for {family} ignores attention_factor {factor:g} of config.json")
        if _has_parameters(part) and not read:
            _check_bases(part, plain, family)
            _check_dimensions(part, ropes, family)


def context_length(config: Mapping[str, Any]) -> int | None:
    """The maximum input in tokens, None if config.json gives none. YaRN extends `max_position_embeddings` to its original
    length times its factor, as model cards state and vLLM computes it."""
    parts = [part for part, _ in _parts(config)]
    lengths = [length for part in parts if isinstance(length := part.get("max_position_embeddings"), int)]
    if not lengths:
        return None
    longest = lengths[0]
    for entry in (entry for part in parts for entry in _entries(part)):
        original, factor = entry.get("original_max_position_embeddings") or lengths[0], entry.get("factor")
        if _type(entry) in _YARN and isinstance(factor, int | float):
            longest = max(longest, int(original * factor))
    return longest


def _with_keys(part: Mapping[str, Any], families: set[str | None]) -> Config:
    lifted = dict(part)
    if not _has_parameters(part) or families & READ_BY_MLX_LM:
        return lifted
    del lifted["rope_parameters"]
    family = _family(part) or next((each for each in families if each), "")
    full, sliding = _by_layer_type(part)
    _put(lifted, _THETA.get(family, "rope_theta"), _number(full, "rope_theta"))
    _put(lifted, _PARTIAL.get(family, "partial_rotary_factor"), _number(full, "partial_rotary_factor"))
    if sliding is not None:
        _put(lifted, _LOCAL_THETA.get(family, "rope_local_base_freq"), _number(sliding, "rope_theta"))
    _put_scaling(lifted, full)
    if families & _REQUIRE_SCALING:
        lifted.setdefault("rope_scaling", None)
    return lifted


def _by_layer_type(part: Mapping[str, Any]) -> tuple[Config, Config | None]:
    """The parameters of layers with full attention, and those of layers with a sliding window if they differ."""
    entries = _parameters(part)
    if len({json.dumps(entry, sort_keys=True) for entry in entries.values()}) == 1:
        return next(iter(entries.values())), None
    if unknown := sorted(entries.keys() - {_FULL, _SLIDING}):
        raise ValueError(f"rope_parameters differ by type of layer, and mlx-lm has no key for {', '.join(unknown)}")
    if (kind := _type(entries[_SLIDING])) not in _UNSCALED:
        raise ValueError(
            f"rope_parameters ask for the rope type {kind} in {_SLIDING} layers alone, which mlx-lm does not offer"
        )
    return entries[_FULL], entries[_SLIDING]


def _put_scaling(lifted: Config, entry: Config) -> None:
    old, kind = lifted.get("rope_scaling"), _type(entry)
    if kind in _UNSCALED:
        if old is not None and _type(old) not in _UNSCALED:
            raise _contradiction("rope_scaling", old, entry)
        return
    # Some families read `type`, others `rope_type`.
    scaling = {name: value for name, value in entry.items() if name not in {"rope_theta", "partial_rotary_factor"}}
    scaling |= {"type": kind, "rope_type": kind}
    length = lifted.get("original_max_position_embeddings", lifted.get("max_position_embeddings"))
    if kind in _NEED_ORIGINAL_LENGTH and length is not None:
        scaling.setdefault("original_max_position_embeddings", length)
    if old is not None and (
        _type(old) != kind or any(scaling.get(name, value) != value for name, value in old.items())
    ):
        raise _contradiction("rope_scaling", old, entry)
    lifted["rope_scaling"] = scaling


def _put(lifted: Config, key: str, value: float | None) -> None:
    if value is None:
        return
    if lifted.get(key) not in (None, value):
        raise _contradiction(key, lifted[key], value)
    lifted[key] = value


def _contradiction(key: str, old: object, new: object) -> ValueError:
    return ValueError(
        f"config.json contradicts itself: {key} is {old}, and rope_parameters say {new}. Remove one of them"
    )


def _check_bases(part: Mapping[str, Any], plain: list[Any], family: str) -> None:
    layers = part.get("layer_types") or (_FULL, _SLIDING)
    used = {name: entry for name, entry in _parameters(part).items() if name in layers or name == ""}
    wanted = {entry["rope_theta"] for entry in used.values() if "rope_theta" in entry}
    built = {rope.base for rope in plain}
    # Only unscaled layers keep their base.
    missing = {e["rope_theta"] for e in used.values() if "rope_theta" in e and _type(e) in _UNSCALED} - built
    if wanted and built and (built - wanted or missing):
        raise ValueError(
            f"its code for {family} uses the rope base {_listed(built)}, and rope_parameters of config.json ask for "
            f"{_listed(wanted)}"
        )


def _check_dimensions(part: Mapping[str, Any], ropes: list[Any], family: str) -> None:
    factors = {entry.get("partial_rotary_factor") for entry in _parameters(part).values()} - {None, 1.0}
    heads, hidden = part.get("num_attention_heads"), part.get("hidden_size")
    size = part.get("head_dim") or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None)
    # Multi-head latent attention rotates a separate part (qk_rope_head_dim).
    if not factors or size is None or "qk_rope_head_dim" in part:
        return
    wanted = {int(size * factor) for factor in factors if factor is not None}
    built = {rope.dims for rope in ropes if hasattr(rope, "dims")}
    if built - wanted:
        raise ValueError(f"its code for {family} ignores partial_rotary_factor {_listed(factors)} of config.json")


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """The levels of a config.json, and whether mlx-lm reads `rope_parameters` there."""
    yield config, _family(config) in READ_BY_MLX_LM
    if isinstance(text := config.get("text_config"), dict):
        yield text, bool({_family(config), _family(text)} & READ_BY_MLX_LM)


def _entries(part: Mapping[str, Any]) -> list[Config]:
    """All descriptions of a scaling, in either spelling."""
    found = [*_parameters(part).values()] if _has_parameters(part) else []
    return [*found, scaling] if isinstance(scaling := part.get("rope_scaling"), dict) else found


def _has_parameters(part: Mapping[str, Any]) -> bool:
    return bool(part.get("rope_parameters"))


def _parameters(part: Mapping[str, Any]) -> dict[str, Config]:
    """`rope_parameters` by layer type; flat ones under "". Layers without RoPE are omitted. Raises ValueError."""
    given: object = part["rope_parameters"]
    if not isinstance(given, dict):
        raise ValueError(f"rope_parameters of config.json are not an object: {given!r}")
    entries = cast("dict[str, Any]", given)
    nested = {name: entry for name, entry in entries.items() if isinstance(entry, dict)}
    flat = {name: entry for name, entry in entries.items() if name not in nested}
    if nested and all(entry is None for entry in flat.values()):
        return nested
    if nested:
        raise ValueError("rope_parameters of config.json mix values for all layers with values by type of layer")
    return {"": flat}


def _type(entry: Mapping[str, Any]) -> str:
    kinds = {kind for name in ("rope_type", "type") if (kind := entry.get(name)) is not None}
    if kinds <= _UNSCALED:
        return "default"
    if len(kinds) > 1:
        raise ValueError(f"config.json contradicts itself: rope_type is {entry['rope_type']}, and type {entry['type']}")
    return str(kinds.pop())


def _number(entry: Mapping[str, Any], name: str) -> float | None:
    value = entry.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{name} in rope_parameters of config.json is not a number: {value!r}")
    return value


def _family(part: Mapping[str, Any]) -> str | None:
    family = part.get("model_type")
    return family if isinstance(family, str) else None


def _is_rope(module: object) -> bool:
    name = type(module).__name__.lower()
    return name.endswith(("rope", "rotaryembedding"))


def _differ(rope: Any, name: str, wanted: float) -> bool:
    found = getattr(rope, name, None)
    return found is not None and abs(found - wanted) > 1e-3


def _listed(values: set[Any]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))
