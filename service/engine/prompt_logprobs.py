"""Log-probabilities of a prompt's tokens, from the logits of the target's prefill."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import LEAST_LOGPROB, PromptLogprobs
from service.engine import device
from service.engine.accept import finite_positions
from service.engine.top_logprobs import Floats, Ids, top_logits

LOGITS_BYTES = 2**26
"""Limit for a call's float32 logits. It determines how many tokens of a prompt are prefilled at a time if log-probabilities are
requested."""


def tokens_at_once(vocabulary: int) -> int:
    """Tokens of a prefill call whose logits fit into LOGITS_BYTES: a power of two, so that widths of calls repeat."""
    return 1 << max(LOGITS_BYTES // (4 * vocabulary), 1).bit_length() - 1


class PromptScores:
    """The log-probabilities of one prompt while it is prefilled. tokens: the prompt. count: number of most likely tokens kept
    per position."""

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self.tokens = tokens
        self.count = count
        self.scored = 0
        """Number of tokens with a log-probability so far, not counting the first token, which has none."""
        self.failed: int | None = None
        """The first position in the prompt whose logits are not finite."""
        self._logprobs: list[Floats] = []
        self._ranks: list[Ids] = []
        self._top_ids: list[Ids] = []
        self._top: list[Floats] = []

    @property
    def complete(self) -> bool:
        """Whether every token but the first has a log-probability."""
        return self.scored >= len(self.tokens) - 1

    def add(self, logprobs: Floats, ranks: Ids, top_ids: Ids, top: Floats, finite: NDArray[np.bool_]) -> None:
        """Append those of the next n tokens. logprobs, ranks, finite: (n,). top_ids, top: (n, at least `count`)."""
        if self.failed is None and not finite.all():
            self.failed = self.scored + 1 + int(np.argmin(finite))
        # Copied, because a view would keep what was read for the whole call.
        self._logprobs.append(np.maximum(logprobs, LEAST_LOGPROB))
        self._ranks.append(ranks.copy())
        self._top_ids.append(top_ids[:, : self.count].copy())
        self._top.append(np.maximum(top[:, : self.count], LEAST_LOGPROB))
        self.scored += len(logprobs)

    def logprobs(self) -> PromptLogprobs:
        """All log-probabilities, once they are complete."""
        count = self._top[0].shape[1] if self._top else 0
        return PromptLogprobs(
            tuple(self.tokens),
            array("f", np.concatenate(self._logprobs).tobytes() if self._logprobs else b""),
            array("I", np.concatenate(self._ranks).tobytes() if self._ranks else b""),
            array("I", np.concatenate(self._top_ids).tobytes() if self._top_ids else b""),
            array("f", np.concatenate(self._top).tobytes() if self._top else b""),
            count,
        )


def score_chunk(
    logits: mx.array, scores: Sequence[PromptScores | None], starts: Sequence[int], counts: Sequence[int]
) -> None:
    """Add the log-probabilities of the tokens that follow those of a prefill call. One host sync.

    logits: (B, N, V) of the call; rows beyond `scores` are padding. scores: of each row; None: not requested. starts, counts:
    the position in each row's prompt where the call began, and the number of its tokens.
    """
    wanted = [
        (row, each)
        for row, (each, start) in enumerate(zip(scores, starts, strict=False))
        if each is not None and start == each.scored and counts[row]
    ]
    if not wanted:
        return
    rows = np.repeat([row for row, _ in wanted], [counts[row] for row, _ in wanted])
    at = np.concatenate([np.arange(counts[row]) for row, _ in wanted])
    following = [each.tokens[starts[row] + 1 : starts[row] + 1 + counts[row]] for row, each in wanted]
    tokens = mx.array([token for part in following for token in part])
    picked = logits[mx.array(rows), mx.array(at)].astype(mx.float32)
    measured = device.read(*_measured(picked, tokens, max(each.count for _, each in wanted)))
    ends = np.cumsum([counts[row] for row, _ in wanted])
    for (row, each), end in zip(wanted, ends.tolist(), strict=True):
        each.add(*(values[end - counts[row] : end] for values in measured))


def _measured(logits: mx.array, tokens: mx.array, count: int) -> tuple[mx.array, ...]:
    """For tokens (n,) under float32 logits (n, V): log-probabilities (n,); ranks (n,), uint32, 1 for the most likely token; the
    `count` most likely tokens (n, count) and their log-probabilities; whether the logits are finite (n,). Ids beyond V have
    zero probability."""
    vocabulary = logits.shape[-1]
    lse = mx.logsumexp(logits, axis=-1)
    own = mx.take_along_axis(logits, mx.minimum(tokens, vocabulary - 1)[:, None], axis=-1)
    own = mx.where((tokens < vocabulary)[:, None], own, -float("inf"))
    ranks = (logits > own).sum(axis=-1).astype(mx.uint32) + 1
    ids, top = top_logits(logits, max(count, 1))
    return own[:, 0] - lse, ranks, ids, top - lse[:, None], finite_positions(logits)
