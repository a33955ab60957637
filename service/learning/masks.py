"""The tokens that a grammar allowed at every position of a logged answer, recomputed from the stored grammar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from service.core import AnswerGrammar, Constraint, Generation, RedraftError

log = logging.getLogger(__name__)

Words = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class AnswerMasks:
    """words: (U, W), the distinct masks: bit i of word w is set if token 32 w + i is allowed. at: (tokens,) int32, the
    row of `words` for each output position."""

    words: Words
    at: NDArray[np.int32]

    def part(self, positions: slice) -> AnswerMasks:
        """The masks of some output positions."""
        used, at = np.unique(self.at[positions], return_inverse=True)
        return AnswerMasks(self.words[used], at.astype(np.int32))


Masks: TypeAlias = Mapping[str, AnswerMasks]
"""By generation id."""
NO_MASKS: Masks = MappingProxyType({})


class Compiler(Protocol):
    """Compiles a stored grammar (`models.grammar.Grammars`)."""

    def of_answer(self, grammar: AnswerGrammar) -> Constraint:
        """The constraint at the beginning of an answer. Raises BadRequest when the grammar cannot be compiled."""
        ...


def answer_masks(generations: Iterable[Generation], grammars: Callable[[], Compiler]) -> dict[str, AnswerMasks]:
    """The masks of the generations that had to follow a grammar, by id. grammars: called only if there are any.

    An answer is left out with a warning if its grammar no longer compiles or now forbids the generated tokens, because
    llguidance or the end tokens have changed since.
    """
    found: dict[str, AnswerMasks] = {}
    for generation in generations:
        if generation.grammar is None or not generation.output:
            continue
        try:
            masks = grammars().of_answer(generation.grammar).masks(generation.output)[: len(generation.output)]
        except RedraftError as error:
            log.warning("generation %s: its grammar no longer compiles: %s", generation.id, error)
            continue
        allowed = (mask[token >> 3] >> (token & 7) & 1 for mask, token in zip(masks, generation.output, strict=False))
        if len(masks) < len(generation.output) or not all(allowed):
            log.warning("generation %s: its grammar now forbids the generated tokens", generation.id)
            continue
        found[generation.id] = _distinct(masks)
    return found


def _distinct(masks: Sequence[bytes]) -> AnswerMasks:
    number = {mask: i for i, mask in enumerate(dict.fromkeys(masks))}
    words = np.frombuffer(b"".join(number), dtype="<u4").astype(np.uint32).reshape(len(number), -1)
    return AnswerMasks(words, np.array([number[mask] for mask in masks], dtype=np.int32))


def usable(generations: Sequence[Generation], masks: Masks) -> list[Generation]:
    """The generations that followed no grammar, or whose masks are known."""
    return [generation for generation in generations if generation.grammar is None or generation.id in masks]


def stack_masks(masks: Sequence[AnswerMasks | None]) -> tuple[Words, list[NDArray[np.int32] | int]] | None:
    """The masks of several answers as one array (U, W) whose first row allows everything, and for each answer the rows
    that apply at its positions (0: the first row everywhere). None if no answer has masks."""
    present = [each for each in masks if each is not None]
    if not present:
        return None
    words, rows, count = [np.full((1, present[0].words.shape[1]), 0xFFFFFFFF, dtype=np.uint32)], [], 1
    for each in masks:
        rows.append(0 if each is None else each.at + count)
        if each is not None:
            words.append(each.words)
            count += len(each.words)
    return np.concatenate(words), rows
