"""Estimates what training a draft takes: its memory, the batch, text length and recomputation that fit into free memory, its
arithmetic, and its time.

Everything is computed from config.json and the size of the weights. The factors were fitted to measured peaks
(docs/results/memory.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

PROCESS = 512 * 2**20
"""Bytes of the interpreter, its libraries and MLX's buffers."""
CHUNKS = (512, 256, 128, 64, 32)
"""Numbers of positions whose logits may exist at once, best first."""
SHORTEST = 256
"""A run does not shorten texts below this many tokens to fit."""
LOGITS_COPIES = 4
"""Logits-wide float32 arrays that the loss holds per position of a chunk, including gradients. One more, in the model's
precision, if that is not float32."""
EFFICIENCY = 0.5
"""Share of a device's speed in large matrix products that a training step reaches. Assumed for machines on which no run has
been measured."""
UNROLLED_SECONDS = 1.2e-3
"""Seconds that a recurrent block takes for one position of all rows, forward and backward: training computes its state one
position after another, in about sixty small operations. Measured on an H200 shared with other measurements, with checkpointing;
1.1e-3 without (docs/results/memory.md)."""
_FLOAT = 4
_ADAPTER_COPIES = 7
"""Copies of the adapter: its weights, those of the best validation so far, AdamW's two moments, the gradients of a micro-batch,
their sum, and the updated weights."""
_BACKWARD = 1.25
"""Memory that the backward pass of one block needs at a time, as a multiple of the activations that a block stores."""
_RECOMPUTED = 1.9
"""With recomputation: blocks whose activations exist at a time, in addition to what the backward pass of one needs."""
_BLOCK_INPUTS = 1.5
"""With recomputation: arrays as wide as the hidden states that are stored per block."""
_STATES, _RECOMPUTED_STATES = 3.3, 1.8
"""Copies of a recurrent state that a block stores per token; with recomputation, blocks whose copies exist at a time."""
_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """The properties of a draft that determine the memory and time of its training.

    process: bytes of the process without models. weights: bytes of all weights, including the target's if it is loaded too.
    Both are 0 if already in memory. hidden, inner, queries, keys: widths of the hidden states, of the feed-forward layer
    (summed over the experts that a token uses), of queries, of keys. heads: of the attention. vocabulary: width of the logits.
    value: bytes of an activation. rank: of the adapter; 0: none. steps: draft steps that the blocks compute per token.
    recurrent: blocks with a recurrent state of `state` values each. copies: of the logits. chunked: whether the loss computes
    the logits of one chunk of positions at a time.
    """

    weights: int
    hidden: int
    inner: int
    queries: int
    keys: int
    heads: int
    blocks: int
    vocabulary: int
    value: int
    rank: int
    steps: int = 1
    recurrent: int = 0
    state: int = 0
    copies: int = LOGITS_COPIES
    chunked: bool = True
    process: int = PROCESS

    @classmethod
    def of(cls, config: Mapping[str, object], *, weights: int, value: int, rank: int, steps: int = 1) -> TrainingShape:
        """From a draft's config.json. Sizes that it does not contain are guessed."""
        text = {**config, **cast("Mapping[str, object]", config.get("text_config") or {})}

        def size(name: str, default: int) -> int:
            found = text.get(name)
            return found if isinstance(found, int) else default

        hidden, heads = size("hidden_size", 1024), size("num_attention_heads", 16)
        head = size("head_dim", max(hidden // max(heads, 1), 1))
        inner, blocks = size("intermediate_size", 4 * hidden), size("num_hidden_layers", 12)
        if (expert := size("moe_intermediate_size", 0)) > 0:
            chosen = next((size(name, 1) for name in _EXPERTS if name in text), 1)
            inner = chosen * expert + size("shared_expert_intermediate_size", 0)
        heads_of_state = size("linear_num_value_heads", 0)
        state = heads_of_state * size("linear_key_head_dim", 0) * size("linear_value_head_dim", 0)
        return cls(
            weights=weights,
            hidden=hidden,
            inner=inner,
            queries=heads * head,
            keys=size("num_key_value_heads", heads) * head,
            heads=heads,
            blocks=blocks,
            vocabulary=size("vocab_size", 2**17),
            value=value,
            rank=rank,
            steps=steps,
            recurrent=blocks - blocks // size("full_attention_interval", 4) if state else 0,
            state=state,
        )

    @property
    def block_parameters(self) -> int:
        """Weights of one block that a token is multiplied with."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner)

    def block_bytes(self, tokens: int, length: int) -> int:
        """Bytes of the activations of one block that its backward pass needs, for `tokens` tokens in texts of `length`."""
        values = 4 * self.hidden + 3.5 * self.queries + 3 * self.keys + 5 * self.inner
        scores = (1.125 * self.heads + 2.25) * length
        token = self.value * (values + scores)
        if self.value < _FLOAT and self.rank:
            # The adapter's matrices are float32, and so is a copy of the input of most adapted matrices.
            token += _FLOAT * (5 * self.hidden + self.queries + 0.5 * self.inner)
        token += _FLOAT * 7 * self.rank
        return int(tokens * token)


@dataclass(frozen=True, slots=True)
class TrainingBytes:
    """Peak memory of a training step by purpose, in bytes. process: the interpreter and its libraries. adapter: its weights,
    gradients and optimizer state. stored: activations that wait for the backward pass. working: what is computed while all of
    them wait: the logits of a chunk or the backward pass of the last block, which do not overlap."""

    process: int
    weights: int
    adapter: int
    stored: int
    working: int

    @property
    def total(self) -> int:
        """The peak."""
        return self.process + self.weights + self.adapter + self.stored + self.working


def training_bytes(shape: TrainingShape, *, rows: int, length: int, recompute: bool, chunk: int) -> TrainingBytes:
    """The peak memory of a step. rows: texts of a micro-batch. length: tokens of the longest, including padding. recompute:
    whether blocks recompute their activations for the backward pass (gradient checkpointing). chunk: positions whose logits
    exist at once."""
    tokens = rows * length * shape.steps
    block = shape.block_bytes(tokens, length)
    state = int(_STATES * _FLOAT * shape.state * tokens)
    if recompute:
        stored = shape.blocks * _BLOCK_INPUTS * shape.value * shape.hidden * tokens
        backward = (_RECOMPUTED + _BACKWARD) * block + _RECOMPUTED_STATES * state
    else:
        stored = shape.blocks * block + shape.recurrent * state
        backward = _BACKWARD * block
    positions = min(chunk, rows * length) if shape.chunked else rows * length
    copies = shape.copies * _FLOAT + (shape.value if shape.value < _FLOAT else 0)
    # Includes the hidden states at all positions, their gradient, and the same in float32.
    logits = positions * copies * shape.vocabulary + 2 * (_FLOAT + shape.value) * shape.hidden * rows * length
    each = shape.rank * (7 * shape.hidden + 2 * shape.queries + 2 * shape.keys + 3 * shape.inner)
    return TrainingBytes(
        process=shape.process,
        weights=shape.weights,
        adapter=_ADAPTER_COPIES * _FLOAT * shape.blocks * each,
        stored=int(stored),
        working=int(max(backward, logits)),
    )


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How a run computes its steps. rows: texts of a micro-batch; micro_batches: per step, with summed gradients. length:
    maximum tokens of a text. recompute, chunk: see `training_bytes`. peak_bytes: the peak of this plan."""

    rows: int
    micro_batches: int
    length: int
    recompute: bool
    chunk: int
    peak_bytes: int

    def __str__(self) -> str:
        how = " with gradient checkpointing" if self.recompute else ""
        return f"{self.micro_batches} x {self.rows} texts of {self.length} tokens{how}"


def plan_training(
    shape: TrainingShape, free: int, *, batch: int, length: int, shortest: int = SHORTEST
) -> TrainingPlan | None:
    """The first plan that fits into `free` bytes. Preferences, in this order: texts of `length` tokens over shorter ones,
    stored activations over recomputed ones, large micro-batches over small ones (which make the same step of `batch` texts),
    and large chunks of logits over small ones. Texts are not shortened below `shortest` tokens. None: nothing fits."""
    return next((plan for plan in _plans(shape, batch, length, shortest) if plan.peak_bytes <= free), None)


def smallest_plan(shape: TrainingShape, *, batch: int, length: int, shortest: int = SHORTEST) -> TrainingPlan:
    """The plan with the smallest peak of those that `plan_training` chooses from."""
    return min(_plans(shape, batch, length, shortest), key=lambda plan: plan.peak_bytes)


def _plans(shape: TrainingShape, batch: int, length: int, shortest: int) -> Iterator[TrainingPlan]:
    """Best first."""
    while True:
        # A block that is computed once has nothing to recompute, and an unrolled one is not called as a block.
        for recompute in (False, True) if shape.blocks > 1 and shape.steps == 1 else (False,):
            for micro_batches in (n for n in range(1, batch + 1) if batch % n == 0):
                rows = batch // micro_batches
                for chunk in CHUNKS if shape.chunked else CHUNKS[:1]:
                    taken = training_bytes(shape, rows=rows, length=length, recompute=recompute, chunk=chunk).total
                    yield TrainingPlan(rows, micro_batches, length, recompute, chunk, taken)
        if length <= shortest:
            return
        length = max(length // 2, shortest)


def training_seconds(
    shape: TrainingShape, tokens: int, *, rows: int, length: int, recompute: bool, tflops: float, share: float = 1.0
) -> float:
    """Seconds to train on `tokens` tokens. rows, length: of a micro-batch. tflops: of the device, in large matrix products at
    the draft's precision, of which a step reaches EFFICIENCY. share: of the time in which a run works."""
    # Frozen weights have no gradient, so the backward pass costs as much as the forward pass.
    passes = 3 if recompute else 2
    block = 2 * shape.block_parameters + 4 * length * shape.queries
    head = 2 * 2 * shape.hidden * shape.vocabulary
    flops = tokens * (passes * shape.steps * shape.blocks * block + head)
    unrolled = tokens / rows * shape.recurrent * UNROLLED_SECONDS
    return (flops / (tflops * 1e12 * EFFICIENCY) + unrolled) / share


def with_logits(shape: TrainingShape, *, vocabulary: int, copies: int) -> TrainingShape:
    """The same draft under a loss that holds the logits of all positions at once."""
    return replace(shape, vocabulary=vocabulary, copies=copies, chunked=False)
