"""Checks that the files of a model folder are complete, and reads the headers of its weights. Does not import MLX."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, cast

from service.core import ModelError

WEIGHTS = "model*.safetensors"
"""The weight files that mlx-lm reads."""
_INDEX = "model.safetensors.index.json"
_CONFIGURATIONS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken")
"""The files that make up a tokenizer."""
_SHARD = re.compile(r"(model-)(\d+)(-of-)(\d+)(\.safetensors)")
_POINTER = b"version https://git-lfs."
_MAX_HEADER = 100_000_000
"""The safetensors library's limit for a header, in bytes."""
_BITS = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
} | {
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
}


def check_files(folder: Path) -> None:
    """Raises ModelError, naming the file and the cause, if a file of a model is missing, empty, truncated, a Git LFS pointer or
    a broken link, or if a configuration is not a JSON object."""
    for _ in stored_tensors(folder):
        pass
    tokenizers = _named(folder, _TOKENIZERS)
    configurations = _named(folder, _CONFIGURATIONS)
    for path in (*configurations, *tokenizers):
        _beginning(path)
    for path in configurations:
        _check_configuration(path)
    if not tokenizers:
        raise ModelError(f"{folder} holds no tokenizer (tokenizer.json)")


def stored_tensors(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The header (dtype, shape, data_offsets) of every tensor in the weight files. Raises ModelError as `check_files`."""
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise ModelError(f"{folder} holds no safetensors weights ({WEIGHTS})")
    missing = _missing_shards(folder, {path.name for path in files})
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing[:3])}{' and others' if missing[3:] else ''}: the model is partial"
        )
    for path in files:
        yield from _header(path)


def one_line(error: BaseException) -> str:
    """An error's message in one line of limited length; its type if it has no message."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def _named(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files of a folder that match these patterns, including broken links."""
    return [path for name in names for path in sorted(folder.glob(name))]


def _missing_shards(folder: Path, names: set[str]) -> list[str]:
    """Weight files that should exist, according to the names of other files or to the index."""
    wanted: set[str] = set()
    for name in names:
        if found := _SHARD.fullmatch(name):
            before, number, between, count, after = found.groups()
            if int(count) <= 10_000:
                wanted |= {f"{before}{i:0{len(number)}}{between}{count}{after}" for i in range(1, int(count) + 1)}
    try:
        listed = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = set[str]()
    # An index none of whose files exist belongs to another conversion.
    if listed & names:
        wanted |= {name for name in listed if isinstance(name, str)}
    return sorted(wanted - names)


def _beginning(path: Path) -> tuple[bytes, int]:
    """The first bytes of a file, and its size. Raises ModelError if it cannot be read, is empty, or is a pointer."""
    try:
        with path.open("rb") as file:
            first = file.read(64)
        size = path.stat().st_size
    except OSError as error:
        if path.is_symlink() and not path.exists():
            raise ModelError(f"{path} is a link to a file that is not there") from error
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if not first:
        raise ModelError(f"{path} is empty")
    if first.startswith(_POINTER):
        raise ModelError(f"{path} is a Git LFS pointer, not the file itself: `git lfs pull` fetches it")
    return first, size


def _check_configuration(path: Path) -> None:
    """Raises ModelError if the file does not contain a JSON object."""
    try:
        content = cast("object", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is no JSON object")


def _header(path: Path) -> list[Mapping[str, Any]]:
    """The headers of the tensors in a file. Raises ModelError if it is not a complete safetensors file."""
    first, size = _beginning(path)
    length = int.from_bytes(first[:8], "little")
    if len(first) > 8 and first[8:9] not in (b"{", b" "):
        raise ModelError(f"{path} is not a safetensors file")
    if len(first) < 8 or length > min(size - 8, _MAX_HEADER):
        raise ModelError(f"{path} is cut off: it has {size} bytes, too few for its header")
    try:
        with path.open("rb") as file:
            file.seek(8)
            header = cast("object", json.loads(file.read(length)))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a safetensors file: its header cannot be read") from error
    tensors = cast("Mapping[str, Any]", header) if isinstance(header, dict) else {}
    found: list[Mapping[str, Any]] = []
    for name, tensor in tensors.items():
        if name == "__metadata__":
            continue
        try:
            start, end = (int(each) for each in tensor["data_offsets"])
            shape, dtype = [int(each) for each in tensor["shape"]], str(tensor["dtype"])
        except (TypeError, ValueError, KeyError) as error:
            raise ModelError(f"{path} is not a safetensors file: its header does not say where {name} is") from error
        needed = prod(shape) * _BITS[dtype] // 8 if dtype in _BITS else end - start
        if min(start, *shape, 0) < 0 or end - start != needed:
            raise ModelError(f"{path} is damaged: its header contradicts itself about {name}")
        if end > size - 8 - length:
            raise ModelError(f"{path} is cut off: it has {size} bytes and should have {8 + length + end} at least")
        found.append(tensor)
    return found
