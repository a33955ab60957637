"""What the server itself says of times to first tokens, for scripts that compare a tool's figure with it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from typing import Any

SHARE, BETWEEN = 0.05, 0.05
"""How far a tool's mean may be from the server's own: by this share of it, and by the seconds that a busy machine takes to
bring a request in and a chunk out."""
SAMPLE = re.compile(r"^redraft:time_to_first_token_seconds_(sum|count)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class FirstTokens:
    """Mean time to the first token of the requests since it was made."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.before = self.read()

    def read(self) -> tuple[float, float]:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            found = dict(SAMPLE.findall(answer.read().decode()))
        return float(found.get("sum", 0)), float(found.get("count", 0))

    def check(self, measured: float, count: int) -> None:
        """measured: the tool's mean, in seconds, of so many requests."""
        total, served = (now - then for now, then in zip(self.read(), self.before, strict=True))
        assert served == count, (served, count)
        own = total / served
        said = f"time to first token: {measured * 1000:.1f} ms measured, {own * 1000:.1f} ms served"
        assert abs(measured - own) <= SHARE * own + BETWEEN, said
        print(said)


def check_speculation(stats: Mapping[str, Any]) -> None:
    """That one answer's `metrics.speculative_decoding` agrees with itself, as AIPerf requires."""
    histogram = stats["acceptance_histogram"]
    assert sum(histogram) == stats["num_spec_steps"] > 0, stats
    assert sum(j * count for j, count in enumerate(histogram)) == stats["num_accepted_draft_tokens"], stats
    assert stats["num_accepted_draft_tokens"] <= stats["num_draft_tokens"], stats
    assert (
        abs(stats["mean_acceptance_length"] - 1 - stats["num_accepted_draft_tokens"] / stats["num_spec_steps"]) < 1e-9
    )
