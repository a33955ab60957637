"""What this process still refers to: a search through all objects that Python's garbage collector can reach."""

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import cast

import numpy as np

KINDS = (str, bytes, bytearray, list, tuple, dict, np.ndarray)
BATCH = 10_000
"""Objects whose referents are asked for at once, which takes a tenth of asking for those of each."""


def holders(secrets: Callable[[], tuple[Sequence[Sequence[int]], Sequence[str]]]) -> list[str]:
    """Descriptions of the objects that hold a secret, as text, as UTF-8 or as numbers; empty: none does. secrets: makes
    sequences of token ids, and texts, which are not to exist outside this call. What C or C++ code alone holds is not seen, nor
    what is in a local variable of a function that runs."""
    tokens, texts = secrets()
    needles = [array("I", each).tobytes() for each in tokens] + [each.encode() for each in texts]
    own = {id(each) for each in (tokens, texts, needles, *tokens, *texts, *needles)}
    shortest = min(map(len, (*texts, *needles)))

    def holds(thing: object) -> bool:
        if isinstance(thing, str):
            return len(thing) >= shortest and any(each in thing for each in texts)
        raw = _bytes(thing)
        return raw is not None and any(each in raw for each in needles)

    # What was frozen after the tests were collected is searched too.
    gc.unfreeze()
    gc.collect()
    gc.disable()
    try:
        return _found(holds, own)
    finally:
        gc.enable()


def _found(holds: Callable[[object], bool], own: set[int]) -> list[str]:
    tracked = [each for each in gc.get_objects() if type(each) not in (FrameType, ModuleType)]
    found, seen = list[str](), set(own)
    for start in range(0, len(tracked), BATCH):
        batch = tracked[start : start + BATCH]
        things = {id(thing): thing for thing in _things(batch) if id(thing) not in seen}
        seen |= things.keys()
        held = {number for number, thing in things.items() if holds(thing)}
        # Which of the batch refers to it is asked where something was found.
        for owner in batch if held else ():
            mine = {id(thing): thing for thing in _things([owner]) if id(thing) in held}
            held -= mine.keys()
            found += [f"{type(thing).__name__} in {_described(owner)}" for thing in mine.values()]
    return found


def _things(owners: Sequence[object]) -> Iterator[object]:
    """Those of KINDS among them, and what they refer to of KINDS that is not tracked itself: texts, bytes, tuples and
    dictionaries of them."""
    yield from (owner for owner in owners if type(owner) in KINDS)
    while owners:
        queue: list[object] = gc.get_referents(*owners)
        for owner in owners:
            if isinstance(owner, dict):
                # Of keys that are texts the collector knows nothing. Not list(owner): a subclass may import what it lists.
                queue += dict.keys(cast("dict[object, object]", owner))
        owners = list(
            {id(thing): thing for thing in queue if type(thing) in KINDS and not gc.is_tracked(thing)}.values()
        )
        yield from owners


def _bytes(thing: object) -> bytes | None:
    """Numbers as little-endian uint32; None where there are others."""
    if isinstance(thing, bytes | bytearray):
        return bytes(thing)
    if isinstance(thing, np.ndarray):
        return thing.astype("<u4").tobytes() if thing.dtype.kind in "iu" else None
    if not isinstance(thing, list | tuple) or not thing or type(thing[0]) is not int:
        return None
    try:
        return array("I", thing).tobytes()
    except (TypeError, OverflowError):
        return None


def _described(owner: object) -> str:
    names = sorted({type(each).__name__ for each in gc.get_referrers(owner)} - {"generator", "list"})
    return f"{type(owner).__module__}.{type(owner).__qualname__}, referred to by {', '.join(names)}"
