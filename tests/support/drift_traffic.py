"""Generations for the drift detector, with a given acceptance rate."""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from service.core import BARE_DRAFT, Generation, Round
from service.lifecycle.drift import BASELINE
from tests.support.lifecycle_server import Server, generation


def unique_name() -> str:
    return os.urandom(8).hex()


def drafted(
    accepted: float,
    adapter: int = BARE_DRAFT,
    *,
    cases: int = 0,
    ago: float = 0.0,
    name: Callable[[], str] = unique_name,
) -> Generation:
    """20 rounds that propose 4 tokens. A share `accepted` of the rounds accepts all of them, the others none."""
    whole = round(20 * accepted)
    rounds = tuple(Round(adapter, 5 * i, 4, 4 if i < whole else 0, 5) for i in range(20))
    made = replace(generation(name(), cases=cases), rounds=rounds)
    return replace(made, created_at=datetime.now(UTC) - timedelta(seconds=ago))


def record(server: Server, *made: Generation) -> None:
    server.generations.add(list(made)).result(60)


def usual(adapter: int = BARE_DRAFT, name: Callable[[], str] = unique_name) -> list[Generation]:
    return [drafted(0.65 + 0.1 * (-1) ** i, adapter, name=name) for i in range(BASELINE)]
