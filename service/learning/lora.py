"""LoRA on a draft (Hu et al., arXiv 2106.09685), in mlx-lm's own layers and folder format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers, remove_lora_layers
from mlx_lm.utils import get_total_parameters

from service.core import BARE_DRAFT, TrainingFailed
from service.models.arrays import named_arrays

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
_LEAVES = frozenset({"lora_a", "lora_b"})
_NOT_ADAPTED = frozenset({"altup", "indexer"})
"""Parts of a block whose linear layers get no LoRA. mlx-lm reads the weights of gemma3n's AltUp directly, which a LoRA
layer does not have; the indexer of DeepSeek V3.2 and GLM selects positions and has no gradient."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The configuration of an adapter. scale: factor of the low-rank product. keys: names of the adapted linear layers
    inside a block. layers: number of adapted blocks, counted from the last."""

    rank: int
    scale: float
    keys: tuple[str, ...]
    layers: int

    def parameters(self) -> dict[str, Any]:
        """mlx-lm's `lora_parameters` in adapter_config.json."""
        return {"rank": self.rank, "scale": self.scale, "dropout": 0.0, "keys": list(self.keys)}


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of parameters of a wrapped model."""

    trainable: int
    frozen: int


def wrap(model: nn.Module, *, rank: int, scale: float, seed: int) -> Shape:
    """Freezes the model, then adds LoRA to every trainable linear layer of its blocks (not to embeddings and head).
    Returns the shape.

    A is drawn from `seed` and B is 0, so the model's output does not change. Quantised layers stay quantised (QLoRA,
    arXiv 2305.14314). Raises TrainingFailed when the blocks have no linear layer.
    """
    blocks = cast("list[nn.Module]", model.layers)
    linear = (nn.Linear, nn.QuantizedLinear)
    keys = {
        name
        for block in blocks
        for name, module in block.named_modules()
        if isinstance(module, linear) and _NOT_ADAPTED.isdisjoint(name.split("."))
    }
    if not keys:
        raise TrainingFailed("this draft's blocks have no linear layer to adapt")
    shape = Shape(rank, scale, tuple(sorted(keys)), len(blocks))
    model.freeze()
    mx.random.seed(seed)
    linear_to_lora_layers(model, shape.layers, shape.parameters())
    mx.eval(model.trainable_parameters())
    return shape


def counts(model: nn.Module) -> Counts:
    """Trainable and frozen parameters of a wrapped model."""
    trainable = sum(array.size for _, array in named_arrays(model.trainable_parameters()))
    # mlx-lm only counts parameters of leaf modules (for packed 4-bit weights the unpacked number), which excludes
    # LoRA's.
    return Counts(trainable, int(get_total_parameters(model)))


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    """The LoRA matrices of a wrapped model, by name."""
    return {name: array for name, array in named_arrays(model.parameters()) if name.rsplit(".", 1)[-1] in _LEAVES}


def warm_start(model: nn.Module, shape: Shape, parent: Path, draft: str) -> None:
    """Loads a parent adapter into a freshly wrapped model, which then computes the same as the parent.

    A parent of lower rank fills the first columns of A and rows of B; the rest stays random in A and zero in B. B is
    rescaled if the parent's scale differs. draft: fingerprint of the base draft. Raises TrainingFailed when the parent
    is damaged, belongs to another draft, adapts other layers, or has a higher rank.
    """
    config, weights = read(parent, draft)
    if config.keys != shape.keys or config.layers != shape.layers:
        raise TrainingFailed(f"{parent.name} adapts other layers than this run: train from the base draft instead")
    if config.rank > shape.rank:
        raise TrainingFailed(
            f"{parent.name} has rank {config.rank}, above the requested {shape.rank}: "
            "raise training.rank, or train from the base draft"
        )
    fresh = dict(named_arrays(model.trainable_parameters()))
    _match(parent, weights, {name: _narrowed(name, array, config.rank) for name, array in fresh.items()})
    for name, array in weights.items():
        array = array.astype(fresh[name].dtype)
        if name.endswith("lora_a"):
            weights[name] = mx.concatenate([array, fresh[name][:, config.rank :]], axis=1)
        else:
            scaled = array * (config.scale / shape.scale)
            weights[name] = mx.concatenate([scaled, fresh[name][config.rank :]], axis=0)
    model.load_weights(list(weights.items()), strict=False)
    mx.eval(model.trainable_parameters())


def save(
    model: nn.Module,
    shape: Shape,
    folder: Path,
    *,
    draft: str,
    target: str,
    run: int | None = None,
    parent: int = BARE_DRAFT,
) -> None:
    """Writes an adapter folder that mlx-lm can load.

    draft, target: fingerprints of the models it was trained for. run, parent: the training run that made it, and the
    adapter it was trained on. All of these are stored in the metadata of the weights file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    origin = {"draft": draft, "target": target, "rank": shape.rank, "run": run, "parent": parent}
    metadata = {f"redraft.{name}": str(value) for name, value in origin.items() if value is not None}
    mx.save_safetensors(str(folder / WEIGHTS), weights_of(model), metadata={"format": "mlx", **metadata})
    config = {
        "fine_tune_type": "lora",
        "num_layers": shape.layers,
        "lora_parameters": shape.parameters(),
        "redraft": {"draft": draft, "target": target},
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read(folder: Path, draft: str) -> tuple[Shape, dict[str, mx.array]]:
    """Shape and weights of an adapter folder. draft: fingerprint of the base draft. Raises TrainingFailed when the
    folder cannot be read or belongs to another draft."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        lora = config["lora_parameters"]
        shape = Shape(int(lora["rank"]), float(lora["scale"]), tuple(sorted(lora["keys"])), int(config["num_layers"]))
        belongs = config["redraft"]["draft"] == draft
        weights = cast("dict[str, mx.array]", mx.load(os.fspath(folder / WEIGHTS)))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise TrainingFailed(f"the adapter {folder.name} cannot be read: {error}") from error
    if not belongs:
        raise TrainingFailed(f"the adapter {folder.name} was trained on another draft")
    return shape, weights


def attach(model: nn.Module, folder: Path, draft: str) -> None:
    """Adds an adapter to a bare model without merging it. draft: fingerprint of the base draft. Raises TrainingFailed
    when the adapter is damaged or does not fit the model."""
    shape, weights = read(folder, draft)
    linear_to_lora_layers(model, shape.layers, shape.parameters())
    _match(folder, weights, {name: array.shape for name, array in weights_of(model).items()})
    model.load_weights(list(weights.items()), strict=False)
    model.eval()


def detach(model: nn.Module) -> None:
    """Removes an adapter's layers, which restores the base draft."""
    if any(isinstance(module, LoRALinear) for _, module in model.named_modules()):
        remove_lora_layers(model)


def _narrowed(name: str, array: mx.array, rank: int) -> tuple[int, ...]:
    return (array.shape[0], rank) if name.endswith("lora_a") else (rank, array.shape[1])


def _match(folder: Path, weights: Mapping[str, mx.array], shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = {name: tuple(array.shape) for name, array in weights.items()}
    if found != {name: tuple(shape) for name, shape in shapes.items()}:
        raise TrainingFailed(f"the adapter {folder.name} does not have the tensors of this draft")
    for name, array in weights.items():
        if not mx.isfinite(array.astype(mx.float32)).all().item():
            raise TrainingFailed(f"the adapter {folder.name} contains values that are not finite: {name}")
