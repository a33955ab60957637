"""What a call over many tokens computes besides keys and values, launched so that little of it is there at a time.

What is launched takes its memory at once and gives it back when the device has computed what needs it, and MLX lets some ten
command buffers be under way (mlx/transforms.cpp, `eval_impl`). A prefill of 2,048 tokens took 2 to 11 GB so, by how far the
host was ahead of the device (docs/measurements.md). So it is launched a few layers at a time, two such parts at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from service.engine import device
from service.engine.strategy import current

PART = 2**29
"""Bytes that a part of a call computes, if a layer does not compute more."""
UNDER_WAY = 2
"""Parts that are launched at a time: the device computes one while the host describes the next."""
TIMES = 2.0
"""What a layer computes as a multiple of what its matrices give: norms, activations, rotated queries and sums are as much."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a model's calls compute. token: bytes a token, of all layers. call: bytes whatever the tokens: matrices that are
    quantised, at the precision of what they are multiplied with. layers: of the model."""

    token: int
    call: int
    layers: int

    @classmethod
    def of(cls, model: nn.Module) -> Work:
        """From the shapes of its matrices. The output head is not among them: a prefill does not need it."""
        layers = cast("list[nn.Module]", getattr(model, "layers", ()))
        outputs = copies = 0
        for module in (each for layer in layers for each in cast("list[Any]", layer.modules())):
            if (weight := module.get("weight")) is None or weight.ndim < 2:
                continue
            kind = module.get("scales", weight)
            outputs += weight.shape[-2] * kind.dtype.size
            if "scales" in module and weight.ndim == 2:
                copies += weight.shape[0] * weight.shape[1] * 32 // module.bits * kind.dtype.size
        return cls(int(TIMES * outputs), copies, len(layers))

    def parts(self, tokens: int) -> int:
        """Parts in which a call over so many tokens is launched: of a layer at least."""
        return max(min(-(-(self.call + tokens * self.token) // PART), self.layers), 1)

    def under_way(self, tokens: int) -> int:
        """Bytes that are there at a time, at most, of calls over so many tokens."""
        # A CPU computes what it is given before the host gives it more.
        parts = self.parts(tokens) if current().launch_ahead else max(self.layers, 1)
        return (self.call + tokens * self.token) * min(UNDER_WAY, parts) // parts

    def launch(self, arrays: Sequence[mx.array], tokens: int) -> None:
        """Launch what a call over so many tokens has appended to its cache. arrays: of its layers, in their order."""
        parts = self.parts(tokens)
        ends = [len(arrays) * (i + 1) // parts for i in range(parts)]
        launched = list[Sequence[mx.array]]()
        for begin, end in zip([0, *ends], ends, strict=False):
            if len(launched) >= UNDER_WAY:
                device.wait(launched[-UNDER_WAY])
            launched.append(arrays[begin:end])
            device.launch(launched[-1])

    def finish(self, arrays: Sequence[mx.array], tokens: int) -> None:
        """The same, and wait for it."""
        self.launch(arrays, tokens)
        device.wait(arrays)
