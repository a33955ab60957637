"""Adapter folders: written aside, made durable, renamed into place, never written again. And which files are private."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from service.core import StoreError
from service.models.fingerprint import folder_sha256, is_unaltered

__all__ = ["folder_sha256", "make_private", "private_folder", "publish", "sweep"]

log = logging.getLogger(__name__)

ADAPTER_FILES = ("adapters.safetensors", "adapter_config.json")
UNFINISHED = {".part", ".partial"}
"""How the names of folders end that are being written or removed."""


def private_folder(path: Path) -> None:
    """Create a folder, and what is missing above it, for this user alone (0700). One that exists is left as it is."""
    if not path.exists():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_private(*paths: Path) -> None:
    """Take group's and others' permissions from those files and folders that exist: older releases wrote by the umask."""
    for path in paths:
        try:
            mode = path.stat().st_mode
            if mode & 0o077:
                path.chmod(mode & 0o700)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("others may read %s, which holds recorded text: %s", path, error.strerror or error)


def publish(scratch: Path, final: Path) -> str:
    """Make everything in `scratch` durable and give it its final name; returns the folder's sha256.

    After a crash at any moment there is the whole folder under its final name, or none. A folder that is there already with the
    same content stays, and `scratch` goes; raises StoreError where the content is another.
    """
    if final.exists():
        digest = folder_sha256(scratch)
        if not is_unaltered(final, digest):
            raise StoreError(f"{final.name} exists already: adapters are never overwritten")
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


def sweep(root: Path, known: Collection[Path], grace_seconds: float = 0.0) -> list[Path]:
    """Remove the adapter folders in `root` that no row knows, and half-written ones; returns them. Whatever else lies there is
    somebody else's and stays. grace_seconds: what has changed since then stays too: another process may be about to name it."""
    kept = {path.resolve() for path in known}
    found = sorted(root.iterdir()) if root.is_dir() else []
    newest = time.time() - grace_seconds
    gone = [
        path for path in found if path.resolve() not in kept and _left_over(path) and path.stat().st_mtime <= newest
    ]
    for path in gone:
        doomed = path
        if path.suffix not in UNFINISHED:
            # A folder half removed must still be known for what it is.
            doomed = path.with_name(f"{path.name}.partial")
            os.rename(path, doomed)
        shutil.rmtree(doomed)
    return gone


def _left_over(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir():
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
