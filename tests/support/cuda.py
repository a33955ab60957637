"""What tests of the engine's ways on CUDA share."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from service.engine.attention import RowCall
from service.engine.kv.paged_layer import PagedLayer
from service.engine.strategy import CPU

NEEDS_CUDA = pytest.mark.skipif(mx.default_device().type == mx.cpu or mx.metal.is_available(), reason="needs CUDA")
IN_PAGES = replace(CPU, paged=True)
"""A CPU's way but for pages: no round is under way between two others, so that a test sees what rows hold."""


def row_calls(monkeypatch: pytest.MonkeyPatch) -> list[RowCall | None]:
    """What layers answer to `row_call` from now on."""
    found: list[RowCall | None] = []
    row_call = PagedLayer.row_call

    def noted(layer: PagedLayer, keys: mx.array, values: mx.array, mask: object) -> RowCall | None:
        found.append(row_call(layer, keys, values, mask))
        return found[-1]

    monkeypatch.setattr(PagedLayer, "row_call", noted)
    return found
