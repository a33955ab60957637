"""What this process still refers to: a search through all objects that Python's garbage collector can reach."""

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import cast

import numpy as np

KINDS = (str, bytes, bytearray, list, tuple, np.ndarray)


def holders(secrets: Callable[[], tuple[Sequence[Sequence[int]], Sequence[str]]]) -> list[str]:
    """Descriptions of the objects that hold a secret, as text, as UTF-8 or as numbers; empty: none does. secrets: makes
    sequences of token ids, and texts, which are not to exist outside this call. What C or C++ code alone holds is not seen, nor
    what is in a local variable of a function that runs."""
    tokens, texts = secrets()
    needles = [array("I", each).tobytes() for each in tokens] + [each.encode() for each in texts]
    own = {id(each) for each in (tokens, texts, needles, *tokens, *texts, *needles)}
    gc.collect()
    found: list[str] = []
    for owner, thing in _things():
        if id(thing) in own:
            continue
        if isinstance(thing, str):
            held = any(each in thing for each in texts)
        else:
            raw = _bytes(thing)
            held = raw is not None and any(each in raw for each in needles)
        if held:
            found.append(f"{type(thing).__name__} in {_described(owner)}")
    return found


def _things() -> Iterator[tuple[object, object]]:
    """Everything of KINDS, and what refers to it."""
    tracked = gc.get_objects()
    seen: set[int] = set()
    for owner in tracked:
        if owner is tracked or isinstance(owner, FrameType | ModuleType):
            continue
        if type(owner) in KINDS:
            yield owner, owner
        # Texts, bytes and tuples of numbers are not tracked themselves.
        queue: list[object] = gc.get_referents(owner)
        if isinstance(owner, dict):
            # Of keys that are texts the collector knows nothing.
            queue += list(cast("dict[object, object]", owner))
        while queue:
            thing = queue.pop()
            if type(thing) in KINDS and not gc.is_tracked(thing) and id(thing) not in seen:
                seen.add(id(thing))
                yield owner, thing
                queue += gc.get_referents(thing)


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
