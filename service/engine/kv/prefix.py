"""Prefix cache: keys and values of prompts and answers, reused by requests whose prompts start with the same tokens.

A cached prefix is a path of nodes in a tree. A node holds a block of BLOCK positions. It is found under its parent by its
tokens, not by a hash, so prefixes share blocks and cannot be confused. Texts with different salts (core.Prompt.cache_salt) are
in separate trees. Only prompt tokens and verified tokens are inserted. Blocks are the pages that rows have filled, or copies if
rows are in rectangles. The target's blocks can also be kept in files (`prefix_files`), from which they are loaded into the
tree.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import mlx.core as mx

from service.engine import device
from service.engine.kv.cache import RowCache
from service.engine.kv.pool import Page, PageBlock, Pool
from service.engine.kv.prefix_files import FILE_BLOCKS, LEAST, File, Piece, PrefixFiles
from service.engine.kv.rectangles import Block
from service.engine.strategy import PAGE

BLOCK = PAGE
"""Positions of a block. The remainder of a prefix, less than a block, is prefilled again."""
Held: TypeAlias = Page | PageBlock | Block
"""What a node holds of a block's positions."""


class Owner(StrEnum):
    """The model that computed the keys and values. Use `clear` for the draft's when another version of it serves."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(slots=True, eq=False)
class Node:
    """A block and its possible continuations. A root has no block. used: increases with every use of any node. file: the file
    that also holds the block. salt: of the texts in this tree."""

    owner: Owner
    salt: str = ""
    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    block: Held | None = None
    nbytes: int = 0
    used: int = 0
    file: File | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict["tuple[int, ...]", "Node"])


class PrefixCache:
    """One tree per owner and salt, at most `budget` bytes in total. Evicts the least recently used leaf first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.room: Callable[[], int] | None = None
        """Bytes that rows in rectangles currently leave free; None: at least `budget`."""
        self.nbytes = 0
        self._roots: dict[tuple[Owner, str], Node] = {}
        """The roots of all trees used so far."""
        self._uncopied: list[list[mx.array]] = []
        """Copies not computed yet, by text."""
        self._uses = 0
        self._order = {owner: OrderedDict[Node, None]() for owner in Owner}
        """Least recently used first. Using a node also uses its ancestors, after it, so the first node is always a leaf."""
        self.files: PrefixFiles | None = None
        """Where the target's blocks are also kept; None: in memory only."""
        self.tokens_read = 0
        """Tokens whose blocks were loaded from files."""
        self._unsaved: dict[Node, bool] = {}
        """The ends of texts with blocks that are in no file. True: `save` found too few of them last time."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node of all owners except the roots, least recently used first."""
        return tuple(sorted((node for order in self._order.values() for node in order), key=lambda node: node.used))

    def cached_length(self, owner: Owner, tokens: Sequence[int], salt: str = "") -> int:
        """Positions of the longest cached prefix of `tokens`; 0 for a model with recurrent layers."""
        return len(_usable(self._match(owner, tokens, salt))) * BLOCK

    def load(self, owner: Owner, texts: Sequence[Sequence[int]], cache: RowCache, salts: Sequence[str] = ()) -> None:
        """Load the longest cached prefix of each text into its row of an empty cache, with capacity for the longest text.
        salts: of each text; empty: no text has a salt."""
        salted = zip(texts, salts or [""] * len(texts), strict=True)
        paths = [_usable(self._match(owner, tokens, salt)) for tokens, salt in salted]
        for path in paths:
            if path:
                self._touch(path[-1])
            if self.files is not None:
                self.files.use(_files(path))
        if any(paths):
            cache.storage.load([[node.block for node in path] for path in paths], max(map(len, texts)))
            cache.rewind([len(path) * BLOCK for path in paths])

    def insert(self, owner: Owner, tokens: Sequence[int], cache: RowCache, row: int = 0, salt: str = "") -> None:
        """Insert the blocks of `row` for `tokens` that are not cached yet, as many as the budget allows. `copy` must follow.
        Does nothing for a model with recurrent layers, whose state cannot be split into blocks."""
        if cache.states:
            return
        count = min(len(tokens), cache.lengths.host[row]) // BLOCK
        path = self._match(owner, tokens[: count * BLOCK], salt)
        last = path[-1] if path else self._root(owner, salt)
        self._touch(last)
        size = cache.storage.block_bytes
        # The row that inserted a block may have released pages that this row still holds.
        held = cache.storage.first_whole(row)
        start = next((i for i, node in enumerate(path) if i >= held and not _whole(node)), len(path))
        if start == count or not size:
            return
        fit = min(count - start, self._evict((count - start) * size, last) // size)
        blocks: Sequence[Held] = cache.storage.blocks(row, start, fit)
        replaced = [
            (node, block) for node, block in zip(path[start:], blocks, strict=False) if block.whole and not _whole(node)
        ]
        for node, block in replaced:
            self.nbytes += block.nbytes - node.nbytes
            node.block, node.nbytes = block, block.nbytes
        new = blocks[len(path) - start :]
        end = self._append(last, tokens, len(path), new)
        inserted = [block for block in (*(block for _, block in replaced), *new) if isinstance(block, Block)]
        if uncopied := [array for block in inserted for array in block.arrays.values()]:
            self._uncopied.append(uncopied)
        if self.files is not None and owner is Owner.TARGET and new:
            self._unsaved.pop(last, None)
            self._unsaved[end] = False

    def _append(
        self,
        last: Node,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[Held],
        file: File | None = None,
    ) -> Node:
        """Append nodes for a text's blocks, starting with block `start`. Returns the last node."""
        for number, block in enumerate(blocks, start):
            key = tuple(tokens[number * BLOCK : (number + 1) * BLOCK])
            last.children[key] = last = Node(last.owner, last.salt, key, last, block, block.nbytes, file=file)
            self.nbytes += block.nbytes
        self._touch(last)
        return last

    def find(self, tokens: Sequence[int], speed: float | None, salt: str = "") -> list[Piece]:
        """The pieces of files that hold the target's blocks of a text that are not in memory. Empty if prefilling them is
        faster. speed: prefilled tokens per second; None: not known."""
        if self.files is None:
            return []
        pieces = self.files.find(tokens, len(self._match(Owner.TARGET, tokens, salt)), salt)
        count = sum(piece.last - piece.first for piece in pieces) * BLOCK
        return pieces if pieces and self.files.pays(count, speed) else []

    def reads_faster(self, speed: float | None) -> bool:
        """Whether loading is faster than prefilling, as far as that is known. speed: as for `find`."""
        return self.files is not None and self.files.faster(speed) is not False

    def read(self, tokens: Sequence[int], piece: Piece, cache: RowCache, salt: str = "") -> bool:
        """Load a piece returned by `find` into the tree, as much as the budget allows. cache: the rows that will load it.
        Returns False if the pieces after it cannot be used."""
        assert self.files is not None
        started_at, tokens = time.perf_counter(), tokens[: piece.last * BLOCK]
        path = self._match(Owner.TARGET, tokens, salt)
        if len(path) == piece.last:
            return True
        last = path[-1] if path else self._root(Owner.TARGET, salt)
        # Pages may have space that files do not need.
        size = max(self.files.block_bytes, cache.storage.block_bytes)
        self._touch(last)
        missing = piece.last - len(path)
        fit = min(missing, self._evict(missing * size, last) // size)
        if len(path) < piece.first or fit <= 0 or (found := self.files.read(piece, len(path), fit)) is None:
            return False
        try:
            blocks: Sequence[Held] = cache.storage.adopt(found)
        except MemoryError:
            return False
        # Blocks of the path itself may have been evicted to get pages.
        if self._match(Owner.TARGET, tokens, salt) != path:
            return False
        self._append(last, tokens, len(path), blocks, piece.file)
        self.tokens_read += fit * BLOCK
        self.files.observe_read(fit * self.files.block_bytes, time.perf_counter() - started_at)
        return fit == missing

    def save(self, least: int = 1) -> bool:
        """Write one file with the next unsaved blocks of a text, if they hold at least `least` tokens and the text has at least
        LEAST. Returns whether a file was due. With least > 1, texts with too few unsaved tokens are skipped until they have
        grown."""
        if self.files is None:
            return False
        for end in [node for node, seen in self._unsaved.items() if not seen or least == 1]:
            path = _path(end)
            for node in path:
                if node.file is not None and not self.files.has(node.file):
                    node.file = None
            first = next((i for i, node in enumerate(path) if node.file is None), len(path))
            count = next((i for i, node in enumerate(path[first:]) if node.file is not None), len(path) - first)
            if not count:
                del self._unsaved[end]
            elif count * BLOCK < least or len(path) * BLOCK < LEAST:
                self._unsaved[end] = True
            else:
                self._write(end, path[: first + min(count, FILE_BLOCKS)], first)
                return True
        return False

    def _write(self, end: Node, path: Sequence[Node], first: int) -> None:
        """Write the blocks of a path from block `first` on, unless files already hold them: prompts are prefilled again where
        that is faster than loading."""
        assert self.files is not None
        tokens = [token for node in path for token in node.tokens]
        if found := self.files.find(tokens, first, end.salt):
            file, path = found[0].file, path[: found[0].last]
        else:
            file = self.files.write(tokens, copies([node.block for node in path[first:]]), _files(path), end.salt)
        if file is None:
            # Do not retry. Retrying would remove files that were written just before.
            del self._unsaved[end]
        for node in path[first:]:
            node.file = file

    def discard(self, tokens: Sequence[int], salt: str = "") -> None:
        """Drop what is cached of a failed request's text: the blocks that no other text continues, and everything from the
        first block with non-finite values on. One host sync per owner."""
        for owner in Owner:
            path = self._match(owner, tokens, salt)
            sound = _finite(path)
            if sound < len(path):
                node = path[sound]
                assert node.parent is not None
                node.parent.children.pop(node.tokens)
                self._drop_all([node])
            for node in reversed(path[:sound]):
                if node.children:
                    break
                self._drop(node)

    def forget(self) -> None:
        """Drop every block of all owners, in memory and in files. Texts with a common prefix share blocks, and blocks do not
        record their origin."""
        for owner in Owner:
            self.clear(owner)
        if self.files is not None:
            self.files.forget()

    def reclaim(self, pool: Pool) -> bool:
        """Evict the least recently used block that holds pages of this pool. Returns False if there is none."""
        for order in self._order.values():
            # All pages of an owner belong to one pool.
            first = next(iter(order), None)
            if first is not None and isinstance(first.block, Page | PageBlock) and first.block.pool is pool:
                self._drop(first)
                return True
        return False

    def copy(self, *, wait: bool = True) -> None:
        """Compute the inserted copies; an uncomputed copy keeps the arrays of the whole batch alive. wait: False to not wait
        for pending work on the device."""
        texts, self._uncopied = self._uncopied, []
        if texts:
            (device.wait if wait else device.launch)(texts)

    def clear(self, owner: Owner) -> None:
        """Drop all blocks of one owner."""
        for root in [root for root in self._roots.values() if root.owner is owner]:
            dropped = list(root.children.values())
            root.children.clear()
            self._drop_all(dropped)

    def _drop_all(self, dropped: list[Node]) -> None:
        """Drop these nodes, already removed from their parents, and all their descendants."""
        while dropped:
            node = dropped.pop()
            dropped.extend(node.children.values())
            # Break the reference cycle between parents and children, which would otherwise live until garbage collection.
            node.children.clear()
            self._order[node.owner].pop(node)
            self._unsaved.pop(node, None)
            self.nbytes -= node.nbytes

    def _root(self, owner: Owner, salt: str) -> Node:
        return self._roots.setdefault((owner, salt), Node(owner, salt))

    def _match(self, owner: Owner, tokens: Sequence[int], salt: str) -> list[Node]:
        """The path of the longest cached prefix of `tokens`."""
        path: list[Node] = []
        node: Node | None = self._root(owner, salt)
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            node = node.children.get(tuple(tokens[start : start + BLOCK]))
            if node is None:
                break
            path.append(node)
        return path

    def _touch(self, node: Node) -> None:
        """Mark a node and its ancestors as just used, ancestors last."""
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
        limit = self.budget if self.room is None else min(self.budget, self.room())
        while limit - self.nbytes < wanted and (oldest := self._oldest()) is not None:
            if oldest is last or oldest.parent is None:
                break
            self._drop(oldest)
        return max(limit - self.nbytes, 0)

    def shrink(self, limit: int) -> None:
        """Evict the least recently used blocks until at most `limit` bytes are held."""
        while self.nbytes > limit and (oldest := self._oldest()) is not None:
            self._drop(oldest)

    def _oldest(self) -> Node | None:
        """The least recently used leaf."""
        ends = [next(iter(order)) for order in self._order.values() if order]
        return min(ends, key=lambda node: node.used, default=None)

    def _drop(self, leaf: Node) -> None:
        assert leaf.parent is not None
        self._order[leaf.owner].pop(leaf)
        leaf.parent.children.pop(leaf.tokens)
        self.nbytes -= leaf.nbytes
        if (seen := self._unsaved.pop(leaf, None)) is not None and leaf.parent.parent is not None:
            self._unsaved[leaf.parent] = seen


def _path(node: Node) -> list[Node]:
    """The nodes from the root, which is left out, to this node."""
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _finite(path: Sequence[Node]) -> int:
    """The number of leading blocks of a path whose values are all finite."""
    if not path:
        return 0
    flags = [
        mx.stack([mx.array(True), *(mx.isfinite(array).all() for array in block.arrays.values())]).all()
        for block in copies([node.block for node in path])
    ]
    (finite,) = device.read(mx.stack(flags))
    return int(finite.cumprod().sum())


def _files(path: Sequence[Node]) -> list[File]:
    """The files of a path, in order."""
    return list(dict.fromkeys(node.file for node in path if node.file is not None))


def copies(blocks: Sequence[Held | None]) -> list[Block]:
    """Copies of the contents of blocks of one owner, independent of any pool."""
    pages = [block for block in blocks if isinstance(block, Page | PageBlock)]
    return pages[0].pool.copies(pages) if pages else [block for block in blocks if isinstance(block, Block)]


def _whole(node: Node) -> bool:
    """Whether a node holds all layers. A layer with a sliding window cannot continue without the last positions before its
    end."""
    return node.block is None or node.block.whole


def _usable(path: list[Node]) -> list[Node]:
    """The longest part of a path that can be continued: at its end, all layers hold what a window sees."""
    while path:
        reach = 0 if path[-1].block is None else path[-1].block.reach
        gap = next((i for i in range(len(path) - 1, max(len(path) - reach, 0) - 1, -1) if not _whole(path[i])), None)
        if gap is None:
            break
        path = path[:gap]
    return path
