"""How long work reports where it is."""

from __future__ import annotations

from typing import Protocol


class OnProgress(Protocol):
    """A callback for work in stages."""

    def __call__(self, stage: str, done: int, of: int, note: str = "") -> None:
        """The stage, `done` of `of` in it (of = 0: unknown), and a note. An event without duration, such as a verdict or a
        swap, is a stage with done = of = 0."""
        ...


def silent(stage: str, done: int, of: int, note: str = "") -> None:
    """Reports nothing."""
