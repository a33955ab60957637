"""What tests of the engine's ways on CUDA share."""

from __future__ import annotations

import mlx.core as mx
import pytest

from service.engine.attention import RowCall
from service.engine.kv.cache import RowLayer

NEEDS_CUDA = pytest.mark.skipif(mx.default_device().type == mx.cpu or mx.metal.is_available(), reason="needs CUDA")


def row_calls(monkeypatch: pytest.MonkeyPatch) -> list[RowCall | None]:
    """What layers answer to `row_call` from now on."""
    found: list[RowCall | None] = []
    row_call = RowLayer.row_call

    def noted(layer: RowLayer, keys: mx.array, values: mx.array, mask: object) -> RowCall | None:
        found.append(row_call(layer, keys, values, mask))
        return found[-1]

    monkeypatch.setattr(RowLayer, "row_call", noted)
    return found
