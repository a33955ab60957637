"""Drafts that ship with the package: their layers, to be combined with the embeddings of the target they were made for."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from service.core import ModelError

CONFIG, LAYERS, GENERAL, OPENINGS = "config.json", "layers.safetensors", "general.npz", "openings.txt"
"""`layers.safetensors` holds every weight except the embeddings; `general.npz` the replay set; `openings.txt` the openings of
user turns in the training text (the last two are not part of the model). The vocabulary is optional."""

VOCABULARY = "vocabulary.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SHARED = ("model.embed_tokens.", "lm_head.")
"""Names of the weights that come from the target."""


def present(source: Path) -> bool:
    """Whether `source` holds a shipped draft: its config and its layers."""
    return (source / CONFIG).is_file() and (source / LAYERS).is_file()


def digest(source: Path) -> str:
    """Hex sha256 of the shipped files that make up the model."""
    files = [source / name for name in (CONFIG, LAYERS, VOCABULARY)]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def extract(folder: Path, package: Path) -> None:
    """Write the shipped files of a draft to the existing folder `package`: its config, its vocabulary, and all weights except
    the shared ones, in bfloat16. Uses MLX."""
    import mlx.core as mx

    weights: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # pyright: ignore[reportAssignmentType]
    layers = {name: value.astype(mx.bfloat16) for name, value in weights.items() if not name.startswith(_SHARED)}
    mx.save_safetensors(str(package / LAYERS), layers, metadata={"format": "mlx"})
    for name in (CONFIG, VOCABULARY):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, package / name)


def assemble(source: Path, target: Path, folder: Path) -> None:
    """Write the draft to the existing `folder` as a model that mlx-lm loads: shipped layers, and the target's embeddings and
    tokenizer.

    Layers are cast to the embeddings' dtype, so that a step computes in one dtype. Uses MLX. Raises ModelError.
    """
    import mlx.core as mx

    layers: dict[str, mx.array] = mx.load(str(source / LAYERS))  # pyright: ignore[reportAssignmentType]
    shared: dict[str, mx.array] = {}
    for path in sorted(target.glob("model*.safetensors")):
        weights: dict[str, mx.array] = mx.load(str(path))  # pyright: ignore[reportAssignmentType]
        shared |= {name: value for name, value in weights.items() if name.startswith(_SHARED)}
    embedding = shared.get("model.embed_tokens.weight")
    if embedding is None:
        raise ModelError(f"{target} holds no model.embed_tokens.weight to share with the draft")
    if overlap := sorted(shared.keys() & layers.keys()):
        raise ModelError(f"{source / LAYERS} holds {overlap[0]}, which must come from the target")
    if mx.issubdtype(embedding.dtype, mx.floating):
        layers = {name: value.astype(embedding.dtype, stream=mx.cpu) for name, value in layers.items()}
    for name in (CONFIG, VOCABULARY):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)
    mx.save_safetensors(str(folder / "model.safetensors"), layers | shared, metadata={"format": "mlx"})
