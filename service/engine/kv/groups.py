"""Groups the layers of a model whose keys and values share pages.

Layers with a sliding window need only their last positions, other layers need all of them. A page that holds both could not be
released before the row ends. Each page therefore holds one group of layers with the same window, and a row has pages for each
group. All groups have the same number of layers, so their pages have one size and come from one pool. This is the design of
vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from service.engine.kv.window_layer import IN_FLIGHT
from service.engine.strategy import PAGE

REREAD = PAGE
"""Positions before the committed end that a call may read again. A draft does this so that its calls have few shapes."""


@dataclass(frozen=True, slots=True)
class Groups:
    """windows: by group, the maximum positions that a query sees; None: all. places: by layer, its group and the index of its
    arrays in the pool; empty: one group, and layer i has arrays i."""

    windows: tuple[int | None, ...] = (None,)
    places: tuple[tuple[int, int], ...] = ()

    def place(self, layer: int) -> tuple[int, int]:
        """A layer's group, and the index of its arrays in the pool."""
        return self.places[layer] if self.places else (0, layer)

    @property
    def reach(self) -> int:
        """Number of blocks at the end of a cached prefix that must be whole."""
        return max((-(-window // PAGE) for window in self.windows if window is not None), default=0)


WHOLE = Groups()
"""All layers in one group, which holds all positions."""


def grouped(windows: Sequence[int | None], kinds: Sequence[Hashable | None], *, features: bool) -> Groups:
    """Groups layers by window. kinds: a key that layers with arrays of equal shape share; None: the layer holds nothing.
    features: one more layer, for features, follows.

    Returns WHOLE if layers differ in more than their windows, or if only features need all positions: a page for features would
    be as large as one for all layers.
    """
    held: dict[int | None, list[int]] = {}
    for layer, (window, kind) in enumerate(zip(windows, kinds, strict=True)):
        if kind is not None:
            held.setdefault(window, []).append(layer)
    if len(held) == 1 and not features:
        return Groups(tuple(held))
    if len({kind for kind in kinds if kind is not None}) != 1 or None not in held or len(held) == 1:
        return WHOLE
    size = min(map(len, held.values()))
    of_groups, places = list[int | None](), dict[int, tuple[int, int]]()
    for window, layers in held.items():
        for start in range(0, len(layers), size):
            places |= {layer: (len(of_groups), slot) for slot, layer in enumerate(layers[start : start + size])}
            of_groups.append(window)
    # Features, and layers that unexpectedly hold something, get separate arrays.
    whole = of_groups.index(None)
    for layer in range(len(windows) + features):
        places.setdefault(layer, (whole, size + layer))
    return Groups(tuple(of_groups), tuple(places[layer] for layer in range(len(places))))


def first_seen(window: int | None, length: int) -> int:
    """The first page of a row that may still be seen by a query at `length` or later, including calls that read tokens
    again."""
    return 0 if window is None else max(0, length - REREAD - window + 1) // PAGE


def most_held(window: int) -> int:
    """Maximum positions in the pages that a decoding row holds for a window."""
    return (-(-(window - 1 + REREAD + IN_FLIGHT) // PAGE) + 1) * PAGE
