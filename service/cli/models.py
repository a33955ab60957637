"""The models that a command works with, found or made first; progress goes to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from service.cli.console import err
from service.core import RedraftError
from service.settings import Settings

if TYPE_CHECKING:
    from service.app import Folders


def model_folders(settings: Settings) -> Folders:
    """Folders of target, draft and general replay set; makes or fetches what is missing. Raises ModelError."""
    from service.app import resolve_models

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
