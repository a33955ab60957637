"""The tokens a draft can propose: a ranked list beside its weights, by which its head is cut to the size of its traffic.

A head of 49,152 rows is most of a small draft's step. Frequency-ranked vocabularies for drafting: FR-Spec (Zhao et al.,
arXiv 2502.14856). A token outside is never proposed, which costs acceptance and never changes the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import ModelError
from service.models import shipped

FILE = shipped.VOCABULARY
"""As a safetensors file it is part of a model's fingerprint, and of an adapter folder's hash."""
OWN = 512
"""Ids outside the list that a row may propose besides, its latest."""
_WIDE = 16


def read(folder: Path) -> list[int] | None:
    """Token ids, best rank first; None where the folder has no list. Raises ModelError when the file is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        ids = mx.load(str(path))["ids"]  # pyright: ignore[reportCallIssue, reportArgumentType, reportIndexIssue]
        found = np.array(ids)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if found.dtype != np.uint32 or found.ndim != 1 or found.size == 0 or np.unique(found).size != found.size:
        raise ModelError(f"{path} is not a list of distinct token ids")
    return found.tolist()


def write(ids: Sequence[int], folder: Path) -> None:
    """Beside the weights in an existing folder."""
    mx.save_safetensors(str(folder / FILE), {"ids": mx.array(np.array(ids, dtype=np.uint32))})


def ranked(texts: Iterable[Sequence[int]], always: Iterable[int], width: int) -> list[int]:
    """All ids below `width`: `always` first, then by how often the texts hold them, then by id (a tokenizer's early merges
    are the common ones)."""
    counts: NDArray[np.int64] = np.zeros(width, dtype=np.int64)
    for text in texts:
        counts += np.bincount(np.asarray(text, dtype=np.int64), minlength=width)[:width]
    first = list(dict.fromkeys(always))
    rest: list[int] = np.argsort(-counts, kind="stable").tolist()
    return list(dict.fromkeys([*first, *rest]))


def adapted(base: Sequence[int], texts: Iterable[Sequence[int]], always: Iterable[int]) -> list[int]:
    """As many ids as `base` has: `always` and what the texts hold first, by frequency, then the base's in their order."""
    counts: dict[int, int] = {}
    for text in texts:
        for token in text:
            counts[token] = counts.get(token, 0) + 1
    seen = sorted(counts, key=lambda token: (-counts[token], token))
    return list(dict.fromkeys([*always, *seen, *base]))[: len(base)]


def own(rows: Sequence[Sequence[int]], keeps: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The latest `OWN` distinct ids of each row that are not kept, (B, n), filled up with an id that is. A text's own words
    are what a short list misses most: with them, a few thousand ids propose nearly what all would."""
    found: list[NDArray[np.int64]] = []
    for row in rows:
        tokens = np.array(row, dtype=np.int64)
        # A wider target's ids may lie beyond the draft's head.
        tokens = tokens[tokens < len(keeps)]
        latest = tokens[~keeps[tokens]][::-1]
        _, at = np.unique(latest, return_index=True)
        found.append(latest[np.sort(at)[:OWN]])
    # Few different widths: each is a shape of its own to whoever computes with it.
    width = max(-(-max(map(len, found), default=0) // _WIDE), 1) * _WIDE
    wide = np.full((len(found), width), int(np.argmax(keeps)), dtype=np.int32)
    for line, ids in zip(wide, found, strict=True):
        line[: len(ids)] = ids
    return wide
