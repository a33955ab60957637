"""Which layers of a model have their keys and values in the same pages.

Layers with a sliding window need their last positions alone, the others all of them: a page that holds both could not be given
back before the row ends. So a page holds one group of layers, all of one window, and a row has pages for each group. Groups are
equally large: their pages are of one size and come from one pool, whoever needs more of it. This is vLLM's hybrid KV cache
manager.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from service.engine.kv.window_layer import IN_FLIGHT
from service.engine.strategy import PAGE

REREAD = PAGE
"""Positions before the end of what is final that a call may read anew: a draft does, so that its calls are of few shapes."""


@dataclass(frozen=True, slots=True)
class Groups:
    """windows: by group, the positions that a query sees at most; None: all. places: by layer, its group and which of the
    pool's arrays it has in the group's pages; empty: one group, and layer i has arrays i."""

    windows: tuple[int | None, ...] = (None,)
    places: tuple[tuple[int, int], ...] = ()

    def place(self, layer: int) -> tuple[int, int]:
        """A layer's group, and which of the pool's arrays it has."""
        return self.places[layer] if self.places else (0, layer)

    @property
    def reach(self) -> int:
        """Blocks at the end of a cached prefix that have to be whole."""
        return max((-(-window // PAGE) for window in self.windows if window is not None), default=0)


WHOLE = Groups()
"""All layers in one group, which holds all positions."""


def grouped(windows: Sequence[int | None], kinds: Sequence[Hashable | None], *, features: bool) -> Groups:
    """How to group layers with such windows. kinds: what two layers must share to have the same arrays; None: the layer holds
    nothing. features: there is one more layer, of features, behind them.

    WHOLE where layers are not alike but for their windows, and where only features need all positions: a page for them would
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
    # Features, and whatever a layer may hold after all, have arrays of their own.
    whole = of_groups.index(None)
    for layer in range(len(windows) + features):
        places.setdefault(layer, (whole, size + layer))
    return Groups(tuple(of_groups), tuple(places[layer] for layer in range(len(places))))


def first_seen(window: int | None, length: int) -> int:
    """The first page of a row that a query from position `length` on may see, or one of a call that reads tokens anew."""
    return 0 if window is None else max(0, length - REREAD - window + 1) // PAGE


def most_held(window: int) -> int:
    """Positions of the pages that a row which decodes holds of a window at most."""
    return (-(-(window - 1 + REREAD + IN_FLIGHT) // PAGE) + 1) * PAGE
