"""Adapter folders: written to a scratch folder, synced, renamed into place, and never modified again."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from service.core import StoreError
from service.models.fingerprint import folder_sha256, is_unaltered

ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")
UNFINISHED = {".part", ".partial"}
"""Suffixes of folders that are being written or removed."""
_NAME = re.compile(r"\.?run-\d+-\d+(\.part|\.partial)?")
"""Matches a run's folder (`folder_name`) at every stage. Everything else in the root belongs to the user."""


def publish(scratch: Path, final: Path) -> str:
    """Makes everything in `scratch` durable and renames it to its final name; returns the folder's sha256.

    After a crash at any time, either the complete folder exists under its final name or none. An existing folder with
    the same content is kept and `scratch` removed; raises StoreError if the content differs.
    """
    if final.exists():
        digest = folder_sha256(scratch)
        if not is_unaltered(final, digest):
            raise StoreError(f"{final.name} already exists: adapters are never overwritten")
        shutil.rmtree(scratch)
        return digest
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in sorted(scratch.rglob("*")):
        _sync(path)
    _sync(scratch)
    digest = folder_sha256(scratch)
    os.rename(scratch, final)
    _sync(final.parent)
    return digest


def folder_name(run: int, fencing: int) -> str:
    """Name of the folder of a run's adapter."""
    return f"run-{run}-{fencing}"


def sweep(root: Path, known: Collection[Path], grace_seconds: float = 0.0) -> list[Path]:
    """Removes the folders of runs in `root` that no row knows, and partial ones; returns them. Everything else there,
    including adapters with other names, is left alone. grace_seconds: folders changed more recently are kept, because
    another process may be about to register them."""
    known_paths = {path.resolve() for path in known}
    found = sorted(root.iterdir()) if root.is_dir() else []
    newest = time.time() - grace_seconds
    orphans = [
        path
        for path in found
        if path.resolve() not in known_paths and _left_over(path) and path.stat().st_mtime <= newest
    ]
    for path in orphans:
        remove_folder(path)
    return orphans


def remove_folder(path: Path) -> None:
    """Deletes the folder of an adapter, complete or partial."""
    doomed = path
    if path.suffix not in UNFINISHED:
        # After a crash, a partly deleted folder must be recognisable.
        doomed = path.with_name(f"{path.name}.partial")
        os.rename(path, doomed)
    shutil.rmtree(doomed)


def _left_over(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir() or _NAME.fullmatch(path.name) is None:
        return False
    return path.suffix in UNFINISHED or any((path / name).is_file() for name in ADAPTER_FILES)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # On macOS fsync stops at the drive's own cache.
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:
            fcntl.fcntl(descriptor, full)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
