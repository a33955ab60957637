"""Teacher forcing: a model's logits at every output position of finished texts, in few calls and bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.engine import device
from service.engine.masks import allowed
from service.engine.sampling import fit
from service.learning.draft_steps import states_by_step
from service.learning.examples import Ints
from service.learning.masks import AnswerMasks, stack_masks
from service.models import eagle
from service.models.heads import ids_allowed, split, token_limit
from service.models.padding import grouped, padded, padded_rows

POSITIONS, LEAST_POSITIONS = 256, 16
"""Positions whose logits exist at once: normally, and at least."""
_LOGITS_COPIES, _LOGITS_SHARE = 6, 0.25
"""Number of float32 arrays of the logits' size that exist while they are restricted and read; their maximum fraction of
free memory."""
NEVER = 2**31 - 1

Text: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Token ids of prompt and output."""


@dataclass(frozen=True, slots=True)
class Span:
    """Logits at some output positions of some texts: logits[i], (n, V), predicts token `position[i]` of the output of
    the text with index `text[i]`. step: their draft step, 0 for the first."""

    text: list[int]
    position: list[int]
    logits: mx.array
    step: int


def response_logits(
    model: nn.Module,
    texts: Sequence[Text],
    *,
    vocabulary: int,
    between: Callable[[], object] = lambda: None,
    steps: int = 1,
    masks: Sequence[AnswerMasks | None] | None = None,
) -> Iterator[Span]:
    """The logits at every output position of (prompt, output) pairs with non-empty prompts, shorter texts first.

    vocabulary: the target's width, to which logits are cut or extended by -inf, as when the engine drafts. between:
    called before every model call. steps: draft steps to compute (see `draft_steps.step_count`). masks: of each text;
    logits are -inf where a token is not allowed.

    A model with a reduced vocabulary proposes its ids and those that occurred in the text before the position, as when
    serving; all others are -inf.
    """
    masks = [None] * len(texts) if masks is None else masks
    parts, limit = split(model), token_limit(model)
    at_once = positions_at_once(vocabulary, device.free_bytes())
    for indices in grouped({i: _input_length(text) for i, text in enumerate(texts) if text[1]}):
        between()
        read = _inputs([texts[i] for i in indices], limit)
        tokens = padded_rows(read)
        with ids_allowed(model, tokens) as in_vocabulary:
            group = _Group(texts, indices, in_vocabulary, [masks[i] for i in indices])
            features = None
            if isinstance(model, eagle.Model):
                features = model.features_of(read, [0] * len(read), tokens.shape[1])
            states = states_by_step(model, parts, mx.array(tokens), steps, features)
            states = [each[group.at] for each in states]
            mx.eval(states)
            for start in range(0, len(group.positions), at_once):
                chosen = slice(start, start + at_once)
                text, position = [i for _, i, _ in group.positions[chosen]], [j for _, _, j in group.positions[chosen]]
                proposable, legal = group.proposable(chosen), group.legal(chosen, vocabulary)
                for step, each in enumerate(states):
                    logits = each[chosen] if parts is None else parts[1](each[None, chosen])[0]
                    yield Span(text, position, _restrict(logits, proposable, legal, vocabulary), step)


def positions_at_once(vocabulary: int, free: int) -> int:
    """Positions whose logits exist at once: POSITIONS, halved until they take a small fraction of `free` bytes.
    vocabulary: width of the logits."""
    positions = POSITIONS
    while positions > LEAST_POSITIONS and _LOGITS_SHARE * free < _LOGITS_COPIES * 4 * vocabulary * positions:
        positions //= 2
    return positions


def _inputs(texts: Sequence[Text], limit: int | None) -> list[Ints]:
    """The model's input for each text. limit: ids from here on have no embedding and are replaced by the last one that has."""
    read = [np.array([*prompt, *output[:-1]], dtype=np.int32) for prompt, output in texts]
    return read if limit is None else [np.minimum(tokens, limit - 1) for tokens in read]


def _restrict(logits: mx.array, proposable: mx.array | None, legal: mx.array | None, vocabulary: int) -> mx.array:
    """Logits (n, vocabulary), -inf where a token cannot be proposed or is not allowed."""
    logits = logits.astype(mx.float32)
    if proposable is not None:
        logits = mx.where(proposable, logits, -float("inf"))
    logits = fit(logits, vocabulary)
    if legal is not None:
        logits = mx.where(legal, logits, -float("inf"))
    return logits


class _Group:
    """Texts of one model call. positions: (row, text, output position) of every output token. at: indices into the
    flattened hidden states that predict them."""

    def __init__(
        self,
        texts: Sequence[Text],
        indices: Sequence[int],
        in_vocabulary: NDArray[np.bool_] | None,
        masks: Sequence[AnswerMasks | None],
    ) -> None:
        self.texts = [texts[i] for i in indices]
        self.length = padded(max(_input_length(text) for text in self.texts))
        self.positions = [(row, i, j) for row, i in enumerate(indices) for j in range(len(texts[i][1]))]
        self.at = mx.array([row * self.length + len(self.texts[row][0]) - 1 + j for row, _, j in self.positions])
        self.in_vocabulary = in_vocabulary
        self.first_seen = None if in_vocabulary is None else mx.array(_first_seen(self.texts, len(in_vocabulary)))
        self.masks = stack_masks(masks)

    def proposable(self, chosen: slice) -> mx.array | None:
        """(n, width) ids of the reduced vocabulary and those seen before each position; None for a full head."""
        if self.first_seen is None:
            return None
        rows = mx.array([row for row, _, _ in self.positions[chosen]])
        before = mx.array([len(self.texts[row][0]) + j for row, _, j in self.positions[chosen]])
        return mx.array(cast("Any", self.in_vocabulary)) | (self.first_seen[rows] < before[:, None])

    def legal(self, chosen: slice, vocabulary: int) -> mx.array | None:
        """(n, vocabulary) ids that the answers' masks allow; None if no text has masks."""
        if self.masks is None:
            return None
        words, at_position = self.masks
        rows = [(at_position[row], j) for row, _, j in self.positions[chosen]]
        which = [at if isinstance(at, int) else at[j] for at, j in rows]
        return allowed(mx.array(words[which]), vocabulary)


def _first_seen(texts: Sequence[Text], width: int) -> NDArray[np.int32]:
    """(texts, width): the position at which each id first occurs in its text; NEVER if it does not.

    Computed once per call: a boolean for every id at every position would take the host longer than an accelerator
    needs for the model.
    """
    found = np.full((len(texts), width), NEVER, dtype=np.int32)
    for row, (prompt, output) in zip(found, texts, strict=True):
        tokens = np.array([*prompt, *output], dtype=np.int64)
        # A wider target's ids may exceed the draft's head. Written backwards, so that an id's first position is written
        # last.
        places = np.flatnonzero(tokens < width)[::-1]
        row[tokens[places]] = places
    return found


def _input_length(text: Text) -> int:
    return len(text[0]) + len(text[1]) - 1
