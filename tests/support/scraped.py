"""What /metrics says."""

from __future__ import annotations

import re


def scraped(text: str) -> dict[str, float]:
    """Samples in Prometheus' text format, by name and labels but for the model's name: `name` or `name{label="value"}`."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            found[re.sub(r'model_name="[^"]*",|,?model_name="[^"]*"', "", sample).removesuffix("{}")] = float(value)
    return found
