"""How the engine runs on a kind of device: the only place where it asks which one it has.

On an accelerator the host must not be in the way: it waits once a round, draft steps are handed over one by one, so that the
device works while Python builds the next, and what is logged is computed with the round.

On CUDA the host is slower than the device: model calls are traced once for each shape and replayed (`replay`), and products
and attention of up to some hundred tokens a row are kernels of our own (`products`, `attention`). So that shapes come again,
padding rows fill a batch up to one of a few sizes, and keys and values are in `pages`. Other calls under a mask go
to cuDNN, which builds a plan for each new shape of queries, keys and mask (MLX's
mlx/backend/cuda/scaled_dot_product_attention.cpp, `sdpa_cudnn`): they see keys and values gathered to one of a few lengths, and
have one of a few widths. Metal's kernels take any shape (mlx/backend/metal/scaled_dot_product_attention.cpp) and read rows that
lie in one piece.

On a CPU the device is the host: waiting costs nothing, asking the draft for its confidence saves steps, and evidence is
cheaper where only the emitted positions are looked at.
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
"""Positions are allocated in multiples of STEP; a prefill over rows in pages sees FEWEST at least."""
BURST = 2
"""Chunks of prompts that are prefilled between two rounds while more requests prefill than run."""
PAGE = 32
"""Positions of a page of keys and values, and of a block of the prefix cache."""


def _doubling(least: int, first: int) -> int:
    """The least of `first`, and of what doubles in two steps from there on, that is not below `least`."""
    if least <= first:
        return first
    double = 1 << (least - 1).bit_length()
    return double * 3 // 4 if double >= 4 and least <= double * 3 // 4 else double


@dataclass(frozen=True, slots=True)
class Strategy:
    """launch_steps: hand over each draft step by itself. ask_confidence: wait for the draft's confidence between steps, to stop
    early. launch_ahead: launch the next round before this one is read, where rows allow it; what is logged is then computed in
    the round's own evaluation, for all positions, else afterwards, for the emitted ones. paged: keys and values are in `pages`,
    which `attention` reads. lengths: proposals are of so many tokens; empty: of any number. most_tokens: of all rows that a
    planned call verifies, where calls up to there round alike (`products`), so that texts are plain decoding's own to the
    token; None: any number. batch_sizes: padding rows fill a batch up to one of these; empty: there are none. few_widths: calls
    are padded to one of a few widths, unless a layer is recurrent. prefill_chunk: prompt tokens processed between two rounds,
    and tokens of a call in which a draft catches up. max_gap: seconds that running requests wait for a prefill, at most; None:
    as long as a chunk takes. gather_seconds: how long a prompt may wait for others, to be prefilled in one call with them,
    while requests run. parked_prefill: a parked draft prefills prompts where that costs little; else it catches up when it is
    to draft. prefill_padding: padding allowed in a call over prompts of different lengths, as a share of their tokens. replay:
    model calls over few tokens a row are traced and replayed. most_uncopied: tokens of a call up to which MLX multiplies by
    quantised matrices as they are; for more it makes copies of them at full width; None: never. part: bytes of activations
    that are launched at a time (`activations`)."""

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
        """Tokens of a call that reads so many."""
        return _doubling(tokens, 1) if self.few_widths else tokens

    def batch_size(self, rows: int) -> int:
        """Rows that a batch of so many requests runs."""
        return next((size for size in self.batch_sizes if size >= rows), rows)

    def capacity(self, positions: int) -> int:
        """Positions to allocate, or, of rows in pages, to attend to, where so many are needed."""
        if not self.paged:
            return -(-positions // STEP) * STEP
        return _doubling(positions, FEWEST) if positions else 0

    def allowed(self, most: int) -> list[int]:
        """Lengths of proposals where at most so many tokens may be proposed, ascending."""
        return [n for n in range(1, most + 1) if not self.lengths or n in self.lengths]

    def fits(self, rows: int, proposed: int) -> bool:
        """Whether proposals of so many tokens over so many rows may be planned."""
        return self.most_tokens is None or rows * (1 + proposed) <= self.most_tokens


CPU = Strategy(launch_steps=False, ask_confidence=True, launch_ahead=False, max_gap=None)
METAL = Strategy(
    launch_steps=True,
    ask_confidence=False,
    launch_ahead=True,
    prefill_chunk=512,
    parked_prefill=False,
    # A layer of an 8B model over 512 tokens takes 8 ms at 28 TFLOP/s: with two launched, the device never waits for the host.
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
    # By the peaks of prefills: those of 300 tokens had none, those of 600 had (docs/results/memory.md, "What calls compute").
    most_uncopied=300,
)


@cache
def _cuda() -> Strategy:
    """CUDA on MLX's device."""
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
    """The strategy for MLX's default device, or what `using` says."""
    if (override := _override.get()) is not None:
        return override
    if mx.default_device().type == mx.cpu:
        return CPU
    return METAL if mx.metal.is_available() else _cuda()
