"""Loads LoRA adapters for the draft model. A Draft, the base draft or one with an adapter, is immutable.

An adapter's files are validated completely before use. The adapter is then added to copies of the unquantised weights it
changes, or kept next to quantised ones (`folding`). All other arrays are shared with the base draft.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.utils import linear_to_lora_layers

from service.core import BARE_DRAFT, AdapterRef, AdapterRefused, ModelError
from service.engine import device
from service.engine.folding import fold
from service.models import vocabulary
from service.models.arrays import named_arrays
from service.models.fingerprint import folder_sha256
from service.models.heads import cut, shallow_copy
from service.models.pair import Loaded

MAX_HEADER = 16 * 2**20
MAX_RANK = 1024
HASH_SECONDS = 1e-3
"""How long one loading step waits for the hash of the files, which another thread computes. Hashing large files takes longer
than many rounds."""
MISSING = (FileNotFoundError, NotADirectoryError)
"""Errors that mean a file does not exist. Other read errors, such as too many open files, do not count against an adapter."""
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model ready to serve. adapter: the id of its adapter, BARE_DRAFT (0) for none. ref: the location of its files."""

    adapter: int
    model: nn.Module
    ref: AdapterRef | None = None


def bare(model: nn.Module) -> Draft:
    """The draft model without an adapter."""
    return Draft(BARE_DRAFT, model)


def served(loaded: Loaded) -> Draft:
    """The base draft, with its head cut to the reduced vocabulary in its folder, if there is one. Raises ModelError."""
    ids = vocabulary.read(loaded.folder)
    if ids is None:
        return bare(loaded.model)
    model = shallow_copy(loaded.model)
    cut(model, ids)
    return bare(model)


def load_steps(base: nn.Module, ref: AdapterRef, fingerprint: str) -> Iterator[Draft | None]:
    """Load an adapter in small steps, so that the caller can decode in between. Yields None after each step and finally the
    Draft.

    base: the base draft model, which is not changed. fingerprint: of the base draft. Raises AdapterRefused for damaged or
    altered files, another base draft, and tensors that are missing, unknown, not finite or of the wrong shape.
    """
    config = read_config(ref, fingerprint)
    header = read_header(ref.folder / "adapters.safetensors")
    hashed: Future[str] = Future()
    # A daemon thread: nothing waits for it if loading is abandoned.
    Thread(target=_hash, args=(ref.folder, hashed), name="redraft-hash", daemon=True).start()
    while wait([hashed], HASH_SECONDS).not_done:
        yield None
    if hashed.result() != ref.sha256:
        raise AdapterRefused(f"adapter {ref.id}: its files differ from the registered ones (hash mismatch)")
    yield None

    model = shallow_copy(base)
    # LoRA layers start with random values that are never computed. Without a fixed seed, the graph of the random state would
    # grow with every load. Everything that samples uses separate keys.
    mx.random.seed(0)
    try:
        linear_to_lora_layers(model, len(cast("list[object]", base.layers)), config)
    except Exception as error:
        raise AdapterRefused(f"adapter {ref.id}: its layers do not fit this draft ({error})") from error
    expected = {
        name: array.shape
        for name, array in named_arrays(model.parameters())
        if name.rsplit(".", 1)[-1] in {"lora_a", "lora_b"}
    }
    if not expected:
        raise AdapterRefused(f"adapter {ref.id}: its keys match no layer of this draft")
    _compare(ref.id, expected, header)

    weights: dict[str, mx.array] = mx.load(str(ref.folder / "adapters.safetensors"))  # pyright: ignore[reportAssignmentType]
    for name, array in weights.items():
        if not device.read(mx.isfinite(array.astype(mx.float32)).all())[0]:
            raise AdapterRefused(f"adapter {ref.id}: {name} contains non-finite values")
        yield None
    model.load_weights(list(weights.items()), strict=False)
    yield from fold(model)
    try:
        # An adapter without a reduced vocabulary uses the base draft's.
        if (ids := vocabulary.read(ref.folder)) is not None:
            cut(model, ids)
    except ModelError as error:
        raise AdapterRefused(f"adapter {ref.id}: {error}") from error
    device.wait(model.parameters())
    model.eval()
    yield Draft(ref.id, model, ref)


