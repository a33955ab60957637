"""Chooses the draft of a target if none is named: one that was made from it, the one that ships, or a small model of its
family.

Imports MLX only to check that a draft fits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from service.core import ModelError
from service.models.catalog import DRAFTS, STAMP, OnStep, cached, default_draft, resolve
from service.models.fingerprint import model_fingerprint

SMALL = 0.1
"""A family's draft is its largest one with at most this share of the target's parameters, or else its smallest one."""
LARGEST = 0.5
"""Maximum share of the target's parameters that a draft may have."""


@dataclass(frozen=True, slots=True)
class Small:
    """A small model of a family. billions: its parameters, as in its name. repositories: hub names of its conversions,
    preferred first."""

    billions: float
    repositories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """Models with the same tokenizer.

    names: pattern of the beginning of their names, without the organisation, up to their parameters (`size`, in `unit`).
    model_types: of their config.json. small: possible drafts, smallest first.
    """

    title: str
    names: re.Pattern[str]
    model_types: frozenset[str]
    small: tuple[Small, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft for a target. name: as for `--draft`. why: how it was found."""

    name: str
    why: str


_SIZE = r"(?P<size>\d+(?:\.\d+)?)(?P<unit>[BM])"


def _family(title: str, names: str, model_types: str, *small: Small) -> Family:
    return Family(title, re.compile(names, re.IGNORECASE), frozenset(model_types.split()), small)


def _conversions(name: str, original: str, *suffixes: str) -> tuple[str, ...]:
    return (*(f"mlx-community/{name}-{suffix}" for suffix in suffixes or ("4bit", "8bit", "bf16")), original)


FAMILIES = (
    _family(
        "Qwen3",
        rf"Qwen3-(?:Coder-|Next-)?{_SIZE}(?!.*-Base)",
        "qwen3 qwen3_moe qwen3_next",
        Small(0.6, _conversions("Qwen3-0.6B", "Qwen/Qwen3-0.6B")),
    ),
    _family(
        "Qwen3.5",
        rf"Qwen3\.[56]-{_SIZE}(?!.*-Base)",
        "qwen3_5 qwen3_5_moe",
        Small(0.8, _conversions("Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B", "4bit", "MLX-4bit", "MLX-8bit", "bf16")),
    ),
    _family(
        "Qwen2.5-Coder",
        rf"Qwen2\.5-Coder-{_SIZE}-Instruct",
        "qwen2",
        Small(0.5, _conversions("Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct")),
    ),
    _family(
        "Qwen2.5",
        rf"Qwen2\.5-{_SIZE}-Instruct",
        "qwen2",
        Small(0.5, _conversions("Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct")),
    ),
    _family(
        "DeepSeek-R1-Distill-Qwen",
        rf"DeepSeek-R1-Distill-Qwen-{_SIZE}",
        "qwen2",
        Small(1.5, _conversions("DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")),
    ),
    # The tokenizer of Llama 3.0 names the reserved ids differently.
    _family(
        "Llama 3.1 to 3.3",
        rf"(?:Meta-)?Llama-3\.[123]-{_SIZE}-Instruct",
        "llama",
        Small(1.0, _conversions("Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B-Instruct")),
    ),
    _family(
        "Gemma 3",
        rf"gemma-3-{_SIZE}-it",
        "gemma3 gemma3_text",
        Small(0.27, _conversions("gemma-3-270m-it", "google/gemma-3-270m-it")),
        Small(1.0, _conversions("gemma-3-1b-it", "google/gemma-3-1b-it", "4bit", "qat-4bit", "8bit", "bf16")),
    ),
    _family(
        "SmolLM2",
        rf"SmolLM2-{_SIZE}-Instruct",
        "llama",
        Small(0.135, ("mlx-community/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct")),
    ),
)
"""Matched by name and config.json. Whether the tokenizers are equal is checked once a draft is found."""


def own_name(target: str) -> str:
    """A model's name without the organisation, from a hub name, a folder, or a snapshot in the hub's cache."""
    parts = Path(target).expanduser().resolve().parts
    if len(parts) >= 3 and parts[-2] == "snapshots":
        return parts[-3].rpartition("--")[2]
    return parts[-1] if parts else ""


def family_draft(target: str, config: Mapping[str, Any] | None = None) -> tuple[Family, Small] | None:
    """The family of a target and its draft; None if the family is unknown or the target is too small for its drafts. target:
    hub name or folder. config: the target's config.json; without it the name alone decides."""
    name = own_name(target)
    for family in FAMILIES:
        match = family.names.match(name)
        if match is None or (config is not None and config.get("model_type") not in family.model_types):
            continue
        size = float(match["size"]) / (1000 if match["unit"] in "mM" else 1)
        fitting = [small for small in family.small if small.billions <= SMALL * size] or list(family.small[:1])
        return (family, fitting[-1]) if fitting[-1].billions <= LARGEST * size else None
    return None


def made_for(folder: Path) -> str | None:
    """The fingerprint of the target that a draft was made from; None if its folder does not record one."""
    try:
        return str(json.loads((folder / STAMP).read_text(encoding="utf-8"))["target"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_made_for(folder: Path, target: str) -> None:
    """Record in a draft's folder which target (fingerprint) it was made from. Raises OSError."""
    (folder / STAMP).write_text(json.dumps({"target": target}) + "\n", encoding="utf-8")


def made_drafts(target: Path, home: Path) -> list[Path]:
    """Drafts in the home folder that were made from this target, newest first. Raises ModelError if the target cannot be
    read."""
    made = {folder: made_for(folder) for folder in (home / DRAFTS).glob("[!.]*")}
    if not any(made.values()):
        return []
    fingerprint = model_fingerprint(target)
    mine = [folder for folder, target_of in made.items() if target_of == fingerprint]
    return sorted(mine, key=lambda folder: ((folder / STAMP).stat().st_mtime, folder.name), reverse=True)


def choices(target: str, folder: Path | None, home: Path) -> list[Choice]:
    """Drafts for a target, best first; nothing is fetched. folder: of the target, None if it is not on disk.

    The order: drafts made from it, newest first; the draft that ships for it; the small model of its family, preferably a
    conversion that is on disk. Raises ModelError if the target's folder cannot be read.
    """
    found = [Choice(str(made), "made from this target") for made in (made_drafts(folder, home) if folder else [])]
    if (shipped := default_draft(target)) is not None:
        found.append(Choice(shipped, "ships with redraft"))
    family = family_draft(target, _config(folder) if folder else None)
    if family is not None:
        repositories = family[1].repositories
        name = next((each for each in repositories if cached(each) is not None), repositories[0])
        found.append(Choice(name, f"the small model of its family, {family[0].title}"))
    return found


def find_draft(target: str, folder: Path, home: Path, say: OnStep) -> Path | None:
    """The folder of a target's draft; None if none fits, which is reported together with how to make one.

    target: as it was named. folder: where it is. Fetches a draft that is not on disk and checks that it fits. A draft that does
    not fit or cannot be fetched is skipped. Raises ModelError for a target that cannot be read, or if the draft that ships
    cannot be made.
    """
    from service.models.pair import check_fit

    for choice in choices(target, folder, home):
        if choice.name == default_draft(target):
            return resolve(choice.name, home, on_step=say)
        try:
            found = resolve(choice.name, home, on_step=say)
            check_fit(folder, found)
        except ModelError as error:
            say(f"the draft {choice.name} ({choice.why}) is left out: {error}")
        else:
            say(f"draft: {choice.name}, {choice.why} (--draft chooses another, --draft none leaves it out)")
            return found
    say(f"no draft model for {target}: serving without one. To make one: redraft make-draft --target {target}")
    return None


def _config(folder: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read as JSON: {error}") from error
