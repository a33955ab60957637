"""Pages for the keys and values of one model, and the kernel that writes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import mlx.core as mx

from service.engine import device
from service.engine.kernels import cuda_kernel
from service.engine.kv.groups import WHOLE, Groups
from service.engine.kv.rectangles import Block, groups_of
from service.engine.strategy import PAGE

log = logging.getLogger(__name__)

FIRST_PAGES = 64
"""Pages of a pool whose size was not set."""
MOST_UNLAUNCHED = 4096
"""Writes whose arrays are held until they are launched."""
THREADS = 128
"""Threads per block of the kernel."""

Arrays: TypeAlias = tuple[mx.array | None, mx.array | None]
"""Keys and values of a layer, (pages, heads, PAGE, dims) each; None if nothing was written or there are none."""


@cache
def _write_pages() -> Any:
    inputs = ["new_keys", "new_values", "keys", "values", "starts", "page_table"]
    return cuda_kernel("write_pages", inputs, ["written"], strided=True, PAGE=PAGE)


def write_in_place(
    new_keys: mx.array, new_values: mx.array, keys: mx.array, values: mx.array, starts: mx.array, table: mx.array
) -> mx.array:
    """Write new keys and values (B, heads, N, dims) with a CUDA kernel to the pages of these rows, from position starts[b]
    (B,), int32, of each row. It writes even though other arrays refer to the pool, where MLX would copy the pool during a
    pending round. Returns an array that must be an input of every kernel that reads the pages, because MLX does not know of the
    write otherwise."""
    rows, heads, count, _ = new_keys.shape
    return _write_pages()(
        inputs=[new_keys, new_values, keys, values, starts, table],
        template=[("T", keys.dtype)],
        grid=(rows * heads * count * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )[0]


def scatter(pool: mx.array, new: mx.array, starts: mx.array, table: mx.array) -> mx.array:
    """The same write to one array, for devices without this kernel. Returns the pool."""
    _, heads, count, _ = new.shape
    positions = starts[:, None] + mx.arange(count)
    places = mx.minimum(positions // PAGE, table.shape[1] - 1)
    pages = mx.take_along_axis(table, places, axis=1)
    pool[pages[:, None], mx.arange(heads)[None, :, None], (positions % PAGE)[:, None]] = new
    return pool


class Page:
    """A page of a pool, which becomes free when nothing refers to it. In the prefix cache it is a block of a model whose layers
    all hold all positions."""

    __slots__ = ("number", "pool")
    whole, reach = True, 0
    """See Block."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.pool = pool
        self.number = number

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.pool.page_bytes

    @property
    def pages(self) -> tuple[Page, ...]:
        """See PageBlock."""
        return (self,)

    def __del__(self) -> None:
        self.pool.free.append(self.number)


@dataclass(frozen=True, slots=True, eq=False)
class PageBlock:
    """PAGE positions of a row in the prefix cache, for models whose layers are in several groups or have a window. pages: one
    per group; None: the row had released it. reach: see Block."""

    pool: Pool
    pages: tuple[Page | None, ...]
    reach: int

    @property
    def whole(self) -> bool:
        """Whether all groups have a page."""
        return None not in self.pages

    @property
    def nbytes(self) -> int:
        """Bytes of its pages."""
        return sum(page.nbytes for page in self.pages if page is not None)


