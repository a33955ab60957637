"""Reduced draft vocabularies: a ranked list of token ids, stored with the draft's weights (FR-Spec, arXiv 2502.14856).

The draft's head is cut to these ids and, for each row, its extra ids. No other token is proposed, which lowers acceptance but
does not change the output.
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
"""Part of a model's fingerprint and of an adapter folder's hash, like any safetensors file there."""
MAX_EXTRA_IDS = 512
"""Maximum extra ids of a row."""
_FEWEST_EXTRA_IDS = 64
"""The number of extra ids is rounded up to this or a doubling of it, so that shapes repeat."""


def read(folder: Path) -> list[int] | None:
    """Token ids, best rank first; None if the folder has no list. Raises ModelError if the file is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        ids = mx.load(str(path))["ids"]  # pyright: ignore[reportCallIssue, reportArgumentType, reportIndexIssue]
        array = np.array(ids)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if array.dtype != np.uint32 or array.ndim != 1 or array.size == 0 or np.unique(array).size != array.size:
        raise ModelError(f"{path} is not a list of distinct token ids")
    return array.tolist()


def write(ids: Sequence[int], folder: Path) -> None:
    """Write the list (best rank first) to `FILE` in an existing model or adapter folder."""
    mx.save_safetensors(str(folder / FILE), {"ids": mx.array(np.array(ids, dtype=np.uint32))})


def ranked(texts: Iterable[Sequence[int]], always: Iterable[int], width: int) -> list[int]:
    """All ids below `width`, ranked: `always` first, then by frequency in the texts, then by id (a BPE tokenizer's early merges
    are the frequent ones)."""
    counts: NDArray[np.int64] = np.zeros(width, dtype=np.int64)
    for text in texts:
        counts += np.bincount(np.asarray(text, dtype=np.int64), minlength=width)[:width]
    first = list(dict.fromkeys(always))
    rest: list[int] = np.argsort(-counts, kind="stable").tolist()
    return list(dict.fromkeys([*first, *rest]))


def adapted(base: Sequence[int], texts: Iterable[Sequence[int]], always: Iterable[int]) -> list[int]:
    """As many ids as `base` has: `always`, then the ids of the texts by frequency, then those of `base` in order."""
    counts: dict[int, int] = {}
    for text in texts:
        for token in text:
            counts[token] = counts.get(token, 0) + 1
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    return list(dict.fromkeys([*always, *by_frequency, *base]))[: len(base)]


class ExtraIds:
    """Extra ids of a growing text: its latest distinct tokens outside the reduced vocabulary, at most MAX_EXTRA_IDS.

    tokens: the prompt and output of a row; `update` reads what was appended to it. in_vocabulary: (width,).
    """

    def __init__(self, tokens: Sequence[int], in_vocabulary: NDArray[np.bool_]) -> None:
        self.tokens = tokens
        self._in_vocabulary = in_vocabulary
        self._count = 0
        self._ids: dict[int, None] = {}
        """Oldest first."""

    def update(self) -> list[int]:
        """The extra ids, latest first."""
        for token in self.tokens[self._count :]:
            # A target with more tokens than the draft may have produced ids that the draft's head lacks.
            if token < len(self._in_vocabulary) and not self._in_vocabulary[token]:
                self._ids.pop(token, None)
                self._ids[token] = None
                if len(self._ids) > MAX_EXTRA_IDS:
                    self._ids.pop(next(iter(self._ids)))
        self._count = len(self.tokens)
        return [*reversed(self._ids)]


def padded(extra: Sequence[Sequence[int]], in_vocabulary: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Extra ids of several rows as one array (B, n), padded with an id of the reduced vocabulary."""
    width = max(1 << (max(map(len, extra), default=0) - 1).bit_length(), _FEWEST_EXTRA_IDS)
    array = np.full((len(extra), width), int(np.argmax(in_vocabulary)), dtype=np.int32)
    for line, ids in zip(array, extra, strict=True):
        line[: len(ids)] = ids
    return array


def extra_ids(rows: Sequence[Sequence[int]], in_vocabulary: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Extra ids (B, n) of rows, each given as its prompt and output."""
    return padded([ExtraIds(row, in_vocabulary).update() for row in rows], in_vocabulary)
