"""Practice text on disk: what the target wrote while the server was idle, in several files per run.

Files: `<target>/<run>-<fencing>-<number>-<kind>.npz` below the practice folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from service.learning.make.target_text import TargetText
from service.store.permissions import private_folder


class Kind(StrEnum):
    """LOG: user turns start like logged prompts. GENERAL: as in the text the draft was made from, or freely."""

    LOG = "log"
    GENERAL = "general"


@dataclass(frozen=True, slots=True)
class Piece:
    """One file of practice text of one kind. seeds: ids of the logged generations it may start like."""

    run: int
    kind: Kind
    text: TargetText
    seeds: tuple[str, ...] = ()


class PracticeText:
    """The practice text of one target. root: the practice folder. target: its fingerprint."""

    def __init__(self, root: Path, target: str) -> None:
        self._root = root
        self._folder = root / target

    def save(self, piece: Piece, fencing: int, number: int) -> None:
        """Writes a file atomically. number: index within the run. Raises OSError."""
        private_folder(self._root)
        private_folder(self._folder)
        final = self._folder / f"{piece.run:08d}-{fencing}-{number:04d}-{piece.kind}.npz"
        scratch = final.with_name(f".{final.name}.part.npz")
        text, seeds = piece.text, np.array(piece.seeds, dtype=np.str_)
        # TargetText's fields, plus the seeds.
        np.savez(scratch, tokens=text.tokens, role=text.role, temperature=text.temperature, seeds=seeds)
        # A concurrent erasure removes all files, including this one.
        with suppress(FileNotFoundError):
            os.replace(scratch, final)

    def pieces(self, before: int | None = None) -> Iterator[Piece]:
        """The files of runs before `before` (None: of all), newest first. Unreadable files are skipped."""
        for path in sorted(self._folder.glob("[0-9]*.npz"), reverse=True):
            run, _, _, kind = path.stem.split("-")
            if before is not None and int(run) >= before:
                continue
            try:
                yield Piece(int(run), Kind(kind), TargetText.load(path), _seeds(path))
            except (OSError, EOFError, ValueError, KeyError, BadZipFile):
                # Removed in the meantime, damaged, or empty after a power loss.
                continue


def _seeds(path: Path) -> tuple[str, ...]:
    with np.load(path, allow_pickle=False) as stored:
        return tuple(stored["seeds"].tolist())


def mixed(pieces: Sequence[Piece]) -> TargetText:
    """The texts of both kinds in equal numbers if there are any of each, in the given order. All have equal lengths."""
    by_kind = [[piece.text for piece in pieces if piece.kind is kind] for kind in Kind]
    joined = [TargetText.joined(texts) for texts in by_kind if texts]
    rows = min(len(text.tokens) for text in joined)
    return TargetText.joined([text.first(rows) for text in joined])


def remove(root: Path) -> None:
    """Removes all practice text below `root`, for every target, including partial files. Raises OSError."""
    for path in root.glob("*/*.npz"):
        path.unlink(missing_ok=True)
