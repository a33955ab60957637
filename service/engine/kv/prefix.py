"""Prefix cache: keys and values of prompts and answers, reused by requests whose prompts start with the same tokens.

A cached prefix is a path of nodes in a tree. A node holds a block of BLOCK positions and is found under its parent by its
tokens, without a hash, so that prefixes share blocks and none is confused with another. Only prompt tokens and verified tokens
are inserted. Blocks are pages that rows have filled, or copies, where rows are in rectangles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import mlx.core as mx

from service.engine import device
from service.engine.kv.cache import RowCache
from service.engine.kv.pool import Page, Pool
from service.engine.kv.rectangles import Block
from service.engine.strategy import PAGE

BLOCK = PAGE
"""Positions of a block. The rest of a prefix, less than a block, is prefilled again."""


class Owner(StrEnum):
    """The model whose keys and values these are. `clear` those of the draft when another version of it serves."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(slots=True, eq=False)
class Node:
    """A block, and what may follow it. A root has none. used: a number that grows with each use of any node."""

    owner: Owner
    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    block: Page | Block | None = None
    nbytes: int = 0
    used: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict["tuple[int, ...]", "Node"])


class PrefixCache:
    """A tree for each owner, at most `budget` bytes in all. Evicts the least recently used leaf first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._roots = {owner: Node(owner) for owner in Owner}
        self._uncopied: list[list[mx.array]] = []
        """By text."""
        self._uses = 0
        self._order = {owner: OrderedDict[Node, None]() for owner in Owner}
        """Least recently used first. Using a node uses its ancestors too, after it, so the first one is always a leaf."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node of all owners but the roots, least recently used first."""
        return tuple(sorted((node for order in self._order.values() for node in order), key=lambda node: node.used))

    def cached_length(self, owner: Owner, tokens: Sequence[int]) -> int:
        """Positions of the longest cached prefix of `tokens`; 0 for a model with recurrent layers."""
        return len(_usable(self._match(owner, tokens))) * BLOCK

    def load(self, owner: Owner, texts: Sequence[Sequence[int]], cache: RowCache) -> None:
        """Load the longest cached prefix of each text into its row of an empty cache, with capacity for the longest text."""
        paths = [_usable(self._match(owner, tokens)) for tokens in texts]
        for path in paths:
            if path:
                self._touch(path[-1])
        if any(paths):
            cache.storage.load([[node.block for node in path] for path in paths], max(map(len, texts)))
            cache.rewind([len(path) * BLOCK for path in paths])

    def insert(self, owner: Owner, tokens: Sequence[int], cache: RowCache, row: int = 0) -> None:
        """Insert blocks of BLOCK of `row`'s keys and values for `tokens`, those that are not cached yet, as many as the budget
        allows; `copy` must follow. Does nothing for a model with recurrent layers, whose state cannot be cut into blocks."""
        if cache.states:
            return
        count = min(len(tokens), cache.lengths.host[row]) // BLOCK
        path = self._match(owner, tokens[: count * BLOCK])
        last = path[-1] if path else self._roots[owner]
        self._touch(last)
        size = cache.storage.block_bytes
        # What was no longer held by the row that inserted it is by this one, perhaps.
        start = next((i for i, node in enumerate(path) if not _whole(node)), len(path))
        if start == count or not size:
            return
        fit = min(count - start, self._evict((count - start) * size, last) // size)
        copies = list[mx.array]()
        blocks: Sequence[Page | Block] = cache.storage.blocks(row, start, fit)
        for number, block in enumerate(blocks, start):
            if number >= len(path):
                key = tuple(tokens[number * BLOCK : (number + 1) * BLOCK])
                last.children[key] = last = Node(owner, key, last)
                path.append(last)
            elif _whole(path[number]) or not (isinstance(block, Block) and block.whole):
                continue
            node = path[number]
            self.nbytes += block.nbytes - node.nbytes
            node.block, node.nbytes = block, block.nbytes
            copies += block.arrays.values() if isinstance(block, Block) else ()
        if copies:
            self._uncopied.append(copies)
        self._touch(last)

    def reclaim(self, pool: Pool) -> bool:
        """Take the least recently used page of a pool out. False where there is none."""
        for order in self._order.values():
            # All pages of an owner are of one pool.
            first = next(iter(order), None)
            if first is not None and isinstance(first.block, Page) and first.block.pool is pool:
                self._drop(first)
                return True
        return False

    def copy(self, *, wait: bool = True) -> None:
        """Compute copies that were inserted: one that is not keeps the whole batch's arrays alive. wait: False where what is
        under way on the device must not be waited for."""
        texts, self._uncopied = self._uncopied, []
        if texts:
            (device.wait if wait else device.launch)(texts)

    def clear(self, owner: Owner) -> None:
        """Drop all blocks of one owner."""
        dropped = list(self._roots[owner].children.values())
        self._roots[owner].children.clear()
        while dropped:
            node = dropped.pop()
            dropped.extend(node.children.values())
            # Parents and children refer to each other: without this they would live until the garbage collector runs.
            node.children.clear()
            self._order[owner].pop(node)
            self.nbytes -= node.nbytes

    def _match(self, owner: Owner, tokens: Sequence[int]) -> list[Node]:
        """The path of the longest cached prefix of `tokens`."""
        path: list[Node] = []
        node: Node | None = self._roots[owner]
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            node = node.children.get(tuple(tokens[start : start + BLOCK]))
            if node is None:
                break
            path.append(node)
        return path

    def _touch(self, node: Node) -> None:
        """Mark a node and its ancestors as used now, ancestors last."""
        while node.parent is not None:
            order = self._order[node.owner]
            order[node] = None
            order.move_to_end(node)
            self._uses += 1
            node.used = self._uses
            node = node.parent

    def _evict(self, wanted: int, last: Node) -> int:
        """Evict the least recently used blocks until `wanted` bytes are free, or only the path that ends in `last` is left.
        Returns the free bytes."""
        while self.budget - self.nbytes < wanted and any(self._order.values()):
            oldest = min((next(iter(order)) for order in self._order.values() if order), key=lambda node: node.used)
            if oldest is last or oldest.parent is None:
                break
            self._drop(oldest)
        return self.budget - self.nbytes

    def _drop(self, leaf: Node) -> None:
        assert leaf.parent is not None
        self._order[leaf.owner].pop(leaf)
        leaf.parent.children.pop(leaf.tokens)
        self.nbytes -= leaf.nbytes


def _whole(node: Node) -> bool:
    """Whether a node holds all layers: without the last positions before its end, one with a sliding window cannot go on."""
    return not isinstance(node.block, Block) or node.block.whole


def _usable(path: list[Node]) -> list[Node]:
    """The longest part of a path at whose end all layers hold what a window sees."""
    while path:
        reach = path[-1].block.reach if isinstance(path[-1].block, Block) else 0
        gap = next((i for i in range(len(path) - 1, max(len(path) - reach, 0) - 1, -1) if not _whole(path[i])), None)
        if gap is None:
            break
        path = path[:gap]
    return path
