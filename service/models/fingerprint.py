"""Hashes that identify models, tokenizers and adapter folders. Imports only the standard library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from service.core import ModelError
from service.models.rope import with_rope_keys

_BLOCK = 64 * 1024
_WHOLE = 64 * 1024 * 1024
"""Weight files below this size are hashed whole."""
_BLOCKS = 256
"""Number of blocks sampled from a larger file, evenly spaced from its first byte to its last."""


class _Digest(Protocol):
    """A hashlib object, whose own type is private."""

    def update(self, data: bytes, /) -> None: ...


def model_fingerprint(folder: Path) -> str:
    """Hex sha256 of config.json (in canonical form, with RoPE in the keys that mlx-lm reads) and of the weight files.

    Files of 64 MiB and more are sampled: size, header, 256 blocks of 64 KiB. That is fast for any size and distinguishes
    trained checkpoints, but not files that differ only in a few bytes. Raises ModelError if there is no readable model.
    """
    digest = hashlib.sha256(_canonical_config(folder / "config.json"))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no safetensors weights")
    for path in files:
        try:
            _add_weights(path, digest)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """Hex sha256 of the tokenizer's files (JSON in canonical form) and the chat template, which determine the token ids of a
    text or a chat. Raises ModelError if there is no tokenizer."""
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
    """Hex sha256 of a vocabulary, token -> id."""
    ordered = json.dumps(sorted(vocabulary.items(), key=lambda item: (item[1], item[0])))
    return hashlib.sha256(ordered.encode()).hexdigest()


def folder_sha256(folder: Path) -> str:
    """Hex sha256 of all files below a folder, by relative path and content. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def is_unaltered(folder: Path, sha256: str) -> bool:
    """Whether a folder exists with the content of this hash. Raises OSError."""
    return folder.is_dir() and folder_sha256(folder) == sha256


def _add_weights(path: Path, digest: _Digest) -> None:
    """Raises OSError."""
    size = path.stat().st_size
    digest.update(f"\n{path.name} {size}\n".encode())
    with path.open("rb") as file:
        if size < _WHOLE:
            while block := file.read(_BLOCK):
                digest.update(block)
        else:
            _sample(file, size, digest)


def _canonical_config(path: Path) -> bytes:
    config = _json(path)
    if isinstance(config, dict):
        # An inconsistent configuration is refused when it is loaded. Until then it only needs a fingerprint.
        with suppress(ValueError):
            config = with_rope_keys(cast("dict[str, object]", config))
    return _dumped(config)


def _canonical(path: Path) -> bytes:
    return _dumped(_json(path))


def _json(path: Path) -> object:
    try:
        return cast("object", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error


def _dumped(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _sample(file: BinaryIO, size: int, digest: _Digest) -> None:
    # safetensors: eight bytes with the header's length, little-endian, then the header.
    length = int.from_bytes(file.read(8), "little")
    digest.update(file.read(min(length, size)))
    for index in range(_BLOCKS):
        file.seek((size - _BLOCK) * index // (_BLOCKS - 1))
        digest.update(file.read(_BLOCK))
