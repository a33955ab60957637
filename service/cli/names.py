"""Checks model names before anything is made or opened for them, and suggests similar names."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from service.core import ModelError
from service.settings import Settings

LIKENESS = 0.7
"""Minimum similarity of a suggested name (difflib's ratio)."""
HUB_SECONDS = 10.0
"""Longest wait for the hub's answer about a name."""
PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
"""The address of a model's page on the hub."""
CONVERSIONS = "mlx-community"
"""The hub organisation whose conversions run here unchanged."""


def check_models(settings: Settings) -> None:
    """Raises ModelError if the target or draft of these settings is unavailable. Downloads and converts nothing."""
    models = settings.models
    check_model(models.target, settings.home, models.revision)
    if models.draft not in {None, "none"}:
        check_model(str(models.draft), settings.home)


def check_model(name: str, home: Path, revision: str | None = None) -> None:
    """Raises ModelError if `catalog.resolve` would refuse a name, without its side effects. The hub is only asked about
    models that are not in its cache."""
    from service.models.catalog import cached, entries, hub_name, unavailable

    is_folder = Path(name).expanduser().is_dir()
    if name.casefold().endswith(".gguf") and not is_folder:
        raise ModelError(
            f"{name} is a GGUF file, which is not supported: give the folder or the hub name of an MLX model"
        )
    on_hub = hub_name(name) is not None
    problem = unavailable(name, home, revision=revision)
    if problem is None and on_hub and cached(name, revision) is None:
        problem = _hub_problem(name, revision)
    if problem is None:
        return
    if on_hub or is_folder or name in {entry.name for entry in entries()}:
        raise ModelError(problem + _suggestion(name, home))
    known = ", ".join(entry.name for entry in entries())
    others = f"give a name of the catalogue ({known}), a hub name (org/name), or a folder"
    raise ModelError(f"no model {name}: {others}{_suggestion(name, home)}")


def _hub_problem(name: str, revision: str | None) -> str | None:
    """Why the hub does not provide a model, or None."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    at = f" at {revision}" if revision else ""
    try:
        HfApi().model_info(name, revision=revision or "main", timeout=HUB_SECONDS)
    except GatedRepoError:
        return f"{name} is gated: ask for access on its page of the hub, and log in (`hf auth login`)"
    except RepositoryNotFoundError:
        return f"no model {name}: neither a folder nor on the hub, where private ones need `hf auth login`"
    except OfflineModeIsEnabled:
        return f"{name}{at} is not on this disk, and HF_HUB_OFFLINE prevents downloading it"
    except Exception as error:  # noqa: BLE001  (the hub's client raises what its HTTP library raises, which changes)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{name}{at} cannot be had from the hub ({lines[0]}): check the name and the connection, or pass a local folder"
    return None


def _suggestion(name: str, home: Path) -> str:
    """A suggestion as the end of a sentence; "" if no name is similar."""
    found = near_names(name, home)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def near_names(name: str, home: Path) -> list[str]:
    """Names similar to an unknown one, most similar first: models on this disk, in the catalogue, and of known families."""
    from service.models.catalog import entries
    from service.models.draft_choice import FAMILIES
    from service.models.inventory import stored_models

    if (page := PAGE.match(name)) is not None:
        return [page[1]]
    here = [model.name for model in stored_models(home) if not model.is_draft]
    known = list(dict.fromkeys((*here, *(entry.name for entry in entries()))))
    wanted = _last(name)
    same = [each for each in known if _last(each) == wanted and each != name]
    if same:
        return same
    if "/" not in name and any(family.names.match(name) for family in FAMILIES):
        return [f"{CONVERSIONS}/{name}"]
    parts = {_last(each): each for each in reversed(known)}
    return [parts[each] for each in get_close_matches(wanted, parts, 1, cutoff=LIKENESS)]


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()
