"""Limits the memory of activations: what a model's call computes in addition to keys and values.

Launched work allocates its memory at once and frees it when the device has finished with it, and MLX allows about ten command
buffers in flight (mlx/transforms.cpp, `eval_impl`). A prefill of 2,048 tokens therefore took 2 to 11 GB, depending on how far
the host was ahead of the device (docs/results/memory.md). Calls are now launched a few layers at a time, with at most two such
parts in flight (`Strategy.part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from service.engine import device
from service.engine.strategy import current

AT_A_TIME = 2
"""Parts in flight: the device computes one while the host builds the next."""
TIMES = 2.0
"""Activations of a layer as a multiple of its matrices' outputs. Norms, activation functions, rotated queries and sums take as
much again."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
"""The names that mlx-lm's models use for the number of experts per token."""


@dataclass(slots=True)
class Activations:
    """The activation memory of a model.

    token: bytes per token, over all layers. layers: parts in which a call can be launched. copies: bytes of all layers'
    quantised matrices, except experts', at the precision of their inputs. held: bytes per token that stay until the whole call
    is computed: the inputs of recurrent layers, which are recorded (`recurrent`). states: bytes per token of one layer's
    recurrent states. Without a kernel they are computed one after another, and all are held until the layer's output is
    computed.
    """

    token: int
    layers: int
    copies: int = 0
    held: int = 0
    states: int = 0
    unwaited: int = 0
    """Bytes of calls that were launched and not waited for."""

    @classmethod
    def of(cls, model: nn.Module) -> Activations:
        """Computed from the shapes of a model's matrices, without the output head, which a prefill does not need."""
        layers = cast("list[nn.Module]", getattr(model, "layers", ()))
        chosen = _chosen(model)
        outputs = copies = size = 0
        for module in (each for layer in layers for each in cast("list[Any]", layer.modules())):
            if (weight := module.get("weight")) is None or weight.ndim < 2:
                continue
            # Some quantised matrices have 8-bit scales.
            size = max(module.get("scales", weight).dtype.size, 2)
            outputs += _outputs(module, weight, chosen) * size
            if "scales" in module and weight.ndim == 2:
                copies += weight.size * 32 // module.bits * size
        recurrent = _recurrent_layers(model) if layers else 0
        held = recurrent * argument(model, ("hidden_size", "d_model", "dim")) * size
        if not recurrent or not current().paged:
            return cls(int(TIMES * outputs), len(layers), copies, held, _state_bytes(model) if recurrent else 0)
        # With pages, recurrent states are not in layer order. Such a call is one part, which holds no more copies at a time.
        return cls(int(TIMES * outputs), 1, copies * min(AT_A_TIME, len(layers)) // len(layers), held)

    def call(self, tokens: int) -> int:
        """Bytes that a call over this many tokens computes, over all layers."""
        limit = current().most_uncopied
        return tokens * self.token + (self.copies if limit is not None and tokens > limit else 0)

    def parts(self, tokens: int) -> int:
        """Parts in which a call over this many tokens is launched, of at least one layer each."""
        return max(min(-(-self.call(tokens) // current().part), self.layers), 1)

    def peak_bytes(self, tokens: int) -> int:
        """Approximate peak bytes of calls over this many tokens."""
        # On a CPU, the device is not far behind the host.
        parts = self.parts(tokens) if current().launch_ahead else max(self.layers, 1)
        states = 0 if current().launch_ahead else tokens * self.states
        return self.call(tokens) * min(AT_A_TIME, parts) // parts + tokens * self.held + states

    def evaluate(self, arrays: Sequence[mx.array], tokens: int, *, wait: bool = True) -> bool:
        """Evaluate what a call over this many tokens has appended to its cache. arrays: of its layers, in order. wait: until it
        is computed; otherwise it may still be in flight. Returns whether it is computed."""
        size = self.call(tokens)
        if not wait and self.unwaited + size <= current().part:
            self.unwaited += size
            device.launch(arrays)
            return False
        parts = max(min(self.parts(tokens), len(arrays)), 1)
        ends = [len(arrays) * (i + 1) // parts for i in range(parts)]
        launched = list[Sequence[mx.array]]()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            if len(launched) >= AT_A_TIME:
                device.wait(launched[-AT_A_TIME])
            launched.append(arrays[begin:end])
            if parts > 1:
                device.launch(launched[-1])
        # A small call gets here when the calls not waited for already amount to a part.
        computed = wait or parts == 1
        if computed:
            device.wait(arrays)
        self.unwaited = 0 if computed else current().part
        return computed


def _outputs(module: Any, weight: mx.array, chosen: int) -> int:
    """Outputs of a matrix per token."""
    if isinstance(module, nn.Conv1d):
        return weight.shape[0]
    if weight.ndim == 3:
        return weight.shape[-2] * (chosen if hasattr(module, "num_experts") else weight.shape[0])
    return weight.shape[-2]


def _chosen(model: nn.Module) -> int:
    """Experts per token."""
    return argument(model, CHOSEN) or 1


def argument(model: nn.Module, names: Sequence[str]) -> int:
    """The first of these numbers found in a model's arguments; 0 if there is none."""
    for part in (getattr(model, "args", None), getattr(getattr(model, "args", None), "text_config", None)):
        for name in names:
            found = part.get(name) if isinstance(part, dict) else getattr(part, name, None)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if isinstance(found, int):
                return found
    return 0


def _recurrent_layers(model: nn.Module) -> int:
    return sum(bool(_states(cache)) for cache in make_prompt_cache(model))


def _state_bytes(model: nn.Module) -> int:
    """Bytes of the largest recurrent state of a layer for one row, from shapes only."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    states = [part for cache in caches for part in _states(cache)]
    return max(max((array.nbytes for array in state.cache if array is not None), default=0) for state in states)


def _states(cache: object) -> list[ArraysCache]:
    """The recurrent states in a layer's cache."""
    parts = cache.caches if isinstance(cache, CacheList) else (cache,)
    return [part for part in parts if isinstance(part, ArraysCache)]
