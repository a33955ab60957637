"""Logged generations to padded batches: what goes in, where it is learnt from, and what the target said there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from service.core import TOP_TARGETS, Generation, Targets

LENGTHS = 32
"""Padded lengths and position counts are multiples of this: few shapes, so that freed memory can be used again."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Example:
    """One generation, cut to length. The hidden state at index `start` + i predicts the i-th kept output token.

    tokens: (length,) what is fed: the prompt and all output tokens but the last. ids, logprobs: (n, top), tail: (n,),
    the target's distribution, normalised. weight: (n,).
    """

    tokens: Ints
    start: int
    ids: Ints
    logprobs: Floats
    tail: Floats
    weight: Floats

    @property
    def positions(self) -> int:
        return len(self.tail)


@dataclass(frozen=True, slots=True)
class Dataset:
    """examples: what can be learnt from. skipped: generations that cannot, and why not (reason -> count)."""

    examples: tuple[Example, ...]
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """B examples padded at the end to one length L, and their N response positions (padded with weight 0).

    tokens: (B, L) int32. at: (N,) index into the B x L hidden states that predict. ids, logprobs: (N, top). tail,
    weight: (N,). count: tokens fed, without padding.
    """

    tokens: mx.array
    at: mx.array
    ids: mx.array
    logprobs: mx.array
    tail: mx.array
    weight: mx.array
    count: int


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


def build(generations: Sequence[Generation], *, max_length: int, reject_weight: float, vocabulary: int) -> Dataset:
    """Examples of at most `max_length` prompt and output tokens; longer ones lose the start of the prompt, and, where
    one prompt token and the output are still too long, the end of the output.

    First rejections that are no near-ties weigh `reject_weight`. vocabulary: the draft's logits' width. Generations
    that have no target distribution, or a damaged one, or not a single output token to learn from, are skipped and
    counted.
    """
    examples: list[Example] = []
    skipped: dict[str, int] = {}
    for generation in generations:
        made = _example(generation, max_length, reject_weight, vocabulary)
        if isinstance(made, Example):
            examples.append(made)
        else:
            skipped[made] = skipped.get(made, 0) + 1
    return Dataset(tuple(examples), skipped)


def _example(generation: Generation, max_length: int, reject_weight: float, vocabulary: int) -> Example | str:
    prompt, output, targets = generation.prompt.tokens, generation.output, generation.targets
    kept = min(len(output), max_length - 1)
    if not prompt or kept < 1:
        return "no response token"
    if targets is None:
        return "no targets"
    if targets.top != min(TOP_TARGETS, vocabulary):
        return f"targets are not {min(TOP_TARGETS, vocabulary)} a position"
    if targets.positions != len(output) or _damaged(targets):
        return "damaged targets"
    ids, logprobs, tail = unpack(targets)
    prompt = prompt[-(max_length - kept) :]
    tokens = np.array([*prompt, *output[: kept - 1]], dtype=np.int32)
    sound = not np.isnan(logprobs).any() and not np.isnan(tail).any() and logprobs.max() < 1e-3
    if not sound or min(ids.min(), tokens.min()) < 0 or max(ids.max(), tokens.max()) >= vocabulary:
        return "damaged targets"
    weight = np.ones(kept, dtype=np.float32)
    for case in generation.cases:
        if not case.tie and 0 <= case.position < kept:
            weight[case.position] = reject_weight
    return Example(tokens, len(prompt) - 1, ids[:kept], logprobs[:kept], tail[:kept], weight)


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
    return Batch(
        tokens=mx.array(tokens),
        at=mx.array(np.pad(at, (0, spare))),
        ids=mx.array(np.concatenate([*(e.ids for e in examples), ids])),
        logprobs=mx.array(np.concatenate([*(e.logprobs for e in examples), even])),
        tail=mx.array(np.concatenate([*(e.tail for e in examples), none])),
        weight=mx.array(np.concatenate([*(e.weight for e in examples), np.zeros(spare, dtype=np.float32)])),
        count=sum(len(example.tokens) for example in examples),
    )
