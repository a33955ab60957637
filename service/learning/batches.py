"""Padded batches of training examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from service.learning.examples import Example, Ints
from service.learning.masks import stack_masks
from service.models.padding import padded, padded_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples padded at the end to one length L, and their response positions, padded to N.

    tokens: (B, L) int32. at: (N,) index into the B x L hidden states that predict. ids, logprobs: (N, top). tail: (N,).
    weight: (N,), 1 at response positions and 0 at padding. examples: the source of the batch. masks: (U, W) uint32, see
    AnswerMasks, and mask: (N,) the row of `masks` for each position; None when no answer had to follow a grammar.
    """

    tokens: mx.array
    at: mx.array
    ids: mx.array
    logprobs: mx.array
    tail: mx.array
    weight: mx.array
    examples: tuple[Example, ...]
    masks: mx.array | None = None
    mask: mx.array | None = None

    @property
    def count(self) -> int:
        """Input tokens, without padding."""
        return sum(len(example.tokens) for example in self.examples)

    @property
    def rows(self) -> int:
        """Number of examples, B."""
        return len(self.examples)

    @property
    def loss_weight(self) -> float:
        """Number of response positions, without padding: the loss is a mean over these."""
        return float(sum(example.positions for example in self.examples))

    @property
    def texts(self) -> list[Ints]:
        """Each text from its first token to the end of its window."""
        return [np.concatenate([example.before, example.tokens]) for example in self.examples]

    @property
    def starts(self) -> list[int]:
        """Index in each text at which its window starts."""
        return [len(example.before) for example in self.examples]

    def split(self, rows: int) -> list[Batch]:
        """The same examples in batches of at most `rows`, each padded to its own length."""
        return [collate(self.examples[start : start + rows]) for start in range(0, self.rows, rows)]


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[Batch]:
    """One epoch: every example once, in batches of `size` examples of similar length, in an order drawn from `seed`."""
    rng = np.random.default_rng(seed)
    shuffled: list[int] = rng.permutation(len(examples)).tolist()
    by_length = sorted(shuffled, key=lambda i: padded(len(examples[i].tokens)))
    groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    order: list[int] = rng.permutation(len(groups)).tolist()
    for index in order:
        yield collate([examples[i] for i in groups[index]])


def collate(examples: Sequence[Example]) -> Batch:
    """Pads examples (at least one, all with the same number of targets per position) into one batch."""
    length = padded(max(len(example.tokens) for example in examples))
    at = np.concatenate(
        [np.arange(e.positions, dtype=np.int32) + row * length + e.start for row, e in enumerate(examples)]
    )
    spare = padded(len(at)) - len(at)
    # Padding needs distinct ids and a finite distribution, and has weight 0.
    top = examples[0].ids.shape[1]
    ids = np.broadcast_to(np.arange(top, dtype=np.int32), (spare, top))
    even = np.full((spare, top), -np.log(top), dtype=np.float32)
    none = np.full(spare, -np.inf, dtype=np.float32)
    masks, mask = _masks(examples, spare)
    return Batch(
        tokens=mx.array(padded_rows([example.tokens for example in examples])),
        at=mx.array(np.pad(at, (0, spare))),
        ids=mx.array(np.concatenate([*(e.ids for e in examples), ids])),
        logprobs=mx.array(np.concatenate([*(e.logprobs for e in examples), even])),
        tail=mx.array(np.concatenate([*(e.tail for e in examples), none])),
        weight=mx.array(np.pad(np.ones(len(at), dtype=np.float32), (0, spare))),
        examples=tuple(examples),
        masks=masks,
        mask=mask,
    )


def _masks(examples: Sequence[Example], spare: int) -> tuple[mx.array | None, mx.array | None]:
    """Batch.masks and Batch.mask."""
    stacked = stack_masks([example.masks for example in examples])
    if stacked is None:
        return None, None
    words, rows = stacked
    mask = np.concatenate([np.broadcast_to(row, e.positions) for row, e in zip(rows, examples, strict=True)])
    return mx.array(words), mx.array(np.pad(mask.astype(np.int32), (0, spare)))
