"""Adapter folders: written aside, made durable, renamed into place, never written again."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from service.core import StoreError
from service.models.fingerprint import folder_sha256

__all__ = ["folder_sha256", "publish", "sweep"]


def publish(scratch: Path, final: Path) -> str:
    """Make everything in `scratch` durable and give it its final name; returns the folder's sha256.

    After a crash at any moment there is the whole folder under its final name, or none. Raises StoreError when the name is
    taken.
    """
    if final.exists():
        raise StoreError(f"{final.name} exists already: adapters are never overwritten")
    final.parent.mkdir(parents=True, exist_ok=True)
    for path in sorted(scratch.rglob("*")):
        _sync(path)
    _sync(scratch)
    digest = folder_sha256(scratch)
    os.rename(scratch, final)
    _sync(final.parent)
    return digest


def sweep(root: Path, known: Collection[Path]) -> list[Path]:
    """Remove what no row knows: folders of candidates that were never registered, and half-written ones."""
    kept = {path.resolve() for path in known}
    gone = [path for path in (sorted(root.iterdir()) if root.is_dir() else []) if path.resolve() not in kept]
    for path in gone:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return gone


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
