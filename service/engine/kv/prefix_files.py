"""The prefix cache on disk: the target's keys and values in files that outlive the server process.

A file holds up to FILE_BLOCKS consecutive blocks of a text, with a separate tensor for each array, so loading a block needs no
copy and a block may lack layers whose window has passed it. The metadata record the model and shapes, the tokens, and the hash
of the text's salt and all preceding tokens. A file is found by this hash, whether or not the preceding blocks are in files. At
start-up only headers are read.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from service.engine import device
from service.engine.kv.rectangles import Block, Members
from service.engine.strategy import PAGE

log = logging.getLogger(__name__)

FORMAT = 2
"""File format version. Files of other versions are ignored."""
FILE_BLOCKS = 64
"""Maximum blocks of a file. A file is loaded or written between two rounds, like a prefill chunk of as many positions."""
LEAST = 512
"""Minimum tokens that are loaded while it is unknown whether prefilling them is faster, and minimum tokens of a text that is
written."""
PROBE = 8
"""If prefilling is faster, a file is still loaded for every PROBE-th prompt, because a slow disk may become faster."""
KEPT = 0.75
"""Weight that earlier calls keep in a speed when a call is added."""
NAMES, PART = "prefix-*.safetensors", ".part.safetensors"
ITEM = PAGE * 4
"""Bytes of a block's tokens."""


@dataclass(slots=True)
class Speed:
    """Units per second, weighted towards the latest calls."""

    units: float = 0.0
    seconds: float = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """Record a call that processed `units` in `seconds`."""
        self.units = KEPT * self.units + units
        self.seconds = KEPT * self.seconds + seconds

    @property
    def value(self) -> float | None:
        """None before the first call."""
        return self.units / self.seconds if self.seconds else None


