"""How many of those tested were kept, lately."""

from __future__ import annotations


class Share:
    """memory: what an observation weighs after one more."""

    __slots__ = ("kept", "memory", "tested")

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.kept = self.tested = 0.0

    def observe(self, kept: bool, tested: bool = True) -> None:
        """tested: False where time alone went by."""
        self.kept = self.memory * self.kept + (tested and kept)
        self.tested = self.memory * self.tested + tested

    def rate(self, before: float, weight: float) -> float:
        """before: what it is taken to be where nothing was seen, which counts for `weight` observations."""
        return (self.kept + weight * before) / (self.tested + weight)
