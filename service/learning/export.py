"""Folders that mlx-lm can load: a model, an adapter, or a draft model with an adapter merged into its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from service.core import AdapterRef, AdapterRefused, AdapterState, BadRequest
from service.models.fingerprint import is_unaltered
from service.models.pair import load_model


def export_adapter(ref: AdapterRef, folder: Path) -> None:
    """Copies an adapter's folder, which is in mlx-lm's format, to the new folder `folder`. Raises AdapterRefused when
    the adapter's files were altered, BadRequest when `folder` exists."""
    _require_new(folder)
    _require_unaltered(ref)
    shutil.copytree(ref.folder, folder)


def export_fused(ref: AdapterRef, draft: Path, folder: Path) -> None:
    """Writes the draft with the adapter merged into its weights, as the new model folder `folder`.

    Merged layers of a quantised draft are quantised again, which rounds small changes away; the server does not
    requantise them. Raises AdapterRefused when the adapter was altered or belongs to another draft, BadRequest when
    `folder` exists.
    """
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.utils import load_adapters

    from service.engine.adapters import read_config, read_header

    _require_new(folder)
    _require_unaltered(ref)
    loaded = load_model(draft)
    read_config(ref, loaded.fingerprint)
    read_header(ref.folder / "adapters.safetensors")
    model = load_adapters(loaded.model, str(ref.folder))
    fused = [(name, module.fuse()) for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    model.update_modules(tree_unflatten(fused))
    folder.mkdir(parents=True)
    save_model_folder(dict(tree_flatten(model.parameters())), loaded.config, draft, folder)


def save_model_folder(weights: Mapping[str, mx.array], config: Mapping[str, Any], source: Path, folder: Path) -> None:
    """Writes weights, config.json and the tokenizer files of the model folder `source` into the existing `folder`."""
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    skip = {"config.json", "redraft.json", "model.safetensors.index.json"}
    for file in source.iterdir():
        if file.is_file() and file.suffix in {".json", ".jinja", ".model", ".txt"} and file.name not in skip:
            shutil.copyfile(file, folder / file.name)


def _require_unaltered(ref: AdapterRef) -> None:
    if ref.state is AdapterState.REVOKED:
        raise AdapterRefused(f"adapter {ref.id} is revoked: a text that it had learnt was erased")
    if not is_unaltered(ref.folder, ref.sha256):
        raise AdapterRefused(f"adapter {ref.id}: its files are missing or differ from the registered ones")


def _require_new(folder: Path) -> None:
    if folder.exists():
        raise BadRequest(f"{folder} already exists", field="folder")
