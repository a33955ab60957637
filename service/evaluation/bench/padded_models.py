"""Models of larger shapes, made by padding every matrix of a small Llama, or of an EAGLE-3 head of one, with zeros.

A padded model has the outputs of the small one at the cost of a large one, so that a benchmark has the acceptance of a real
pair at the speed of a large target. Added hidden units, heads and feed-forward units are zero; added layers write nothing to
the residual stream. RMSNorm takes its mean over more units: weights and eps are scaled for that.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from service.core import BadRequest, ModelError
from service.evaluation.progress import OnProgress, silent
from service.models.fingerprint import model_fingerprint
from service.models.rope import with_rope_keys
from service.models.vocabulary import FILE as VOCABULARY

Weights = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a padded target. A padded draft has the same, with its own number of layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int


SHAPES = {
    "135m": Shape(hidden=576, layers=30, heads=9, kv_heads=3, feed_forward=1536),
    "1b": Shape(hidden=1728, layers=30, heads=27, kv_heads=9, feed_forward=5120),
    "3b": Shape(hidden=3072, layers=30, heads=48, kv_heads=16, feed_forward=8192),
    "8b": Shape(hidden=4608, layers=32, heads=72, kv_heads=24, feed_forward=12288),
    "70b": Shape(hidden=8064, layers=80, heads=126, kv_heads=42, feed_forward=28672),
}
"""135 million parameters (the bundled pair, in bfloat16), 1.1, 3.5, 7.5 and 70 billion."""
GROUP = 64
"""Weights that share a scale when quantised."""


def shape_named(name: str) -> Shape:
    """One of SHAPES. Raises BadRequest."""
    if name not in SHAPES:
        raise BadRequest(f"no shape {name!r}: choose among {', '.join(SHAPES)}", field="shape")
    return SHAPES[name]


def padded_pair(
    pair: tuple[Path, Path], home: Path, name: str, bits: int | None = None, on_progress: OnProgress = silent
) -> tuple[Path, Path]:
    """Folders, under home/models, of a target and a draft of this shape, in bfloat16 or with `bits` per weight; made where
    they are missing. pair: folders of the models to pad. name: one of SHAPES. Raises BadRequest, ModelError."""
    shape, folders = shape_named(name), list[Path]()
    for i, source in enumerate(pair):
        parts = [source.name, name, *([f"{bits}bit"] if bits else []), model_fingerprint(source)[:8]]
        folder = home / "models" / "-".join(parts)
        if not (folder / "config.json").is_file():
            on_progress(f"making {folder.name}", i, len(pair))
            pad(source, folder, shape, deeper=i == 0, bits=bits)
        folders.append(folder)
    return folders[0], folders[1]


def pad(source: Path, folder: Path, shape: Shape, *, deeper: bool, bits: int | None = None) -> None:
    """Write a model of this shape with the outputs of the one in `source`. deeper: with the shape's number of layers, not the
    source's own. Raises ModelError for a source that is no Llama, is quantised, or does not fit."""
    try:
        config = with_rope_keys(json.loads((source / "config.json").read_text()))
    except ValueError as error:
        raise ModelError(f"{source} cannot be padded: {error}") from error
    if config.get("model_type") != "llama" or "quantization" in config:
        raise ModelError(f"{source} cannot be padded: it is no Llama, or quantised")
    small = Shape(
        config["hidden_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["intermediate_size"],
    )
    fits = all(of <= to for of, to in zip(astuple(small), astuple(shape), strict=True))
    if not fits or shape.heads * small.kv_heads != shape.kv_heads * small.heads:
        raise ModelError(f"{source} cannot be padded: its sizes do not fit into {shape}")
    layers = shape.layers if deeper else small.layers
    dims = config.get("head_dim") or small.hidden // small.heads
    made = _padded(_read_weights(source), small, shape, layers, dims)
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": layers,
        "head_dim": dims,
        "rms_norm_eps": config["rms_norm_eps"] * small.hidden / shape.hidden,
    }
    config.pop("redraft", None)
    if bits:
        made = _quantised(made, bits)
        config["quantization"] = {"group_size": GROUP, "bits": bits}
    _write(source, folder, made, config)


def _read_weights(source: Path) -> Weights:
    weights: Weights = {}
    for path in source.glob("model*.safetensors"):
        weights |= mx.load(str(path))  # pyright: ignore[reportArgumentType, reportCallIssue, reportOperatorIssue]
    return weights


def _write(source: Path, folder: Path, weights: Weights, config: dict[str, Any]) -> None:
    """Weights, configuration, and the other files of the source (tokenizer, vocabulary)."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    if (source / VOCABULARY).is_file():
        shutil.copyfile(source / VOCABULARY, folder / VOCABULARY)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    # Written last: a folder with a config.json is complete.
    (folder / "config.json").write_text(json.dumps(config))


def _padded(weights: Weights, small: Shape, shape: Shape, layers: int, dims: int) -> Weights:
    def widened(array: mx.array, *wanted: int) -> mx.array:
        return mx.pad(array, [(0, to - of) for to, of in zip(wanted, array.shape, strict=True)]).astype(mx.bfloat16)

    def norm(array: mx.array) -> mx.array:
        return widened(array.astype(mx.float32) * (small.hidden / shape.hidden) ** 0.5, shape.hidden)

    queries, keys = shape.heads * dims, shape.kv_heads * dims
    matrices = {
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "mlp.gate_proj": (shape.feed_forward, shape.hidden),
        "mlp.up_proj": (shape.feed_forward, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.feed_forward),
    }

    def joined(array: mx.array) -> mx.array:
        # (hidden, parts x hidden): reads parts that were divided by their root mean square, which is smaller over more units.
        rows, columns = array.shape
        parts = array.astype(mx.float32).reshape(rows, columns // small.hidden, small.hidden)
        wide = widened(parts * (small.hidden / shape.hidden) ** 0.5, shape.hidden, parts.shape[1], shape.hidden)
        return wide.reshape(shape.hidden, -1)

    made = {"model.norm.weight": norm(weights["model.norm.weight"])}
    made |= {
        name: joined(weights[name]) for name in ("project.weight", "model.layers.0.fuse.weight") if name in weights
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            made[name] = widened(weights[name], len(weights[name]), shape.hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, wanted in matrices.items():
            key = f"{prefix}.{name}.weight"
            made[key] = widened(weights[key], *wanted) if layer < small.layers else mx.zeros(wanted, mx.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            key = f"{prefix}.{name}.weight"
            made[key] = norm(weights[key]) if layer < small.layers else mx.ones((shape.hidden,), mx.bfloat16)
    return made


def _quantised(weights: Weights, bits: int) -> Weights:
    made: Weights = {}
    for name in list(weights):
        # One by one: all of them in bfloat16 may not fit into memory.
        array = weights.pop(name)
        if array.ndim == 2:
            packed, scales, biases = mx.quantize(array, group_size=GROUP, bits=bits)
            mx.eval(packed, scales, biases)
            base = name.removesuffix("weight")
            made |= {name: packed, f"{base}scales": scales, f"{base}biases": biases}
        else:
            made[name] = array
    return made
