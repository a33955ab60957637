"""Adapters for mlx-lm: a copy of the folder, or a whole draft model with the adapter folded in."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx.utils import tree_flatten

from service.core import AdapterRef, AdapterRefused, BadRequest
from service.learning.prune import save
from service.models.fingerprint import is_unaltered
from service.models.pair import load_model


def export_adapter(ref: AdapterRef, folder: Path) -> None:
    """Copy an adapter's folder, which is in mlx-lm's own format already. Raises AdapterRefused when it was altered."""
    _fresh(folder)
    _unaltered(ref)
    shutil.copytree(ref.folder, folder)


def export_fused(ref: AdapterRef, draft: Path, folder: Path) -> None:
    """Write the draft with the adapter folded into its weights, as a standard model folder. Where a quantised draft serves,
    folded layers are not quantised; here they are again, which costs some of what was learnt: a small change is rounded away.
    Raises AdapterRefused when the adapter was altered or belongs to another draft."""
    from mlx.utils import tree_unflatten
    from mlx_lm.tuner.lora import LoRALinear
    from mlx_lm.tuner.utils import load_adapters

    from service.engine.adapters import read_config, read_header

    _fresh(folder)
    _unaltered(ref)
    loaded = load_model(draft)
    read_config(ref, loaded.fingerprint)
    read_header(ref.folder / "adapters.safetensors")
    model = load_adapters(loaded.model, str(ref.folder))
    fused = [(name, module.fuse()) for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    model.update_modules(tree_unflatten(fused))
    folder.mkdir(parents=True)
    save(dict(tree_flatten(model.parameters())), loaded.config, draft, folder)


def _unaltered(ref: AdapterRef) -> None:
    if not is_unaltered(ref.folder, ref.sha256):
        raise AdapterRefused(f"adapter {ref.id}: its files are gone or not the ones that were registered")


def _fresh(folder: Path) -> None:
    if folder.exists():
        raise BadRequest(f"{folder} exists already", field="folder")
