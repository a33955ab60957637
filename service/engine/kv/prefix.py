"""Prefix cache: keys and values of prompts and answers, reused by requests whose prompts start with the same tokens.

A cached prefix is a path of blocks in a tree. A block holds BLOCK positions and is found under its parent by its tokens,
without a hash, so that prefixes share blocks and none is confused with another. Only prompt tokens and verified tokens are
inserted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import mlx.core as mx

from service.engine import device
from service.engine.kv.cache import RowCache
from service.engine.strategy import current

BLOCK = 32
"""Positions of a block. The rest of a prefix, less than a block, is prefilled again."""

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Arrays of a model that have the same shape: 2 * layer is a layer's keys, 2 * layer + 1 its values."""


class Owner(StrEnum):
    """The model whose keys and values these are. `clear` those of the draft when another version of it serves."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(slots=True, eq=False)
class Block:
    """Keys and values of BLOCK positions: an array (members, heads, BLOCK, dims) for each group. A root has none."""

    tokens: tuple[int, ...] = ()
    parent: Block | None = None
    groups: Groups = ()
    arrays: list[mx.array] = field(default_factory=list[mx.array])
    children: dict[tuple[int, ...], Block] = field(default_factory=dict["tuple[int, ...]", "Block"])

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays)


class PrefixCache:
    """A tree of blocks for each owner, at most `budget` bytes in all. Evicts the least recently used leaf first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._roots = {owner: Block() for owner in Owner}
        self._uncopied: list[list[mx.array]] = []
        """By text."""
        self._order: OrderedDict[Block, None] = OrderedDict()
        """Least recently used first. Using a block uses its ancestors too, after it, so the first one is always a leaf."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of all owners, least recently used first."""
        return tuple(self._order)

    def cached_length(self, owner: Owner, tokens: Sequence[int]) -> int:
        """Positions of the longest cached prefix of `tokens`; 0 for a model with recurrent layers."""
        return len(self._match(owner, tokens)) * BLOCK

    def load(self, owner: Owner, texts: Sequence[Sequence[int]], cache: RowCache) -> None:
        """Load the longest cached prefix of each text into its row of an empty cache, with capacity for the longest text."""
        paths = [self._match(owner, tokens) for tokens in texts]
        for path in paths:
            if path:
                self._touch(path[-1])
        if any(paths):
            _load(paths, cache, max(map(len, texts)))

    def insert(self, owner: Owner, tokens: Sequence[int], cache: RowCache, row: int = 0) -> None:
        """Copy whole blocks of `row`'s keys and values for `tokens`, those that are not cached yet, as many as the budget
        allows; `copy` must follow. Does nothing for a model with recurrent layers, whose state cannot be cut into blocks."""
        if cache.states:
            return
        whole = min(len(tokens), cache.lengths.host[row]) // BLOCK
        path = self._match(owner, tokens[: whole * BLOCK])
        last = path[-1] if path else self._roots[owner]
        self._touch(last)
        missing = whole - len(path)
        if not missing:
            return
        cache.launch_writes()
        arrays = [array for layer in cache.attention for array in (layer.keys, layer.values)]
        groups = _groups(arrays)
        size = sum(a.shape[1] * BLOCK * a.shape[3] * a.dtype.size for a in arrays if a is not None)
        fit = min(missing, self._evict(missing * size, last) // size)
        start = len(path) * BLOCK
        blocks = _copies(groups, arrays, row, start, fit)
        for number, copies in enumerate(blocks):
            at = start + number * BLOCK
            key = tuple(tokens[at : at + BLOCK])
            last.children[key] = last = Block(key, last, groups, copies)
        self._uncopied.append([copy for copies in blocks for copy in copies])
        self.nbytes += fit * size
        self._touch(last)

    def copy(self, *, wait: bool = True) -> None:
        """Copy what was inserted: a copy that is not computed keeps the whole batch's arrays alive. wait: False where what is
        under way on the device must not be waited for."""
        texts, self._uncopied = self._uncopied, []
        if not wait:
            # One by one: many copies at once are a CUDA graph that does not come again.
            for copies in texts:
                device.launch(copies)
        elif texts:
            device.wait(texts)

    def clear(self, owner: Owner) -> None:
        """Drop all blocks of one owner."""
        dropped = list(self._roots[owner].children.values())
        self._roots[owner].children.clear()
        while dropped:
            block = dropped.pop()
            dropped.extend(block.children.values())
            # Parents and children refer to each other: without this they would live until the garbage collector runs.
            block.children.clear()
            self._order.pop(block)
            self.nbytes -= block.nbytes

    def _match(self, owner: Owner, tokens: Sequence[int]) -> list[Block]:
        """The path of the longest cached prefix of `tokens`."""
        path: list[Block] = []
        block: Block | None = self._roots[owner]
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = block.children.get(tuple(tokens[start : start + BLOCK]))
            if block is None:
                break
            path.append(block)
        return path

    def _touch(self, block: Block) -> None:
        """Mark a block and its ancestors as used now, ancestors last."""
        while block.parent is not None:
            self._order[block] = None
            self._order.move_to_end(block)
            block = block.parent

    def _evict(self, wanted: int, last: Block) -> int:
        """Evict the least recently used blocks until `wanted` bytes are free, or only the path that ends in `last` is left.
        Returns the free bytes."""
        while self.budget - self.nbytes < wanted and self._order:
            oldest = next(iter(self._order))
            if oldest is last or oldest.parent is None:
                break
            self._order.pop(oldest)
            oldest.parent.children.pop(oldest.tokens)
            self.nbytes -= oldest.nbytes
        return self.budget - self.nbytes


def _groups(arrays: Sequence[mx.array | None]) -> Groups:
    found: dict[tuple[object, ...], list[int]] = {}
    for index, array in enumerate(arrays):
        # Layers that share another layer's keys and values have none.
        if array is not None:
            found.setdefault((array.shape[1], array.shape[3], array.dtype), []).append(index)
    return tuple(tuple(members) for members in found.values())


def _copies(
    groups: Groups, arrays: Sequence[mx.array | None], row: int, start: int, blocks: int
) -> list[list[mx.array]]:
    """By block and group, the positions of so many blocks from `start` on."""
    end = start + blocks * BLOCK
    wholes = [
        [a[row : row + 1, :, start:end] for index in members if (a := arrays[index]) is not None] for members in groups
    ]
    joined = [_copy(parts) for parts in wholes]
    # A block by itself: parts of one array would live until the last of them was evicted.
    return [[_copy([each[:, :, at : at + BLOCK]]) for each in joined] for at in range(0, blocks * BLOCK, BLOCK)]


def _copy(parts: Sequence[mx.array]) -> mx.array:
    # Concatenating a single part would return a view of it; an empty second part forces a copy.
    return mx.concatenate([*parts, parts[0][:0]])


def _load(paths: Sequence[Sequence[Block]], cache: RowCache, positions: int) -> None:
    """Set the keys and values of an empty cache to these blocks, a path for each row, with capacity for `positions`."""
    width = current().capacity(positions)
    like = next(path[0] for path in paths if path)
    for group, (members, array) in enumerate(zip(like.groups, like.arrays, strict=True)):
        _, heads, _, dims = array.shape
        for place, index in enumerate(members):
            rows: list[mx.array] = []
            for path in paths:
                parts = [block.arrays[group][place : place + 1] for block in path]
                spare = mx.zeros((1, heads, width - len(path) * BLOCK, dims), dtype=array.dtype)
                rows.append(mx.concatenate([*parts, spare], axis=2))
            whole = rows[0] if len(rows) == 1 else mx.concatenate(rows)
            layer = cache.attention[index // 2]
            if index % 2:
                layer.values = whole
            else:
                layer.keys = whole
    cache.rewind([len(path) * BLOCK for path in paths])
