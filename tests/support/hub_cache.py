"""The hub's cache in a folder of the test's own, filled as huggingface_hub fills it."""

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import constants


def use_hub_cache(cache: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make this process use an empty cache, offline."""
    cache.mkdir()
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def cache_model(cache: Path, name: str, folder: Path, *, revision: str = "main") -> Path:
    """Put a model folder into the cache under a hub name: blobs, a snapshot of links to them, and a branch. Returns the
    snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    commit = hashlib.sha1(f"{name} {revision}".encode()).hexdigest()
    snapshot = repository / "snapshots" / commit
    for place in (snapshot, repository / "blobs", repository / "refs"):
        place.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs" / revision).write_text(commit)
    return snapshot
