"""Whether a training run fits into the memory that is left, before it takes any."""

from __future__ import annotations

from collections.abc import Mapping

from service.core import TrainingFailed
from service.learning.loss import CHUNK
from service.models.memory import free_bytes

_BASE = 512 * 2**20
"""Interpreter, MLX and its buffers."""
_PER_HIDDEN, _PER_INNER, _PER_SCORE, _PER_LOGIT = 16, 6, 3, 5
"""Arrays that one block keeps for its backward pass: of the hidden width, of the feed-forward width, of attention
scores; and copies of the logits in the loss. Counted for a Llama block."""
_FLOAT = 4


def training_bytes(config: Mapping[str, object], *, weights: int, rows: int, length: int, steps: int = 1) -> int:
    """Bytes a run needs at its peak, estimated. config: the draft's config.json. weights: bytes of all weights in
    memory. rows, length: of the largest batch, padding included. steps: times the draft's blocks run over it."""

    def size(name: str, default: int) -> int:
        value = config.get(name)
        return value if isinstance(value, int) else default

    hidden = size("hidden_size", 1024)
    layers, heads = size("num_hidden_layers", 12), size("num_attention_heads", 16)
    inner, vocabulary = size("intermediate_size", 4 * hidden), size("vocab_size", 2**17)
    token = _PER_HIDDEN * hidden + _PER_INNER * inner + _PER_SCORE * heads * length
    logits = _PER_LOGIT * min(CHUNK, rows * length) * vocabulary
    return _BASE + weights + _FLOAT * (steps * layers * rows * length * token + logits)


def loading_bytes(weights: int) -> int:
    """Bytes a model needs for a teacher-forced pass: its weights and room to work in."""
    return _BASE + weights


def check(needed: int, *, least_gb: float) -> None:
    """Raises TrainingFailed when less than `least_gb` GiB (0: less than `needed` bytes) is free."""
    wanted = int(least_gb * 2**30) if least_gb > 0 else needed
    free = free_bytes()
    if free < wanted:
        raise TrainingFailed(f"training takes {wanted / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free")