def _hash(folder: Path, future: Future[str]) -> None:
    try:
        future.set_result(folder_sha256(folder))
    except Exception as error:  # noqa: BLE001  (raised by the loading step that waits for the future)
        future.set_exception(error)


def load(base: nn.Module, ref: AdapterRef, fingerprint: str) -> Draft:
    """Load an adapter in one go. Parameters and errors as for `load_steps`."""
    for draft in load_steps(base, ref, fingerprint):
        if draft is not None:
            return draft
    raise AdapterRefused(f"adapter {ref.id}: nothing was loaded")


def read_config(ref: AdapterRef, fingerprint: str) -> dict[str, Any]:
    """The LoRA parameters in adapter_config.json. Raises AdapterRefused if they differ from the registered ones."""
    try:
        config = json.loads((ref.folder / "adapter_config.json").read_text())
        lora = config["lora_parameters"]
        rank, scale, dropout, keys = lora["rank"], lora["scale"], lora["dropout"], lora["keys"]
        based_on = config["redraft"]["draft"]
    except (*MISSING, ValueError, KeyError, TypeError) as error:
        raise AdapterRefused(f"adapter {ref.id}: adapter_config.json is missing, damaged or incomplete") from error
    if config.get("fine_tune_type") != "lora":
        raise AdapterRefused(f"adapter {ref.id}: only LoRA adapters can be served")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= MAX_RANK or rank != ref.rank:
        raise AdapterRefused(f"adapter {ref.id}: rank {rank!r} is not the registered {ref.rank}")
    if not isinstance(scale, int | float) or not math.isfinite(scale) or scale != ref.scale:
        raise AdapterRefused(f"adapter {ref.id}: scale {scale!r} is not the registered {ref.scale}")
    if dropout != 0.0:
        raise AdapterRefused(f"adapter {ref.id}: dropout must be 0 when serving")
    if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(ref.keys):
        raise AdapterRefused(f"adapter {ref.id}: its keys differ from the registered ones")
    if not based_on == ref.draft == fingerprint:
        raise AdapterRefused(f"adapter {ref.id}: it was trained on another draft model")
    return {"rank": rank, "scale": float(scale), "dropout": 0.0, "keys": set(map(str, keys))}


def read_header(file: Path) -> Mapping[str, tuple[int, ...]]:
    """Tensor shapes by name, from a safetensors header that is validated against the file before MLX maps it.

    Raises AdapterRefused.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            size_field = stream.read(8)
            length = struct.unpack("<Q", size_field)[0] if len(size_field) == 8 else -1
            if not 0 < length <= min(MAX_HEADER, size - 8):
                raise AdapterRefused(f"{file.name}: truncated, or its header claims an impossible length")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        spans: list[tuple[int, int]] = []
        shapes: dict[str, tuple[int, ...]] = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            if entry["dtype"] not in _DTYPES:
                raise AdapterRefused(f"{file.name}: {name} has dtype {entry['dtype']}, expected a float type")
            if min(shape, default=0) < 0 or end - start != math.prod(shape) * _DTYPES[entry["dtype"]]:
                raise AdapterRefused(f"{file.name}: the size of {name} does not match its shape")
            spans.append((start, end))
            shapes[name] = shape
        cursor = 0
        for start, end in sorted(spans):
            if start != cursor:
                raise AdapterRefused(f"{file.name}: tensors overlap or leave gaps")
            cursor = end
        if cursor != size - 8 - length:
            raise AdapterRefused(f"{file.name}: the file is shorter or longer than its header says")
    except (*MISSING, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterRefused(f"{file.name}: missing or damaged header") from error
    return shapes


def _compare(adapter: int, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    missing, unknown = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing:
        raise AdapterRefused(f"adapter {adapter}: {len(missing)} tensors are missing, such as {min(missing)}")
    if unknown:
        raise AdapterRefused(f"adapter {adapter}: {len(unknown)} tensors are unknown, such as {min(unknown)}")
    for name, shape in expected.items():
        if tuple(shape) != found[name]:
            raise AdapterRefused(f"adapter {adapter}: {name} has shape {found[name]}, expected {tuple(shape)}")
