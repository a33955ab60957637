"""A draft whose logits a test changes."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from tests.support.typed import layers_of

Spoil = Callable[[mx.array, mx.array], mx.array]
"""(tokens (B, N), logits (B, N, V)) -> changed logits."""


class HookedDraft(nn.Module):
    """A draft whose logits (B, N, V) go through `spoil(tokens, logits)`. It cannot be split into body and head, so that its
    errors show when the round is evaluated."""

    def __init__(self, inner: nn.Module, spoil: Spoil) -> None:
        super().__init__()
        self.inner, self.spoil = inner, spoil

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        return self.spoil(tokens, self.inner(tokens, cache=cache))

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)