class Pool:
    """Pages for keys and values of one model. Page 0 belongs to no row: padding rows write to it.

    A pool without a set size doubles when its pages run out, which changes the shape of its arrays. A pool with a set size
    evicts cached prefixes instead.
    """

    def __init__(self, pages: int = FIRST_PAGES) -> None:
        self.pages = pages
        self.layers: list[Arrays] = []
        """The arrays, by the index in `Groups.places`. Layers of different groups share arrays."""
        self.groups: Groups | None = None
        """The groups of the model's layers; None until they are first needed."""
        self.free = list(range(pages - 1, 0, -1))
        self.sized = False
        """Whether the size was set or cannot grow for lack of memory. Cached prefixes are then evicted before the pool
        grows."""
        self.reclaim: Callable[[], bool] | None = None
        """Evicts a block of the prefix cache, whose pages become free unless a row holds them. Returns False if there is
        none."""
        self.unlaunched: list[mx.array] = []
        """Results of in-place writes that were not launched yet. Nothing else would run them."""
        self.in_place = mx.default_device().type != mx.cpu
        self.zeroed = set[int]()
        """Layers whose values the model zeroes after each call because it does not use them."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, summed over all arrays made so far."""
        return sum(array.nbytes // self.pages for arrays in self.layers for array in arrays if array is not None)

    def set_size(self, pages: int) -> None:
        """Set the number of pages for rows and cached prefixes and allocate them now, so that calls keep their shapes."""
        self.grow(pages + 1)
        self.sized = True

    def take(self, count: int) -> list[Page]:
        """Free pages. Raises MemoryError if there is not enough memory."""
        if (missing := count - len(self.free)) > 0 and not self.sized:
            self.grow(self.pages + max(self.pages, missing))
        while len(self.free) < count and self.reclaim is not None and self.reclaim():
            pass
        if (missing := count - len(self.free)) > 0 and not self.grow(self.pages + missing):
            raise MemoryError("not enough memory for more keys and values")
        return [Page(self, self.free.pop()) for _ in range(count)]

    def grow(self, pages: int) -> bool:
        """Grow to `pages` pages. Returns False if there is not enough memory."""
        more = pages - self.pages
        if more <= 0:
            return True
        # Pending writes would go to the old arrays.
        self.launch()
        largest = max((a.nbytes for arrays in self.layers for a in arrays if a is not None), default=0)
        if largest:
            needed = more * self.page_bytes + 2 * largest * pages // self.pages
            if needed > device.free_bytes():
                log.warning("KV cache limited to %d pages by available memory", self.pages)
                self.sized = True
                return False
            log.info("KV cache grown to %d pages", pages)
        self.free[:0] = range(pages - 1, self.pages - 1, -1)
        self.pages = pages
        for i, arrays in enumerate(self.layers):
            grown = [
                None if a is None else mx.concatenate([a, mx.zeros((more, *a.shape[1:]), a.dtype)]) for a in arrays
            ]
            # One by one, because two copies of all arrays may not fit.
            device.wait([array for array in grown if array is not None])
            self.layers[i] = cast("Arrays", tuple(grown))
        return True

    def copies(self, blocks: Sequence[Page | PageBlock]) -> list[Block]:
        """Uncomputed copies of the contents of these blocks."""
        self.launch()
        groups, arrays = self.groups or WHOLE, list[mx.array | None]()
        places = groups.places or [(0, i) for i in range(len(self.layers))]
        for _, slot in places:
            arrays += self.layers[slot] if slot < len(self.layers) else (None, None)
        found = [Block({}, block.whole, block.reach) for block in blocks]
        for members in groups_of(arrays, [groups.windows[group] for group, _ in places]):
            held = [places[i // 2][0] for i in members]
            # Groups with the same window have the same blocks.
            pages = [(n, block.pages) for n, block in enumerate(blocks) if block.pages[held[0]] is not None]
            if not pages:
                continue
            numbers = {g: mx.array([cast("Page", each[g]).number for _, each in pages]) for g in set(held)}
            parts = [cast("mx.array", arrays[i])[numbers[g]] for i, g in zip(members, held, strict=True)]
            whole = mx.stack(parts, axis=1)
            for place, (n, _) in enumerate(pages):
                found[n].arrays[members] = whole[place]
        return found

    def fill(self, blocks: Sequence[Block]) -> list[Page | PageBlock]:
        """Pages with the contents of these blocks. Waits until they are written. Raises MemoryError."""
        groups = self.groups or WHOLE
        held = [{groups.place(i // 2)[0] for members in block.arrays for i in members} for block in blocks]
        taken = iter(self.take(sum(map(len, held))))
        pages = [[next(taken) if g in each else None for g in range(len(groups.windows))] for each in held]
        start, found = mx.zeros((1,), dtype=mx.int32), dict[int, tuple[mx.array, mx.array]]()
        for members in dict.fromkeys(members for block in blocks for members in block.arrays):
            having = [
                (each, block.arrays[members])
                for each, block in zip(pages, blocks, strict=True)
                if members in block.arrays
            ]
            whole = mx.concatenate([array for _, array in having], axis=2)
            for place, index in enumerate(members):
                group = groups.place(index // 2)[0]
                table = mx.array([[cast("Page", each[group]).number for each, _ in having]])
                found[index] = whole[place : place + 1], table
        for layer in sorted({each // 2 for each in found}):
            (keys, table), (values, _) = found[2 * layer], found.get(2 * layer + 1, (None, None))
            self.write(groups.place(layer)[1], keys, values, start, table)
        device.wait(self.arrays())
        if groups == WHOLE:
            return [cast("Page", each) for (each,) in pages]
        return [PageBlock(self, tuple(each), groups.reach) for each in pages]

    def zero_first(self) -> None:
        """Zero page 0. Padding rows read what they have written there, and NaN would persist."""
        start, table = mx.zeros((1,), dtype=mx.int32), mx.zeros((1, 1), dtype=mx.int32)
        for i, (keys, values) in enumerate(self.layers):
            if keys is not None:
                blank = [None if each is None else mx.zeros_like(each[:1]) for each in (keys, values)]
                self.write(i, cast("mx.array", blank[0]), blank[1], start, table)
        self.launch()

    def launch(self) -> None:
        """Launch pending in-place writes, if any."""
        if self.unlaunched:
            device.launch(self.unlaunched)
            self.unlaunched.clear()

    def arrays(self) -> list[mx.array]:
        """The arrays that must be evaluated to complete all writes."""
        if not self.in_place:
            return [array for arrays in self.layers for array in arrays if array is not None]
        unlaunched, self.unlaunched = self.unlaunched, []
        return unlaunched

    def layer(self, index: int, keys: mx.array, values: mx.array | None) -> Arrays:
        """The arrays of a layer, created on first use for keys and values (B, heads, N, dims)."""
        self.layers += [(None, None)] * (index + 1 - len(self.layers))
        if self.layers[index][0] is None:
            made = [None if each is None else self._new(each) for each in (keys, values)]
            self.layers[index] = cast("Arrays", tuple(made))
        return self.layers[index]

    def _new(self, like: mx.array) -> mx.array:
        _, heads, _, dims = like.shape
        return mx.zeros((self.pages, heads, PAGE, dims), dtype=like.dtype)

    def write(
        self, index: int, keys: mx.array, values: mx.array | None, starts: mx.array, table: mx.array
    ) -> mx.array | None:
        """Write new keys and values of a layer; see `write_in_place`. Returns its result, or None if the write replaced the
        arrays."""
        mine, theirs = self.layer(index, keys, values)
        assert mine is not None
        if not self.in_place:
            after = None if theirs is None or values is None else scatter(theirs, values, starts, table)
            self.layers[index] = scatter(mine, keys, starts, table), after
            return None
        # Features have keys only. They are written twice.
        both = (values, theirs) if values is not None and theirs is not None else (keys, mine)
        written = write_in_place(keys, both[0], mine, both[1], starts, table)
        if len(self.unlaunched) >= MOST_UNLAUNCHED:
            self.launch()
        self.unlaunched.append(written)
        return written
