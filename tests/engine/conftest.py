"""The models of tests that need any target, and a draft that is mostly right; costs that no clock changes."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model

from service.engine.costs import Load, RoundCosts
from service.engine.kv.groups import Groups
from service.engine.replay import Replay
from tests.support.oracle import noisy_copy, tiny_llama


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny_llama(0)


@pytest.fixture(scope="module")
def draft(target: Model) -> nn.Module:
    return noisy_copy(target, 1, 0.1)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The replay of every call that is traced from now on."""
    traced: list[Replay] = []
    new_trace = Replay._new_trace

    def recorded(self: Replay, groups: Groups, written: Sequence[int]) -> Callable[..., Any]:
        traced.append(self)
        return new_trace(self, groups, written)

    monkeypatch.setattr(Replay, "_new_trace", recorded)
    return traced


@pytest.fixture
def exact_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round takes what is expected of it, whatever else this machine does."""
    learn = RoundCosts.observe

    def exact(costs: RoundCosts, load: Load, drafted: int, proposed: int, seconds: float | None) -> None:
        learn(costs, load, drafted, proposed, None if seconds is None else costs.seconds(load, drafted, proposed))

    monkeypatch.setattr(RoundCosts, "observe", exact)
