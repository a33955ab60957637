"""Models on this disk, in the home folder and the Hugging Face cache, and their removal. Does not import MLX."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from huggingface_hub import CachedRevisionInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from service.core import ModelError, NotFound
from service.models.catalog import CONVERTED, DRAFTS, DRAFTS_SHIPPED, STAMP
from service.models.draft_choice import made_for
from service.models.model_files import WEIGHTS


class Origin(StrEnum):
    """The origin of a model on this disk. CONVERTED: from the package that contains it. MADE: by `make-draft`. HUB: fetched
    from the hub, by this program or another one."""

    CONVERTED = "converted here"
    MADE = "made here"
    HUB = "hub cache"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this disk.

    name: as for --target and --draft. folders: its locations; the first one is served, others are earlier revisions. size:
    bytes on disk. revisions: in the hub's cache. is_draft: it was made to be a draft.
    """

    name: str
    origin: Origin
    folders: tuple[Path, ...]
    size: int
    revisions: tuple[str, ...] = ()
    is_draft: bool = False


def stored_models(home: Path) -> list[StoredModel]:
    """Models of the home folder, then those of the hub's cache by name, including damaged ones. Folders without weights are
    omitted."""
    converted = [
        StoredModel(folder.name, Origin.CONVERTED, (folder,), _bytes(folder), is_draft=folder.name in DRAFTS_SHIPPED)
        for folder in _folders(home / CONVERTED)
        if (folder / STAMP).is_file()
    ]
    made = [
        StoredModel(str(folder), Origin.MADE, (folder,), _bytes(folder), is_draft=True)
        for folder in _folders(home / DRAFTS)
        if made_for(folder) is not None
    ]
    return [*converted, *made, *_hub_models()]


def stored_model(name: str, home: Path) -> StoredModel:
    """The model of this name. A draft that was made here is also found by its folder's name. Raises NotFound."""
    found = stored_models(home)
    for model in found:
        if name == model.name or (model.origin is Origin.MADE and name == model.folders[0].name):
            return model
    if Path(name).expanduser().is_dir():
        raise NotFound(f"{name} is a folder that redraft did not make: it is yours to delete")
    raise NotFound(f"there is no model {name} on this disk: `redraft models list` names those that are")


def remove_model(model: StoredModel) -> None:
    """Delete a model's files; those in the hub's cache through huggingface_hub. Raises ModelError on failure."""
    try:
        if model.origin is Origin.HUB and model.revisions:
            scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(*model.revisions).execute()
            return
        # A repository that huggingface_hub cannot read is removed as a whole.
        hub = [model.folders[0].parent.parent] if model.origin is Origin.HUB else []
        for folder in hub or model.folders:
            # Rename first, so that a partly deleted folder is not taken for a whole model.
            doomed = folder.with_name(f".{folder.name}.making-removed")
            shutil.rmtree(doomed, ignore_errors=True)
            folder.rename(doomed)
            shutil.rmtree(doomed)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be removed: {error}") from error


def _hub_models() -> list[StoredModel]:
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, ValueError):
        return []
    found: list[StoredModel] = []
    for repository in repositories:
        revisions = [each for each in _newest_first(repository.revisions) if _is_model(each.snapshot_path)]
        if repository.repo_type == "model" and revisions:
            folders = tuple(each.snapshot_path for each in revisions)
            hashes = tuple(sorted(each.commit_hash for each in repository.revisions))
            found.append(StoredModel(repository.repo_id, Origin.HUB, folders, repository.size_on_disk, hashes))
    found += _unreadable({repository.repo_path.name for repository in repositories})
    return sorted(found, key=lambda model: model.name)


def _unreadable(known: Collection[str]) -> list[StoredModel]:
    """Models of the hub's cache that huggingface_hub omits because some of their files are broken links."""
    found: list[StoredModel] = []
    for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        snapshots = sorted((repository / "snapshots").glob("*"), key=lambda each: each.lstat().st_mtime, reverse=True)
        folders = tuple(each for each in snapshots if _is_model(each))
        if repository.name not in known and folders:
            name = repository.name.removeprefix("models--").replace("--", "/")
            found.append(StoredModel(name, Origin.HUB, folders, _bytes(repository / "blobs")))
    return found


def _newest_first(revisions: Iterable[CachedRevisionInfo]) -> list[CachedRevisionInfo]:
    """The revision of `main`, then the others by age."""
    return sorted(revisions, key=lambda each: ("main" in each.refs, each.last_modified), reverse=True)


def _is_model(folder: Path) -> bool:
    """Whether a folder holds weights in the layout of mlx-lm and a config.json with a model type, or one that cannot be
    read."""
    file = folder / "config.json"
    if not any(folder.glob(WEIGHTS)):
        return False
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return file.is_file() or file.is_symlink()
    return not isinstance(config, dict) or "model_type" in config


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("[!.]*") if path.is_dir())


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
