"""A controller with a fixed draft length, so that a test knows what every round proposes."""

from collections.abc import Callable, Sequence

from service.engine.acceptance import Acceptance
from service.engine.costs import Costs, Load
from service.engine.decoder import Decoder
from service.engine.planner import Choice, DraftSteps, Match, Planner


class FixedLength(Planner):
    """Drafts `drafted` tokens for every row. In rounds for which `looks_up` is true, rows with a match propose it instead."""

    def __init__(self, drafted: int, looks_up: Callable[[int], bool] = lambda number: False) -> None:
        super().__init__(drafted, drafted, Costs({(1, 1): 1.0}, {1: 0.1}, {1: 0.0}, 0.0, 0.0))
        self.looks_up, self.number = looks_up, 0

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        self.number += 1
        looks_up = self.looks_up(self.number)
        counts = tuple(min(self.drafted, m.available) if m and looks_up else 0 for m in matches)
        return Choice(self.drafted if drafts else 0, counts)

    def steps(
        self, load: Load, choice: Choice, greedy: Sequence[bool], drafts: Sequence[bool] | None = None
    ) -> DraftSteps:
        return DraftSteps(choice.drafted)

    def prefills(self, load: Load) -> bool:
        return True


def fix_length(decoder: Decoder, choices: FixedLength) -> Decoder:
    """Give the decoder this controller."""
    decoder.planner = choices
    return decoder
