"""Prompts begin alike: what a model made of such a beginning is kept, and read only once.

A prefix is a chain of blocks of BLOCK positions, each found under the block before it by its own tokens: a beginning that many
share is held once, and no two can be taken for each other. Only tokens that were given or verified come in here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import mlx.core as mx

from service.engine import device
from service.engine.kv.buffers import STEP
from service.engine.kv.cache import RowCache

BLOCK = 32
"""Positions of a block; what is left of a prefix beyond whole blocks is read again."""

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Which of a model's arrays have one shape: 2 * layer stands for its keys, 2 * layer + 1 for its values."""


class Owner(StrEnum):
    """Whose keys and values. Of drafts only the version that serves holds any: `forget` them when it changes."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(slots=True, eq=False)
class Block:
    """Keys and values of BLOCK positions: an array per group, (members of the group, heads, BLOCK, dims). The root of an
    owner's chains has none."""

    tokens: tuple[int, ...] = ()
    parent: Block | None = None
    groups: Groups = ()
    arrays: list[mx.array] = field(default_factory=list[mx.array])
    after: dict[tuple[int, ...], Block] = field(default_factory=dict["tuple[int, ...]", "Block"])

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays)


class PrefixCache:
    """Blocks of at most `budget` bytes. Those whose last use is longest ago go first, and none before the blocks after it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._roots = {owner: Block() for owner in Owner}
        self._order: OrderedDict[Block, None] = OrderedDict()
        """Oldest use first. Using a block uses all before it, which then are younger: the oldest has none after it."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block of all owners, least recently used first."""
        return tuple(self._order)

    def held(self, owner: Owner, tokens: Sequence[int]) -> int:
        """Positions of the longest beginning of `tokens` that is held, 0 for a model with recurrent layers."""
        return len(self._chain(owner, tokens)) * BLOCK

    def fill(self, owner: Owner, texts: Sequence[Sequence[int]], cache: RowCache) -> None:
        """Give each row of an empty cache the longest beginning of its text that is held, and room for all of it."""
        chains = [self._chain(owner, tokens) for tokens in texts]
        for chain in chains:
            if chain:
                self._use(chain[-1])
        if any(chains):
            _restore(chains, cache, max(map(len, texts)))

    def enter(self, owner: Owner, tokens: Sequence[int], cache: RowCache, row: int = 0) -> None:
        """Copy what `row` holds for the beginning of `tokens`: the blocks that are new and whole, as many as fit. A state is
        that of its last position alone and cannot be cut into blocks: a model that keeps one leaves nothing here."""
        if cache.states:
            return
        whole = min(len(tokens), cache.lengths.host[row]) // BLOCK
        chain = self._chain(owner, tokens[: whole * BLOCK])
        last = chain[-1] if chain else self._roots[owner]
        self._use(last)
        missing = whole - len(chain)
        if not missing:
            return
        held = [array for layer in cache.attention for array in (layer.keys, layer.values)]
        groups = _groups(held)
        size = sum(a.shape[1] * BLOCK * a.shape[3] * a.dtype.size for a in held if a is not None)
        fit = min(missing, self._free(missing * size, last) // size)
        made: list[Block] = []
        for start in range(len(chain) * BLOCK, (len(chain) + fit) * BLOCK, BLOCK):
            key = tuple(tokens[start : start + BLOCK])
            made.append(Block(key, last, groups, _copies(groups, held, row, start)))
            last.after[key] = last = made[-1]
        # At once: a copy that is yet to be made keeps the whole batch's arrays alive.
        device.wait([block.arrays for block in made])
        self.nbytes += fit * size
        self._use(last)

    def forget(self, owner: Owner) -> None:
        """Drop everything of one owner."""
        gone = list(self._roots[owner].after.values())
        self._roots[owner].after.clear()
        while gone:
            block = gone.pop()
            gone.extend(block.after.values())
            # Parents and children hold each other: without this they would wait for the garbage collector.
            block.after.clear()
            self._order.pop(block)
            self.nbytes -= block.nbytes

    def _chain(self, owner: Owner, tokens: Sequence[int]) -> list[Block]:
        """The blocks held for the beginning of `tokens`."""
        chain: list[Block] = []
        block: Block | None = self._roots[owner]
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            block = block.after.get(tuple(tokens[start : start + BLOCK]))
            if block is None:
                break
            chain.append(block)
        return chain

    def _use(self, block: Block) -> None:
        """Make a block and all before it the youngest, the deepest the oldest of them."""
        while block.parent is not None:
            self._order[block] = None
            self._order.move_to_end(block)
            block = block.parent

    def _free(self, wanted: int, last: Block) -> int:
        """Drop the oldest blocks until `wanted` bytes are free, or none are left but the chain that ends in `last`, used just
        now. Returns how many are free."""
        while self.budget - self.nbytes < wanted and self._order:
            oldest = next(iter(self._order))
            if oldest is last or oldest.parent is None:
                break
            self._order.pop(oldest)
            oldest.parent.after.pop(oldest.tokens)
            self.nbytes -= oldest.nbytes
        return self.budget - self.nbytes


def _groups(held: Sequence[mx.array | None]) -> Groups:
    found: dict[tuple[object, ...], list[int]] = {}
    for index, array in enumerate(held):
        # Layers that read another's keys and values hold none.
        if array is not None:
            found.setdefault((array.shape[1], array.shape[3], array.dtype), []).append(index)
    return tuple(tuple(members) for members in found.values())


def _copies(groups: Groups, held: Sequence[mx.array | None], row: int, start: int) -> list[mx.array]:
    copies: list[mx.array] = []
    for members in groups:
        parts = [a[row : row + 1, :, start : start + BLOCK] for index in members if (a := held[index]) is not None]
        # A single part would stay a view of the batch; beside an empty one it is copied.
        copies.append(mx.concatenate([*parts, parts[0][:0]]))
    return copies


def _restore(chains: Sequence[Sequence[Block]], cache: RowCache, room: int) -> None:
    capacity = -(-room // STEP) * STEP
    like = next(chain[0] for chain in chains if chain)
    for group, (members, array) in enumerate(zip(like.groups, like.arrays, strict=True)):
        _, heads, _, dims = array.shape
        for place, index in enumerate(members):
            rows: list[mx.array] = []
            for chain in chains:
                parts = [block.arrays[group][place : place + 1] for block in chain]
                spare = mx.zeros((1, heads, capacity - len(chain) * BLOCK, dims), dtype=array.dtype)
                rows.append(mx.concatenate([*parts, spare], axis=2))
            whole = rows[0] if len(rows) == 1 else mx.concatenate(rows)
            layer = cache.attention[index // 2]
            if index % 2:
                layer.values = whole
            else:
                layer.keys = whole
    cache.rewind([len(chain) * BLOCK for chain in chains])
