"""A draft's body from the target's own: keep some of its layers, share its embeddings."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from service.core import ModelError
from service.models.pair import Loaded

_LAYER = re.compile(r"^(?P<head>.*\blayers\.)(?P<index>\d+)(?P<tail>\..*)$")


def prune(target: Loaded, layers: Sequence[int], folder: Path) -> list[int]:
    """Write a model folder that keeps `layers` of the target (indices, negative ones from the end), everything else unchanged.

    Returns them counted from the first. Raises ModelError when an index is out of range or the family does not keep its
    layers in one list.
    """
    depth = target.config.get("num_hidden_layers")
    if not isinstance(depth, int) or len(cast("list[object]", target.model.layers)) != depth:
        raise ModelError(f"cannot prune {target.folder.name}: its layers are not one list of num_hidden_layers")
    kept = counted(layers, depth)
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = {}
    for name, array in cast("list[tuple[str, mx.array]]", tree_flatten(target.model.parameters())):
        match = _LAYER.match(name)
        if match is None:
            weights[name] = array
        elif int(match["index"]) in kept:
            weights[f"{match['head']}{kept.index(int(match['index']))}{match['tail']}"] = array
    save(weights, pruned_config(target.config, kept, depth), target.folder, folder)
    return kept


def counted(layers: Sequence[int], depth: int) -> list[int]:
    """Indices into `depth` layers, negative ones from the end, as counted from the first. Raises ModelError."""
    found = [index + depth if index < 0 else index for index in layers]
    if not found or sorted(set(found)) != found or found[0] < 0 or found[-1] >= depth:
        raise ModelError(f"--layers must name layers 0..{depth - 1} in ascending order, each once: got {list(layers)}")
    return found


def pruned_config(config: Mapping[str, Any], kept: Sequence[int], depth: int) -> dict[str, Any]:
    """config.json of the pruned model: the layer count, and every per-layer list (such as layer_types) narrowed to match."""
    return {
        name: [value[i] for i in kept] if isinstance(value, list) and len(value) == depth else value
        for name, value in config.items()
    } | {"num_hidden_layers": len(kept)}


def save(weights: Mapping[str, mx.array], config: Mapping[str, Any], source: Path, folder: Path) -> None:
    """A standard folder: weights, config.json, and the tokenizer's files of `source`."""
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    skip = {"config.json", "redraft.json", "model.safetensors.index.json"}
    for file in source.iterdir():
        if file.is_file() and file.suffix in {".json", ".jinja", ".model", ".txt"} and file.name not in skip:
            shutil.copyfile(file, folder / file.name)