@dataclass(slots=True, eq=False)
class File:
    """A file in the folder. size: bytes. used: modification time in nanoseconds. before: the hash of all tokens before the
    file's first. sums: by block, a checksum of each of its arrays."""

    path: Path
    size: int
    used: int
    before: str
    tokens: bytes
    sums: list[list[int]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks `first` to `last` - 1 of a text, in a file whose first block is the text's block `start`."""

    file: File
    start: int
    first: int
    last: int


class PrefixFiles:
    """The files of one model in a folder. Together with files of other models in that folder they take at most `cap` bytes; the
    least recently used are removed first. model: identifies the model. block: a whole block of the model, which defines the
    layout. Raises OSError if the folder cannot be used."""

    def __init__(self, folder: Path, cap: int, model: str, block: Block) -> None:
        self.folder = folder
        self.cap = cap
        self.nbytes = 0
        """Bytes of all files."""
        self.block_bytes = block.nbytes
        self.speed = Speed()
        """Bytes loaded per second; until the first load, the speed at which the first file was written."""
        self._read_once = False
        self._declined = 0
        self._like = block
        arrays = [[list(members), list(each.shape), str(each.dtype)] for members, each in block.arrays.items()]
        self._key = json.dumps({"format": FORMAT, "page": PAGE, "model": model, "layout": arrays})
        self._files: dict[Path, File] = {}
        self._ours: dict[str, list[File]] = {}
        """By `before`."""
        # An existing folder may be shared, so its permissions are left alone.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in folder.glob(f".*{PART}"):
            path.unlink(missing_ok=True)
        for path in folder.glob(NAMES):
            try:
                self._add(path, _metadata(path))
            except OSError as error:
                log.warning("ignoring %s: %s", path, error)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                log.warning("removing damaged file %s: %s", path, error)
                path.unlink(missing_ok=True)
        # The cap may have been lowered.
        self._make_room(0, ())

    def find(self, tokens: Sequence[int], have: int, salt: str = "") -> list[Piece]:
        """The pieces that hold the text's consecutive blocks from block `have` on. salt: of the text; files written with
        another salt are not found."""
        text, digest, pieces = _bytes(tokens), sha256(salt.encode()), list[Piece]()
        end, best = have, (0, None, 0)
        if not self._ours:
            return pieces
        for start in range(len(tokens) // PAGE):
            for file in self._ours.get(digest.hexdigest(), ()):
                reach = start + _common(file.tokens, text[start * ITEM :])
                best = (reach, file, start) if reach > best[0] else best
            if start == end:
                reach, file, begin = best
                if file is None or reach <= end:
                    break
                pieces.append(Piece(file, begin, end, reach))
                end = reach
            digest.update(text[start * ITEM : (start + 1) * ITEM])
        return pieces

    def pays(self, tokens: int, prefill: float | None) -> bool:
        """Whether to load the blocks of this many tokens instead of prefilling them. prefill: tokens per second; None: not
        known."""
        faster = self.faster(prefill)
        if faster:
            return True
        self._declined += faster is not None
        return tokens >= LEAST and (faster is None or self._declined % PROBE == 0)

    def faster(self, prefill: float | None) -> bool | None:
        """Whether loading is faster than prefilling at this many tokens per second; None: not known."""
        read = self.speed.value
        return None if read is None or prefill is None else self.block_bytes * prefill < read * PAGE

    def read(self, piece: Piece, first: int, count: int) -> list[Block] | None:
        """`count` blocks of a piece from the text's block `first` on, computed. None if they are not available. A damaged file
        is removed."""
        file, place = piece.file, first - piece.start
        if file.path not in self._files:
            return None
        try:
            if file.path.stat().st_size != file.size:
                raise ValueError("its size has changed")
            # Loaded on the CPU's threads. On CUDA's stream arrays load one after another, which takes 2.5 times as long.
            found = cast("dict[str, mx.array]", mx.load(str(file.path), stream=mx.cpu))
            blocks = [self._block(found, number) for number in range(place, place + count)]
            # MLX does not report read errors, so check the contents.
            if _sums(blocks) != file.sums[place : place + count]:
                raise ValueError("its contents have changed")
        except (OSError, ValueError, LookupError, RuntimeError) as error:
            log.warning("removing damaged file %s: %s", file.path, error)
            self._remove(file)
            return None
        return blocks

    def _block(self, found: Mapping[str, mx.array], number: int) -> Block:
        """A block of a file, without the layers whose window has passed it. Raises ValueError."""
        arrays: dict[Members, mx.array] = {}
        for group, (members, like) in enumerate(self._like.arrays.items()):
            if (each := found.get(f"{number}.{group}")) is not None:
                if each.shape != like.shape or each.dtype != like.dtype:
                    raise ValueError("its arrays have other shapes")
                arrays[members] = each
        return Block(arrays, len(arrays) == len(self._like.arrays), self._like.reach)

    def observe_read(self, nbytes: int, seconds: float) -> None:
        """Record that loading `nbytes` bytes into the cache took `seconds`."""
        if not self._read_once:
            self._read_once, self.speed = True, Speed()
        self.speed.observe(nbytes, seconds)

    def write(
        self, tokens: Sequence[int], blocks: Sequence[Block], before: Sequence[File], salt: str = ""
    ) -> File | None:
        """Write the last blocks of a text. before: the files with the preceding blocks, which are not removed to free space.
        Returns None if there is not enough space or the file cannot be written."""
        text = _bytes(tokens)
        cut = len(text) - len(blocks) * ITEM
        metadata = {
            "key": self._key,
            "before": sha256(salt.encode() + text[:cut]).hexdigest(),
            "tokens": base64.b64encode(text[cut:]).decode(),
            "sums": json.dumps(_sums(blocks)),
        }
        path = self.folder / _name(metadata)
        part = self.folder / f".{path.stem}{PART}"
        groups = {members: group for group, members in enumerate(self._like.arrays)}
        named = {f"{n}.{groups[m]}": each for n, block in enumerate(blocks) for m, each in block.arrays.items()}
        # The header takes a few hundred bytes per array.
        size = sum(block.nbytes for block in blocks) + 256 * len(named) + 2 * len(text)
        self.use(before)
        if not self._make_room(size, before):
            return None
        started_at = time.perf_counter()
        try:
            os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            mx.save_safetensors(str(part), named, metadata)
            os.replace(part, path)
            file = self._add(path, metadata)
        except (OSError, RuntimeError) as error:
            log.warning("cannot write a cached prefix to %s: %s", self.folder, error)
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return None
        if self.speed.value is None:
            self.speed.observe(file.size, time.perf_counter() - started_at)
        self.use([*before, file])
        return file

    def has(self, file: File) -> bool:
        """Whether the file has not been removed."""
        return file.path in self._files

    def use(self, files: Sequence[File]) -> None:
        """Mark the files of a text as just used. The first file is marked last, because the others are useless without it."""
        now = time.time_ns()
        for number, file in enumerate(reversed(files)):
            file.used = now + number
            with suppress(OSError):
                os.utime(file.path, ns=(file.used, file.used))

    def forget(self) -> None:
        """Remove every file in the folder, including those of other models. Raises OSError."""
        for file in list(self._files.values()):
            self._discard(file)
        remove_files(self.folder)

    def _add(self, path: Path, metadata: dict[str, str]) -> File:
        status = path.stat()
        tokens, sums = base64.b64decode(metadata["tokens"]), cast("list[list[int]]", json.loads(metadata["sums"]))
        file = File(path, status.st_size, status.st_mtime_ns, metadata["before"], tokens, sums)
        if path in self._files:
            self._discard(self._files[path])
        self._files[path] = file
        self.nbytes += file.size
        if metadata["key"] == self._key:
            self._ours.setdefault(file.before, []).append(file)
        return file

    def _make_room(self, size: int, keep: Sequence[File]) -> bool:
        """Remove the least recently used files, except `keep`, until `size` more bytes fit."""
        for file in sorted(self._files.values(), key=lambda file: file.used):
            if self.nbytes + size <= self.cap:
                break
            if file not in keep:
                self._remove(file)
        return self.nbytes + size <= self.cap

    def _remove(self, file: File) -> None:
        with suppress(OSError):
            file.path.unlink(missing_ok=True)
        self._discard(file)

    def _discard(self, file: File) -> None:
        del self._files[file.path]
        self.nbytes -= file.size
        alike = self._ours.get(file.before, [])
        if file in alike:
            alike.remove(file)
            if not alike:
                del self._ours[file.before]


def remove_files(folder: Path) -> None:
    """Remove all cached prefixes in a folder, whatever their model. Raises OSError."""
    for pattern in (NAMES, f".*{PART}"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Number of leading blocks of tokens that both have in common."""
    count = min(len(one), len(other)) // ITEM
    if one[: count * ITEM] == other[: count * ITEM]:
        return count
    return next(n for n in range(count) if one[n * ITEM : (n + 1) * ITEM] != other[n * ITEM : (n + 1) * ITEM])


def _sums(blocks: Sequence[Block]) -> list[list[int]]:
    """The sum of each array's 32-bit words, modulo 2**32. Waits for the arrays."""
    sums = [each.reshape(-1).view(mx.uint32).sum() for block in blocks for each in block.arrays.values()]
    found = iter(device.read(mx.stack(sums))[0].tolist() if sums else [])
    return [[int(next(found)) for _ in block.arrays] for block in blocks]


def _name(metadata: dict[str, str]) -> str:
    """The name of a file with these metadata. Damaged tokens or sums no longer match it."""
    digest = sha256("\n".join(metadata[name] for name in ("key", "before", "tokens", "sums")).encode())
    return f"prefix-{digest.hexdigest()}.safetensors"


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a complete file. Raises ValueError, LookupError, TypeError or AttributeError for a damaged one."""
    with path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if length > size:
            raise ValueError("its header is truncated")
        header = cast("dict[str, dict[str, Any]]", json.loads(file.read(length)))
    metadata = cast("dict[str, str]", header.pop("__metadata__"))
    if size != 8 + length + max((each["data_offsets"][1] for each in header.values()), default=0):
        raise ValueError("it is truncated")
    if path.name != _name(metadata):
        raise ValueError("its metadata have changed")
    return metadata
