"""Verdicts as JSON columns."""

from __future__ import annotations

import json
from dataclasses import asdict

from service.core import Verdict


def to_json(verdict: Verdict) -> str:
    """A verdict as the JSON of its column."""
    return json.dumps(asdict(verdict))


def from_json(stored: str) -> Verdict:
    """A verdict from the JSON that `to_json` wrote."""
    item = json.loads(stored)
    domains = {name: (float(a), float(b), float(c)) for name, (a, b, c) in item.pop("domains").items()}
    return Verdict(**item | {"domains": domains, "measured_on": tuple(item.get("measured_on", ()))})
