"""The models that a command works with, found or made first (progress on stderr), and the models on this disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.console import err
from service.cli.names import check_models
from service.core import AdapterRef, AdapterState, Conflict, ModelError, RedraftError
from service.settings import Settings

if TYPE_CHECKING:
    from service.app import Folders
    from service.models.inventory import StoredModel
    from service.store.stores import Stores


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model in `models list`. origin: its source. size: bytes on disk, None if it is not there. memory: bytes of its
    weights once loaded here, None if unknown. draft: the one used if none is named, "" if there is none or it is a
    draft itself. problem: why it cannot be served, as far as its files show without loading."""

    name: str
    origin: str
    size: int | None
    memory: int | None
    draft: str
    problem: str | None = None

    def cells(self) -> tuple[str, ...]:
        """The columns of the table."""
        sizes = [f"{size / 2**30:.2f} GiB" if size is not None else "" for size in (self.size, self.memory)]
        return (self.name, self.origin, *sizes, self.draft)


def model_rows(home: Path) -> list[ModelRow]:
    """The catalogue and the models on this disk."""
    import mlx.core as mx

    from service.models.catalog import entries
    from service.models.draft_choice import choices
    from service.models.inventory import stored_models
    from service.models.model_files import check_files
    from service.models.weights import bytes_in_memory

    widen = mx.default_device().type == mx.cpu
    rows: list[ModelRow] = []
    stored = {model.name: model for model in stored_models(home)}
    for entry in entries():
        if entry.name not in stored:
            origin = entry.source if entry.installed else f"{entry.source}, which is not installed"
            rows.append(ModelRow(entry.name, origin, None, None, entry.draft or ""))
    for model in stored.values():
        folder = model.folders[0]
        try:
            check_files(folder)
            memory = bytes_in_memory(folder, widen=widen)
            found = [] if model.is_draft else choices(model.name, folder, home)
        except ModelError as error:
            # Affects this model only: the others are listed as usual.
            rows.append(ModelRow(model.name, model.origin, model.size, None, "", str(error)))
        else:
            rows.append(ModelRow(model.name, model.origin, model.size, memory, found[0].name if found else ""))
    return rows


def target_at_hand(settings: Settings) -> Path | None:
    """The target's folder at the configured revision; None if it is not on this disk."""
    from service.models.machine import folder_at_hand

    return folder_at_hand(settings.models.target, settings.home, settings.models.revision)


def draft_of(settings: Settings) -> tuple[str | None, str]:
    """The draft these settings serve with, None if there is none or it must be downloaded first; and a description of
    the choice. Downloads nothing."""
    from service.models.draft_choice import choices
    from service.models.machine import folder_at_hand
    from service.models.model_files import check_files

    named, home = settings.models.draft, settings.home
    if named is not None:
        return (None, "none, as set") if named == "none" else (named, named)
    try:
        found = choices(settings.models.target, target_at_hand(settings), home)
    except ModelError as error:
        return None, f"not known: {error}"
    if not found:
        return None, f"none found (redraft make-draft --target {settings.models.target})"
    left_out: list[str] = []
    for choice in found:
        folder, what = folder_at_hand(choice.name, home), f"{choice.name}, {choice.why}"
        if folder is None and "/" in choice.name:
            return None, "; ".join([f"{what}; it is fetched at the first start", *left_out])
        try:
            if folder is not None:
                check_files(folder)
        except ModelError as error:
            left_out.append(f"{what}, is left out: {error}")
        else:
            return choice.name, "; ".join([what, *left_out])
    return None, "; ".join(["none", *left_out])


def may_have_draft(settings: Settings) -> bool:
    """Whether a draft is named or can be looked for. Downloads nothing."""
    from service.models.draft_choice import choices

    named, target, home = settings.models.draft, settings.models.target, settings.home
    if named is not None:
        return named != "none"
    try:
        return bool(choices(target, target_at_hand(settings), home))
    except ModelError:
        return False


def require_unneeded(model: StoredModel, settings: Settings) -> None:
    """Raises Conflict while an adapter is active that was trained for this model as its draft; StoreError if the
    database is unavailable."""
    from service.models.fingerprint import model_fingerprint
    from service.store.backends.backend import sqlite_path
    from service.store.stores import open_stores

    database = sqlite_path(settings.database_url)
    if database is not None and not database.exists():
        return
    stores = open_stores(settings)
    try:
        drafts = {model_fingerprint(folder) for folder in model.folders}
        for ref in stores.adapters.all():
            if ref.state is AdapterState.ACTIVE and ref.draft in drafts:
                raise Conflict(
                    f"adapter {ref.id} serves with {model.name} as its draft and needs it "
                    "(`redraft adapters activate bare` at a server of that pair, or --force)"
                )
    finally:
        stores.close()


def active_adapter(stores: Stores, target: Path, draft: Path) -> AdapterRef | None:
    """The adapter that serves a pair, or None. Raises StoreError."""
    from service.models.fingerprint import model_fingerprint

    return stores.adapters.active(model_fingerprint(target), model_fingerprint(draft))


def model_folders(settings: Settings) -> Folders:
    """Folders of target, draft and general replay set; makes or downloads what is missing. Raises ModelError."""
    from service.app import resolve_models

    check_models(settings)
    return resolve_models(settings, lambda step: err.print(step, highlight=False))


def pair_folders(settings: Settings) -> tuple[Path, Path]:
    """Target and draft. Raises RedraftError where there is no draft."""
    return pair_and_general(settings)[0]


def pair_and_general(settings: Settings) -> tuple[tuple[Path, Path], Path | None]:
    """Target and draft, and the general replay set. Raises RedraftError where there is no draft."""
    found = model_folders(settings)
    if found.draft is None:
        raise RedraftError(f"no draft for {settings.models.target}: name one with --draft, or make one (make-draft)")
    return (found.target, found.draft), found.general
