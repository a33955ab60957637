"""A fast BLAS under MLX's Linux CPU back end.

PyPI's `mlx-cpu` bundles netlib's reference BLAS, about 25-75 times slower on float32 products than OpenBLAS. Symbols that
are loaded globally before libmlx win its lookups, so loading OpenBLAS first is enough; MLX itself is untouched.

The OpenBLAS that NumPy and SciPy are built with (scipy-openblas32) has kernels for every processor and needs no other library,
but its functions' names begin with `scipy_`. The loader gets a copy in memory in which they have their plain names.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_PREFIX = b"scipy_"
_DYNSYM, _GNU_HASH_SECTION, _DYNAMIC = 11, 0x6FFFFFF6, 6
"""Types of sections of an ELF file (elf.h: SHT_DYNSYM, SHT_GNU_HASH, SHT_DYNAMIC)."""
_GNU_HASH, _HASH = 0x6FFFFEF5, 4
"""Tags of a dynamic section (DT_GNU_HASH, DT_HASH)."""
_SYMBOL = "<IBBHQQ"
"""A symbol: the place of its name, info, other, section, value, size."""

_library: ctypes.CDLL | None = None


def load_fast_blas() -> str | None:
    """Load OpenBLAS with global symbols and return its path; None where it is absent, unusable, or not wanted.

    REDRAFT_BLAS=shipped leaves MLX as it comes (what `redraft doctor` compares with).
    """
    global _library
    if sys.platform != "linux" or os.environ.get("REDRAFT_BLAS") == "shipped" or "mlx.core" in sys.modules:
        return None
    try:
        path = Path(str(distribution("scipy-openblas32").locate_file("scipy_openblas32/lib/libscipy_openblas.so")))
        descriptor = os.memfd_create(path.name)
        with os.fdopen(descriptor, "wb") as file:
            file.write(with_plain_names(path.read_bytes(), _PREFIX))
            file.flush()
            _library = ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_GLOBAL)
    except (PackageNotFoundError, OSError, ValueError):
        return None
    return str(path)


def blas_threads() -> int:
    """How many threads the BLAS that was loaded uses; 1 without one."""
    return 1 if _library is None else int(_library.openblas_get_num_threads())


def set_blas_threads(count: int) -> None:
    """Let the BLAS that was loaded use so many threads from now on. Nothing without one."""
    if _library is not None:
        _library.openblas_set_num_threads(max(count, 1))


def with_plain_names(library: bytes, prefix: bytes) -> bytes:
    """A 64-bit little-endian ELF library whose symbols have lost a prefix.

    A name is a place in the table of strings, so that it begins some bytes later. The table that finds symbols by a hash of
    their names is replaced by one in the older format (System V ABI, "Hash Table"), for which there is room in its place.
    Raises ValueError for a file of another kind, or a damaged one.
    """
    try:
        return _renamed(bytearray(library), prefix)
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError("not a whole library with dynamic symbols and a table of their hashes") from error


def _renamed(image: bytearray, prefix: bytes) -> bytes:
    if bytes(image[:6]) != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    sections = dict[int, tuple[int, int, int]]()
    (table,), (size, count) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<HH", image, 58)
    headers = [struct.unpack_from("<IIQQQQII", image, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, _ in headers:
        sections.setdefault(kind, (offset, length, link))
    symbols, bytes_of_symbols, strings = sections[_DYNSYM]
    hashes, room, _ = sections[_GNU_HASH_SECTION]
    dynamic, bytes_of_dynamic, _ = sections[_DYNAMIC]
    names, bytes_of_names = headers[strings][4:6]
    number = bytes_of_symbols // struct.calcsize(_SYMBOL)
    buckets = room // 4 - 2 - number
    if buckets < 1:
        raise ValueError("no room for another table of hashes")

    first, following, text = [0] * buckets, [0] * number, bytes(image[names : names + bytes_of_names])
    for i, (name, *_) in enumerate(struct.iter_unpack(_SYMBOL, image[symbols : symbols + bytes_of_symbols])):
        if text.startswith(prefix, name):
            name += len(prefix)
            struct.pack_into("<I", image, symbols + i * struct.calcsize(_SYMBOL), name)
        bucket = _hash(text[name : text.index(0, name)]) % buckets
        # The first symbol is nobody's.
        if i:
            following[i], first[bucket] = first[bucket], i
    struct.pack_into(f"<{2 + buckets + number}I", image, hashes, buckets, number, *first, *following)
    for at in range(dynamic, dynamic + bytes_of_dynamic, 16):
        if struct.unpack_from("<Q", image, at) == (_GNU_HASH,):
            struct.pack_into("<Q", image, at, _HASH)
    return bytes(image)


def _hash(name: bytes) -> int:
    """The System V ABI's hash of a symbol's name."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        if value > 0x0FFFFFFF:
            value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
    return value
