"""A model's sampling defaults, from the generation_config.json in its folder."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from service.core import Sampling

log = logging.getLogger(__name__)

BOUNDS = {
    "temperature": (0.0, 10.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-2, 10.0),
}
GREEDY_TOO = ("repetition_penalty",)
"""Settings that still apply if the file has `do_sample: false`."""


def sampling_defaults(folder: Path) -> Sampling:
    """A model's sampling defaults for requests that set nothing. Greedy if the file is missing or cannot be read, or if it has
    `do_sample: false`; in that case its repetition penalty still applies. Values out of bounds are ignored with a warning."""
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Sampling()
    if not isinstance(config, dict):
        return Sampling()
    if config.get("do_sample") is False:
        config = {name: config[name] for name in GREEDY_TOO if name in config}
    # Without a temperature, a sampled model gets Hugging Face's default.
    found: dict[str, float] = {"temperature": 1.0} if config.get("do_sample") else {}
    for name, (low, high) in BOUNDS.items():
        value = config.get(name)
        if value is None:
            continue
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and low <= value <= high
            and math.isfinite(value)
        ):
            found[name] = value
        else:
            log.warning("generation_config.json: ignoring %s, which is out of bounds", name)
    if found.get("top_p") == 0:
        del found["top_p"]
    return Sampling(
        temperature=found.get("temperature", 0.0),
        top_p=found.get("top_p", 1.0),
        top_k=int(found.get("top_k", 0)),
        min_p=found.get("min_p", 0.0),
        repetition_penalty=found.get("repetition_penalty", 1.0),
    )
