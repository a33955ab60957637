"""Training examples from logged generations: windows of tokens with the target's distribution at every output position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.core import TOP_TARGETS, Generation, Targets
from service.learning.masks import NO_MASKS, AnswerMasks, Masks

WINDOWS = 2
"""Maximum average number of windows per text in a run. It bounds the cost of long texts to this multiple of one window each."""
MAX_VALIDATION, VALIDATION_SHARE = 16, 0.05
"""Validation set: this fraction of the texts, but at most this many texts and windows."""
_DAMAGED = "damaged targets"

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Example:
    """One window of a generation. The hidden state at index `start` + i predicts its i-th trained output token.

    tokens: (length,) the window's input: prompt tokens and output tokens except the last trained one. ids, logprobs:
    (n, top), tail: (n,), the target's normalised distribution given the whole text. before: the text's tokens in front
    of the window. masks: of the n positions, if the answer had to follow a grammar. text: the generation's id.
    """

    tokens: Ints
    start: int
    ids: Ints
    logprobs: Floats
    tail: Floats
    before: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    masks: AnswerMasks | None = None
    text: str = ""

    @property
    def positions(self) -> int:
        """Number of output tokens trained in this window, n."""
        return len(self.tail)


@dataclass(frozen=True, slots=True)
class Dataset:
    """examples: the usable windows. skipped: number of unusable generations, by reason. left_out: windows of long texts
    beyond WINDOWS."""

    examples: tuple[Example, ...]
    skipped: dict[str, int]
    left_out: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest example; 0 if there are none."""
        return max((len(example.tokens) for example in self.examples), default=0)


def build(
    generations: Sequence[Generation],
    *,
    max_length: int,
    vocabulary: int,
    masks: Masks = NO_MASKS,
    seed: int = 0,
) -> Dataset:
    """Examples of at most `max_length` prompt and output tokens. A longer text becomes several windows, which together
    cover every output token once (see `windows`). If there are more than WINDOWS per text, every text keeps its first
    window and the others are drawn with `seed`.

    vocabulary: width of the draft's logits. Generations are skipped and counted if their target distribution is missing
    or damaged, if they have no output token to train on, or if they had to follow a grammar and have no masks.
    """
    texts: list[list[Example]] = []
    skipped: Counter[str] = Counter()
    for generation in generations:
        reason = _unusable(generation, masks, vocabulary)
        examples = [] if reason else _examples(generation, masks.get(generation.id), max_length, vocabulary)
        if examples:
            texts.append(examples)
        else:
            skipped[reason or _DAMAGED] += 1
    examples, left_out = _select_windows(texts, seed)
    return Dataset(tuple(examples), dict(skipped), left_out)


def set_aside(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """(training, validation). The windows of a few texts, spread over new and replayed ones, are set aside, so that no
    text is in both parts. With too few texts, the loss is validated on the training examples."""
    texts = list(dict.fromkeys(example.text for example in examples))
    count = min(MAX_VALIDATION, int(len(texts) * VALIDATION_SHARE))
    aside = {texts[i * (len(texts) // count)] for i in range(count)}
    learnt = [example for example in examples if example.text not in aside]
    validation = [example for example in examples if example.text in aside]
    return learnt, (validation or learnt)[:MAX_VALIDATION]


def windows(prompt: int, length: int, size: int) -> list[tuple[int, int, int]]:
    """Windows of at most `size` tokens over a text of `length` tokens, the first `prompt` of which are the prompt.

    Returns (start, first, end) for each: tokens `first` to `end` are trained, each in exactly one window, with at least
    half a window of context before them (or all there is).
    """
    found: list[tuple[int, int, int]] = []
    first = prompt
    while first < length:
        start = max(0, min(first - size // 2, length - size))
        end = min(start + size, length)
        found.append((start, first, end))
        first = end
    return found


def unpack(targets: Targets) -> tuple[Ints, Floats, Floats]:
    """Stored target distributions as ids (n, top), log-probabilities (n, top) and log tail mass (n,), normalised
    because they are stored in float16."""
    shape = (-1, targets.top)
    ids = np.frombuffer(targets.ids, dtype="<u4").astype(np.int32).reshape(shape)
    logprobs = np.frombuffer(targets.logprobs, dtype="<f2").astype(np.float32).reshape(shape)
    tail = np.frombuffer(targets.tail, dtype="<f2").astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.log(np.exp(logprobs).sum(axis=-1) + np.exp(tail))
        return ids, logprobs - total[:, None], tail - total


def _unusable(generation: Generation, masks: Masks, vocabulary: int) -> str | None:
    """Why a generation cannot be trained on, without reading its values."""
    targets, top = generation.targets, min(TOP_TARGETS, vocabulary)
    if generation.grammar is not None and generation.id not in masks:
        return "unknown masks"
    if not generation.prompt.tokens or not generation.output:
        return "no response token"
    if targets is None:
        return "no targets"
    if targets.top != top:
        return f"targets are not {top} a position"
    whole = 2 * len(targets.logprobs) == len(targets.ids) == 4 * targets.top * targets.positions
    return None if whole and targets.positions == len(generation.output) else _DAMAGED


def _examples(generation: Generation, masks: AnswerMasks | None, max_length: int, vocabulary: int) -> list[Example]:
    """The windows of a generation; none if its targets are damaged."""
    prompt, output, targets = generation.prompt.tokens, generation.output, generation.targets
    assert targets is not None
    ids, logprobs, tail = unpack(targets)
    tokens = np.array([*prompt, *output], dtype=np.int32)
    sound = not np.isnan(logprobs).any() and not np.isnan(tail).any() and logprobs.max() < 1e-3
    if not sound or min(ids.min(), tokens.min()) < 0 or max(ids.max(), tokens.max()) >= vocabulary:
        return []
    found: list[Example] = []
    for start, first, end in windows(len(prompt), len(tokens), max_length):
        here = slice(first - len(prompt), end - len(prompt))
        found.append(
            Example(
                tokens=tokens[start : end - 1],
                start=first - start - 1,
                ids=ids[here],
                logprobs=logprobs[here],
                tail=tail[here],
                before=tokens[:start],
                masks=None if masks is None else masks.part(here),
                text=generation.id,
            )
        )
    return found


def _select_windows(texts: Sequence[Sequence[Example]], seed: int) -> tuple[list[Example], int]:
    """Every text's first window and as many random others as WINDOWS allows, in the order of the texts; and the number
    left out."""
    further = [(text, window) for text, examples in enumerate(texts) for window in range(1, len(examples))]
    allowed = (WINDOWS - 1) * len(texts)
    selected = set(further)
    if len(further) > allowed:
        drawn = np.random.default_rng(seed).permutation(len(further))[:allowed].tolist()
        selected = {further[i] for i in drawn}
    examples = [
        example
        for text, windows_of_text in enumerate(texts)
        for window, example in enumerate(windows_of_text)
        if window == 0 or (text, window) in selected
    ]
    return examples, len(further) - len(selected)
