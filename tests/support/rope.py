"""What mlx-lm makes of `rope_parameters` in every family, found by building tiny models: the table in docs/pairs.md.

`uv run python -m tests.support.rope` prints it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from service.models.rope import check_rope, with_rope_keys
from tests.support.families import IDENTICAL, METAL, RECURRENT, REFUSED, build, family_of


class Reading(StrEnum):
    """Where the base in `rope_parameters` takes effect."""

    ITSELF = "reads `rope_parameters` itself"
    LIFTED = "lifted by Redraft"
    REFUSED = "refused unless it is the base built in"
    NO_ROPE = "has no RoPE"


BASES = (5000.0, 300000.0)
LOCAL_BASE = 700.0
FAMILIES: dict[str, dict[str, Any]] = {
    family_of(name): needs
    for name, needs in reversed(
        [
            *IDENTICAL.items(),
            *RECURRENT.items(),
            *((name, needs) for name, (_, needs) in REFUSED.items()),
            *METAL.items(),
        ]
    )
}
"""Every family that can be built, with the first configuration listed for it."""
TWO_BASES = {"gear", "gemma3", "gemma3_text", "gemma3n", "mimo_v2_flash", "plamo3"}
"""Families that take another base in layers with a sliding window."""
OLD_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq")
OLD_KEYS_OF_SOME = ("rotary_emb_base", "rotary_pct", "swa_rope_theta", "rope_local_theta")
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16},
}


def rotates_a_part(family: str) -> bool:
    """Whether the family's code knows a partial rotary factor."""
    source = inspect.getsource(importlib.import_module(f"mlx_lm.models.{family}"))
    return "partial_rotary_factor" in source or "rotary_pct" in source or family.startswith(("qwen3_5", "prism"))


def new_spelling(family: str, base: float, kind: str | None = None) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes them. kind: of scaling; None: what the family needs to be built."""
    needs = FAMILIES[family]
    if "rope_parameters" in needs and kind is None:
        given = copy.deepcopy(needs["rope_parameters"])
        for entry in [each for each in given.values() if isinstance(each, dict)] or [given]:
            entry["rope_theta"] = base
        return given
    scaling = {"rope_type": kind, **SCALINGS[kind]} if kind else needs.get("rope_scaling") or {"rope_type": "default"}
    entry = scaling | {"rope_theta": base}
    if rotates_a_part(family):
        entry["partial_rotary_factor"] = needs.get("partial_rotary_factor", 0.5)
    if family == "gemma4" or family == "gemma4_text" or family in TWO_BASES:
        sliding = {"rope_type": "default", "rope_theta": LOCAL_BASE}
        sliding |= {k: entry[k] for k in ("partial_rotary_factor",) if k in entry}
        return {"full_attention": entry, "sliding_attention": sliding}
    return entry


def old_spelling(family: str, base: float) -> dict[str, Any]:
    """The keys of transformers 4 and mlx-lm for the same."""
    needs = FAMILIES[family]
    keys: dict[str, Any] = {"rope_theta": base, "rotary_emb_base": base, "rope_scaling": needs.get("rope_scaling")}
    keys |= dict.fromkeys(("rope_local_base_freq", "rope_local_theta", "swa_rope_theta"), LOCAL_BASE)
    if rotates_a_part(family):
        keys |= dict.fromkeys(("partial_rotary_factor", "rotary_pct"), needs.get("partial_rotary_factor", 0.5))
    return keys


def built(family: str, keys: Mapping[str, Any], *, lift: bool = False) -> Any:
    """A model with these keys for RoPE, at the top and in text_config. Raises what mlx-lm or the check raises."""

    def prepared(config: dict[str, Any]) -> dict[str, Any]:
        for part in (config, config["text_config"]):
            for name in (*OLD_KEYS, *OLD_KEYS_OF_SOME):
                part.pop(name, None)
            part.update(copy.deepcopy(dict(keys)))
        return with_rope_keys(config) if lift else config

    written: dict[str, Any] = {}

    def noted(config: dict[str, Any]) -> dict[str, Any]:
        config = prepared(config)
        written.update(config if not lift else {**config, "rope_parameters": keys.get("rope_parameters")})
        return config

    model = build(family, FAMILIES[family], noted)
    if lift:
        check_rope(model, written)
    return model


def computed(model: nn.Module, family: str) -> list[mx.array]:
    """What a model makes of some tokens; of one that does not run on this device, its RoPE's bases and scales."""
    if family in METAL and not mx.metal.is_available():
        return [mx.array([module.base, module.scale]) for module in model.modules() if isinstance(module, nn.RoPE)]
    call: Any = model
    return [call(mx.array([[5, 9, 13, 60, 2, 7, 41, 33]]), cache=make_prompt_cache(model))]


def same(left: list[mx.array], right: list[mx.array]) -> bool:
    close = (mx.allclose(a, b, rtol=1e-4, atol=1e-4).item() for a, b in zip(left, right, strict=True))
    return len(left) == len(right) and all(close)


def reads(family: str, keys: tuple[Mapping[str, Any], Mapping[str, Any]], *, lift: bool = False) -> bool:
    """Whether the base in these keys takes effect. False where mlx-lm cannot build the model from them. Raises ValueError where
    lifted keys are refused."""
    try:
        first, second = (computed(built(family, each, lift=lift), family) for each in keys)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if lift and isinstance(error, ValueError):
            raise
        return False
    return not same(first, second)


def reading(family: str) -> Reading:
    """What becomes of the base in `rope_parameters`."""
    old = tuple(old_spelling(family, base) for base in BASES)
    new = tuple({"rope_parameters": new_spelling(family, base)} for base in BASES)
    if reads(family, (new[0], new[1])):
        return Reading.ITSELF
    try:
        if reads(family, (new[0], new[1]), lift=True):
            return Reading.LIFTED
    except ValueError:
        return Reading.REFUSED
    assert not reads(family, (old[0], old[1])), f"{family} has a base that is not lifted"
    return Reading.NO_ROPE


def table() -> dict[Reading, list[str]]:
    found: dict[Reading, list[str]] = {each: [] for each in Reading}
    for family in sorted(FAMILIES, key=str.lower):
        found[reading(family)].append(family)
    return found


if __name__ == "__main__":
    for each, names in table().items():
        print(f"| {each} | {', '.join(f'`{name}`' for name in names)} |")
