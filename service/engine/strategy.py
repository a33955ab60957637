"""How the engine runs on each kind of device. No other module asks which device it has.

On an accelerator the host must not hold up the device. The host waits once per round, hands over draft steps one by one so that
the device works while Python builds the next one, and computes logged data as part of the round.

On CUDA the host is slower than the device. Model calls are traced once per shape and replayed (`replay`), and custom kernels
run the matrix products and attention of calls with up to a few hundred tokens per row (`products`, `attention`). To repeat
shapes, padding rows fill a batch up to one of a few sizes, and keys and values are in `pages`. Other masked calls use cuDNN,
which builds a plan for each new shape of queries, keys and mask (MLX's mlx/backend/cuda/scaled_dot_product_attention.cpp,
`sdpa_cudnn`). Such calls see keys and values gathered to one of a few lengths and are padded to one of a few widths. Metal's
kernels accept any shape (mlx/backend/metal/scaled_dot_product_attention.cpp) and read contiguous rows.

On a CPU the device is the host. Waiting is free, the draft's confidence saves draft steps, and evidence is cheaper when
computed only for the emitted positions.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx

from service.engine import products

STEP, FEWEST = 128, 512
"""Positions are allocated in multiples of STEP. A prefill over paged rows sees at least FEWEST positions."""
BURST = 2
"""Prompt chunks that are prefilled between two rounds while more requests prefill than run."""
PAGE = 32
"""Positions in a page of keys and values, and in a block of the prefix cache."""


def _doubling(least: int, first: int) -> int:
    """Rounds up to the next of: `first`, then powers of two and the values halfway between them."""
    if least <= first:
        return first
    double = 1 << (least - 1).bit_length()
    return double * 3 // 4 if double >= 4 and least <= double * 3 // 4 else double


@dataclass(frozen=True, slots=True)
class Strategy:
    """Settings for a kind of device.

    launch_steps: launch each draft step separately.
    ask_confidence: wait for the draft's confidence between draft steps, to stop early.
    launch_ahead: launch the next round before reading this one, if the rows allow it. Evidence is then computed within the
    round for all positions, otherwise afterwards for the emitted ones.
    paged: keys and values are in `pages`, which `attention` reads.
    lengths: the allowed lengths of proposals; empty: any.
    most_tokens: maximum tokens over all rows that a planned call verifies. Calls up to this size round identically
    (`products`), so texts equal those of plain decoding token for token; None: no limit.
    batch_sizes: padding rows fill a batch up to one of these; empty: no padding rows.
    few_widths: pad calls to one of a few widths, unless a layer is recurrent.
    prefill_chunk: prompt tokens processed between two rounds, and tokens of a call in which a draft catches up.
    max_gap: maximum seconds that running requests wait for a prefill; None: as long as a chunk takes.
    gather_seconds: how long a prompt may wait for others to share its prefill call while requests run.
    parked_prefill: a parked draft prefills prompts if that is cheap; otherwise it catches up when it is used again.
    prefill_padding: maximum padding in a call over prompts of different lengths, as a share of their tokens.
    replay: trace and replay model calls over few tokens per row.
    most_uncopied: maximum tokens of a call for which MLX multiplies by quantised matrices directly; for more it makes
    full-width copies of them; None: never.
    part: bytes of activations that are launched at a time (`activations`).
    """

    launch_steps: bool
    ask_confidence: bool
    launch_ahead: bool
    paged: bool = False
    lengths: tuple[int, ...] = ()
    most_tokens: int | None = None
    batch_sizes: tuple[int, ...] = ()
    few_widths: bool = False
    prefill_chunk: int = 256
    max_gap: float | None = 0.2
    gather_seconds: float = 0.0
    parked_prefill: bool = True
    prefill_padding: float = 1 / 8
    replay: bool = False
    most_uncopied: int | None = None
    part: int = 2**29

    def width(self, tokens: int) -> int:
        """The width of a call that reads `tokens` tokens."""
        return _doubling(tokens, 1) if self.few_widths else tokens

    def batch_size(self, rows: int) -> int:
        """The number of rows that a batch of `rows` requests runs."""
        return next((size for size in self.batch_sizes if size >= rows), rows)

    def capacity(self, positions: int) -> int:
        """Positions to allocate (or, for paged rows, to attend to) if `positions` are needed."""
        if not self.paged:
            return -(-positions // STEP) * STEP
        return _doubling(positions, FEWEST) if positions else 0

    def allowed(self, most: int) -> list[int]:
        """The allowed lengths of proposals up to `most` tokens, ascending."""
        return [n for n in range(1, most + 1) if not self.lengths or n in self.lengths]

    def fits(self, rows: int, proposed: int) -> bool:
        """Whether `proposed` tokens per row may be planned for `rows` rows."""
        return self.most_tokens is None or rows * (1 + proposed) <= self.most_tokens


CPU = Strategy(launch_steps=False, ask_confidence=True, launch_ahead=False, max_gap=None)
METAL = Strategy(
    launch_steps=True,
    ask_confidence=False,
    launch_ahead=True,
    prefill_chunk=512,
    parked_prefill=False,
    # A layer of an 8B model over 512 tokens takes 8 ms at 28 TFLOP/s. With two layers launched, the device never waits for the
    # host.
    part=2**27,
)
CUDA = Strategy(
    launch_steps=True,
    ask_confidence=False,
    launch_ahead=True,
    paged=True,
    lengths=(1, 2, 3, 5, 7, 11, 15),
    most_tokens=64,
    batch_sizes=(0, 1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    few_widths=True,
    prefill_chunk=2048,
    gather_seconds=0.1,
    parked_prefill=False,
    prefill_padding=1.0,
    replay=True,
    # Measured from prefill peaks: 300 tokens showed none, 600 did (docs/results/memory.md, "What calls compute").
    most_uncopied=300,
)


@cache
def _cuda() -> Strategy:
    """The CUDA strategy, with `most_tokens` of MLX's device."""
    return replace(CUDA, most_tokens=products.most_tokens())


_override: ContextVar[Strategy | None] = ContextVar("override", default=None)


@contextmanager
def using(strategy: Strategy) -> Generator[None]:
    """Run this thread's engine as on another kind of device."""
    token = _override.set(strategy)
    try:
        yield
    finally:
        _override.reset(token)


def current() -> Strategy:
    """The strategy for MLX's default device, or the one that `using` has set."""
    if (override := _override.get()) is not None:
        return override
    if mx.default_device().type == mx.cpu:
        return CPU
    return METAL if mx.metal.is_available() else _cuda()
