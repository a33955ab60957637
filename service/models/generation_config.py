"""A model's own sampling defaults, from the generation_config.json in its folder."""

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
"""What counts where the file says `do_sample: false`."""


def sampling_defaults(folder: Path) -> Sampling:
    """How a model wants to be sampled where a request says nothing: greedy where its file is missing, cannot be read, or says
    `do_sample: false`, then too with its repetition penalty. Values out of bounds are left out, with a warning."""
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Sampling()
    if not isinstance(config, dict):
        return Sampling()
    if config.get("do_sample") is False:
        config = {name: config[name] for name in GREEDY_TOO if name in config}
    # Without a temperature, a model that is to be sampled has Hugging Face's default.
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
            log.warning("generation_config.json: %s is out of bounds and left out", name)
    if found.get("top_p") == 0:
        del found["top_p"]
    return Sampling(
        temperature=found.get("temperature", 0.0),
        top_p=found.get("top_p", 1.0),
        top_k=int(found.get("top_k", 0)),
        min_p=found.get("min_p", 0.0),
        repetition_penalty=found.get("repetition_penalty", 1.0),
    )
