"""Teacher forcing: a model's logits at every output position of finished texts, in few calls and bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.engine.masks import allowed
from service.engine.sampling import fit
from service.learning.dataset import padded
from service.learning.masks import AnswerMasks, stacked
from service.learning.steps import states
from service.models.heads import full_head, split, token_limit

TOKENS = 2048
"""Tokens of one call, padding included; a longer text is a call of its own."""
POSITIONS = 256
"""Positions whose logits exist at once."""
NEVER = 2**31 - 1

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Span:
    """Some output positions of some texts: text[i] is an index into the texts, position[i] into that text's output, and
    logits[i], (n, V), is what the model makes of it. depth: which step of a round this is so in, 0 the first."""

    text: list[int]
    position: list[int]
    logits: mx.array
    depth: int


def response_logits(
    model: nn.Module,
    texts: Sequence[tuple[Tokens, Tokens]],
    *,
    vocabulary: int,
    between: Callable[[], object] = lambda: None,
    depth: int = 1,
    masks: Sequence[AnswerMasks | None] | None = None,
) -> Iterator[Span]:
    """Walk (prompt, output) pairs, prompts not empty, by length. vocabulary: the target's width, to which the logits are cut
    or extended by -inf, as when the engine drafts. `between` is called before every model call. depth: steps of a round to
    tell apart (see `steps.depths`). masks: of each text, whose logits are -inf where a token is not allowed; None: none has
    any.

    A model whose head is cut proposes the ids it keeps and those its text has shown before the position, as when it serves;
    all others are -inf. (What it cannot propose is never drafted, so what a round of its own shows is no more than this.)
    """
    with full_head(model) as keeps:
        yield from _walk(model, texts, vocabulary, keeps, between, depth, masks or [None] * len(texts))


def _walk(
    model: nn.Module,
    texts: Sequence[tuple[Tokens, Tokens]],
    vocabulary: int,
    keeps: NDArray[np.bool_] | None,
    between: Callable[[], object],
    depth: int,
    masks: Sequence[AnswerMasks | None],
) -> Iterator[Span]:
    parts, limit = split(model), token_limit(model)
    order = sorted((i for i, (_, output) in enumerate(texts) if output), key=lambda i: _fed(texts[i]))
    for group in _groups(order, texts):
        between()
        length = padded(max(_fed(texts[i]) for i in group))
        tokens = np.zeros((len(group), length), dtype=np.int32)
        for row, index in zip(tokens, group, strict=True):
            prompt, output = texts[index]
            row[: len(prompt) + len(output) - 1] = [*prompt, *output[:-1]]
        if limit is not None:
            tokens = np.minimum(tokens, limit - 1)
        where = [(row, i, j) for row, i in enumerate(group) for j in range(len(texts[i][1]))]
        at = mx.array([row * length + len(texts[i][0]) - 1 + j for row, i, j in where])
        found = [each[at] for each in states(model, parts, mx.array(tokens), depth)]
        mx.eval(found)
        held = stacked([masks[i] for i in group])
        shown = None if keeps is None else mx.array(_first_shown(texts, group, len(keeps)))
        for start in range(0, len(where), POSITIONS):
            chosen = slice(start, start + POSITIONS)
            text, position = [i for _, i, _ in where[chosen]], [j for _, _, j in where[chosen]]
            proposable = None
            if shown is not None:
                rows = mx.array([row for row, _, _ in where[chosen]])
                before = mx.array([len(texts[i][0]) + j for _, i, j in where[chosen]])
                proposable = mx.array(cast("Any", keeps)) | (shown[rows] < before[:, None])
            legal = None
            if held is not None:
                words, at_position = held
                each_mask = [at_position[row] for row, _, _ in where[chosen]]
                which = [m if isinstance(m, int) else m[j] for m, j in zip(each_mask, position, strict=True)]
                legal = allowed(mx.array(words[which]), vocabulary)
            for step, each in enumerate(found):
                logits = each[chosen] if parts is None else parts[1](each[chosen])
                logits = logits.astype(mx.float32)
                if proposable is not None:
                    logits = mx.where(proposable, logits, -float("inf"))
                logits = fit(logits, vocabulary)
                if legal is not None:
                    logits = mx.where(legal, logits, -float("inf"))
                yield Span(text, position, logits, step)


def _first_shown(texts: Sequence[tuple[Tokens, Tokens]], group: Sequence[int], width: int) -> NDArray[np.int32]:
    """(texts, width): where in its text each token occurs first; NEVER where it does not. Made once a call, since a boolean for
    every token at every position takes the host longer than an accelerator takes for the model."""
    found = np.full((len(group), width), NEVER, dtype=np.int32)
    for row, index in zip(found, group, strict=True):
        whole = np.array([*texts[index][0], *texts[index][1]], dtype=np.int64)
        # A wider target's ids may lie beyond the draft's head. Backwards, so that a token's first place is written last.
        places = np.flatnonzero(whole < width)[::-1]
        row[whole[places]] = places
    return found


def _fed(text: tuple[Tokens, Tokens]) -> int:
    return len(text[0]) + len(text[1]) - 1


def _groups(order: Sequence[int], texts: Sequence[tuple[Tokens, Tokens]]) -> Iterator[list[int]]:
    """Texts of similar length, ascending, as many as fit into one call."""
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * padded(_fed(texts[index])) > TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
