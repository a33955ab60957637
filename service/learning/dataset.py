"""Logged generations to padded batches: what goes in, where it is learnt from, and what the target said there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import TOP_TARGETS, Generation, Targets
from service.learning.masks import NO_MASKS, AnswerMasks, Masks, stacked

WINDOWS = 2
"""Windows a run learns from for each of its texts, on average, at most: long texts may cost so many times what cutting each of
them to one window would."""
LENGTHS = 32
"""Padded lengths and position counts are multiples of this: few shapes, so that freed memory can be used again."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Example:
    """One window of a generation. The hidden state at index `start` + i predicts the i-th output token learnt in it.

    tokens: (length,) what is fed: of the prompt and all output tokens but the last, those in the window. ids, logprobs:
    (n, top), tail: (n,), the target's distribution, normalised; the target saw the whole text. weight: (n,). before: the
    tokens of the text that come before the window. masks: of the n positions, where the answer had to follow a grammar.
    """

    tokens: Ints
    start: int
    ids: Ints
    logprobs: Floats
    tail: Floats
    weight: Floats
    before: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    masks: AnswerMasks | None = None

    @property
    def positions(self) -> int:
        """Number of output tokens learnt in this window, n."""
        return len(self.tail)


@dataclass(frozen=True, slots=True)
class Dataset:
    """examples: what can be learnt from. skipped: generations that cannot, and why not (reason -> count). left_out: windows of
    long texts beyond WINDOWS."""

    examples: tuple[Example, ...]
    skipped: dict[str, int]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples padded at the end to one length L, and their N response positions (padded with weight 0).

    tokens: (B, L) int32. at: (N,) index into the B x L hidden states that predict. ids, logprobs: (N, top). tail,
    weight: (N,). count: tokens fed, without padding. texts: (B, M) int32, each text from its first token to the end of its
    window, and offsets: (B,) where the windows begin; None where all begin with the text. masks: (U, W) uint32, see
    AnswerMasks, and mask: (N,) which of them holds at a position; None where no answer had to follow a grammar.
    """

    tokens: mx.array
    at: mx.array
    ids: mx.array
    logprobs: mx.array
    tail: mx.array
    weight: mx.array
    count: int
    texts: mx.array | None = None
    offsets: mx.array | None = None
    masks: mx.array | None = None
    mask: mx.array | None = None


def unpack(targets: Targets) -> tuple[Ints, Floats, Floats]:
    """ids (n, top), log-probabilities (n, top) and log tail mass (n,), scaled to sum to one: they are stored in
    float16."""
    shape = (-1, targets.top)
    ids = np.frombuffer(targets.ids, dtype="<u4").astype(np.int32).reshape(shape)
    logprobs = np.frombuffer(targets.logprobs, dtype="<f2").astype(np.float32).reshape(shape)
    tail = np.frombuffer(targets.tail, dtype="<f2").astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.log(np.exp(logprobs).sum(axis=-1) + np.exp(tail))
        return ids, logprobs - total[:, None], tail - total


def build(
    generations: Sequence[Generation],
    *,
    max_length: int,
    reject_weight: float,
    vocabulary: int,
    masks: Masks = NO_MASKS,
    seed: int = 0,
) -> Dataset:
    """Examples of at most `max_length` prompt and output tokens. A longer text becomes several windows, which together learn
    every output token once (see `windows`). Where there are more than WINDOWS for each text, every text keeps its first and
    `seed` draws the others.

    First rejections that are no near-ties weigh `reject_weight`. vocabulary: the draft's logits' width. Generations
    that have no target distribution, or a damaged one, or not a single output token to learn from, are skipped and
    counted; so are answers that had to follow a grammar and have no masks.
    """
    cut: list[list[Example]] = []
    skipped: dict[str, int] = {}
    for generation in generations:
        if generation.grammar is not None and generation.id not in masks:
            made = "masks not known"
        else:
            made = _examples(generation, masks.get(generation.id), max_length, reject_weight, vocabulary)
        if isinstance(made, str):
            skipped[made] = skipped.get(made, 0) + 1
        else:
            cut.append(made)
    further = [(text, window) for text, made in enumerate(cut) for window in range(1, len(made))]
    room = (WINDOWS - 1) * len(cut)
    drawn = np.random.default_rng(seed).permutation(len(further))[:room].tolist()
    kept = {further[i] for i in drawn} if len(further) > room else set(further)
    examples = [
        example
        for text, made in enumerate(cut)
        for window, example in enumerate(made)
        if window == 0 or (text, window) in kept
    ]
    return Dataset(tuple(examples), skipped, len(further) - len(kept))


def windows(prompt: int, length: int, size: int) -> list[tuple[int, int, int]]:
    """Windows of at most `size` tokens over a text of `length`, of which the first `prompt` are no output: (start, first, end).
    Tokens `first` to `end` are learnt, each in one window, with at least half a window of the text before them (or all of it).
    """
    found: list[tuple[int, int, int]] = []
    first = prompt
    while first < length:
        start = max(0, min(first - size // 2, length - size))
        end = min(start + size, length)
        found.append((start, first, end))
        first = end
    return found


def _examples(
    generation: Generation, masks: AnswerMasks | None, max_length: int, reject_weight: float, vocabulary: int
) -> list[Example] | str:
    prompt, output, targets = generation.prompt.tokens, generation.output, generation.targets
    if not prompt or not output:
        return "no response token"
    if targets is None:
        return "no targets"
    if targets.top != min(TOP_TARGETS, vocabulary):
        return f"targets are not {min(TOP_TARGETS, vocabulary)} a position"
    if targets.positions != len(output) or _damaged(targets):
        return "damaged targets"
    ids, logprobs, tail = unpack(targets)
    tokens = np.array([*prompt, *output], dtype=np.int32)
    sound = not np.isnan(logprobs).any() and not np.isnan(tail).any() and logprobs.max() < 1e-3
    if not sound or min(ids.min(), tokens.min()) < 0 or max(ids.max(), tokens.max()) >= vocabulary:
        return "damaged targets"
    weight = np.ones(len(output), dtype=np.float32)
    for case in generation.cases:
        if not case.tie and 0 <= case.position < len(output):
            weight[case.position] = reject_weight
    found: list[Example] = []
    for start, first, end in windows(len(prompt), len(tokens), max_length):
        here = slice(first - len(prompt), end - len(prompt))
        found.append(
            Example(
                tokens[start : end - 1],
                first - start - 1,
                ids[here],
                logprobs[here],
                tail[here],
                weight[here],
                tokens[:start],
                None if masks is None else masks.part(here),
            )
        )
    return found


def _damaged(targets: Targets) -> bool:
    return not 2 * len(targets.logprobs) == len(targets.ids) == 4 * targets.top * targets.positions


def batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[Batch]:
    """One epoch: every example once, `size` of similar length together, in an order drawn from `seed`."""
    rng = np.random.default_rng(seed)
    shuffled: list[int] = rng.permutation(len(examples)).tolist()
    by_length = sorted(shuffled, key=lambda i: padded(len(examples[i].tokens)))
    groups = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    order: list[int] = rng.permutation(len(groups)).tolist()
    for index in order:
        yield collate([examples[i] for i in groups[index]])


def padded(length: int) -> int:
    """`length` rounded up to a multiple of LENGTHS."""
    return -(-length // LENGTHS) * LENGTHS


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples (at least one, all with equally many targets) into one batch."""
    length = padded(max(len(example.tokens) for example in examples))
    tokens = np.zeros((len(examples), length), dtype=np.int32)
    for row, example in zip(tokens, examples, strict=True):
        row[: len(example.tokens)] = example.tokens
    at = np.concatenate(
        [np.arange(e.positions, dtype=np.int32) + row * length + e.start for row, e in enumerate(examples)]
    )
    top = examples[0].ids.shape[1]
    spare = padded(len(at)) - len(at)
    # Positions that fill up: any distinct ids, a distribution that is finite, no weight.
    ids = np.broadcast_to(np.arange(top, dtype=np.int32), (spare, top))
    even = np.full((spare, top), -np.log(top), dtype=np.float32)
    none = np.full(spare, -np.inf, dtype=np.float32)
    texts = offsets = None
    if any(len(example.before) for example in examples):
        ends = [len(e.before) + len(e.tokens) for e in examples]
        whole = np.zeros((len(examples), padded(max(ends))), dtype=np.int32)
        for row, end, example in zip(whole, ends, examples, strict=True):
            row[:end] = [*example.before, *example.tokens]
        texts, offsets = mx.array(whole), mx.array([len(example.before) for example in examples])
    masks = mask = None
    if (held := stacked([e.masks for e in examples])) is not None:
        masks = mx.array(held[0])
        which = [np.broadcast_to(each, e.positions) for each, e in zip(held[1], examples, strict=True)]
        mask = mx.array(np.pad(np.concatenate(which).astype(np.int32), (0, spare)))
    return Batch(
        texts=texts,
        offsets=offsets,
        masks=masks,
        mask=mask,
        tokens=mx.array(tokens),
        at=mx.array(np.pad(at, (0, spare))),
        ids=mx.array(np.concatenate([*(e.ids for e in examples), ids])),
        logprobs=mx.array(np.concatenate([*(e.logprobs for e in examples), even])),
        tail=mx.array(np.concatenate([*(e.tail for e in examples), none])),
        weight=mx.array(np.concatenate([*(e.weight for e in examples), np.zeros(spare, dtype=np.float32)])),
        count=sum(len(example.tokens) for example in examples),
    )
