"""What a model and a tokenizer are, as hashes: provenance of every generation and adapter. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from service.core import ModelError

_BLOCK = 64 * 1024
_WHOLE = 64 * 1024 * 1024
"""Weight files below this size are hashed whole."""
_BLOCKS = 256
"""Blocks read from a larger file, spread evenly from its first byte to its last."""


class _Digest(Protocol):
    """What hashlib's objects are, whose own type is private."""

    def update(self, data: bytes, /) -> None: ...


def model_fingerprint(folder: Path) -> str:
    """Hex sha256 of config.json (whatever its formatting) and of the weight files.

    Files of 64 MiB and more are sampled (size, header, 256 blocks of 64 KiB), which is fast for a model of any size and
    tells apart any two trained checkpoints, though not two files that differ in a few chosen bytes. Raises ModelError
    where there is no readable model.
    """
    digest = hashlib.sha256(_canonical(folder / "config.json"))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no safetensors weights")
    for path in files:
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size < _WHOLE:
                while block := file.read(_BLOCK):
                    digest.update(block)
            else:
                _sample(file, size, digest)
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """Hex sha256 of everything that decides which token ids a text or a chat becomes: the tokenizer's own files (JSON
    whatever its formatting) and the chat template. Raises ModelError where there is no tokenizer."""
    digest = hashlib.sha256()
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
    )
    sources = [path for name in names if (path := folder / name).is_file()]
    sources += sorted([*folder.glob("*.tiktoken"), *folder.glob("*.model")])
    if not sources:
        raise ModelError(f"{folder} holds no tokenizer")
    for path in sources:
        content = _canonical(path) if path.suffix == ".json" else path.read_bytes()
        digest.update(f"\n{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Hex sha256 of a token -> id map."""
    ordered = json.dumps(sorted(vocabulary.items(), key=lambda item: (item[1], item[0])))
    return hashlib.sha256(ordered.encode()).hexdigest()


def folder_sha256(folder: Path) -> str:
    """Hex sha256 of a folder's files, by name and content, whatever order they are listed in. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _canonical(path: Path) -> bytes:
    try:
        content = cast("object", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _sample(file: BinaryIO, size: int, digest: _Digest) -> None:
    # safetensors: eight bytes with the header's length, little-endian, then the header.
    length = int.from_bytes(file.read(8), "little")
    digest.update(file.read(min(length, size)))
    for index in range(_BLOCKS):
        file.seek((size - _BLOCK) * index // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK))
