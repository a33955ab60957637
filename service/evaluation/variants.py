"""What an ablation tries: one recipe of a run, and the tables of recipes that differ from it in one thing each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from service.core import BadRequest
from service.learning.objectives import LEARNT, Objective
from service.settings import TrainingSettings

KEPT = 0.4
"""Share of positions that AdaSPEC keeps (Hu et al., yuezhouhu/adaspec)."""
RANKS, REPLAYS, CASES = (4, 16, 64), (0.0, 0.2, 0.4, 0.5), (50, 200, 800)
EPOCHS = (1, 2, 4)
RATES = (0.25, 0.5, 1.0, 2.0)
"""Times the settings' learning rate."""


class Positions(StrEnum):
    """Where is learnt: at every response position, where a draft of three tokens was first rejected, or where AdaSPEC's
    selection says."""

    ALL = "all"
    REJECTIONS = "first rejections only"
    SELECTED = "AdaSPEC, best 40 %"


@dataclass(frozen=True, slots=True)
class Recipe:
    """temperature: of the texts learnt from and measured on. cases: generations learnt from, of the new ones. full: the
    objective over the target's whole distribution, computed beside, instead of the stored top and tail."""

    training: TrainingSettings
    cases: int
    temperature: float = 0.0
    objective: Objective = LEARNT
    positions: Positions = Positions.ALL
    full: bool = False

    def having(self, **changes: object) -> Recipe:
        """With other training settings."""
        return replace(self, training=self.training.model_copy(update=changes))


@dataclass(frozen=True, slots=True)
class Table:
    """One thing that is varied. rows: label -> recipe, the first of which is where it is compared from."""

    name: str
    title: str
    rows: Mapping[str, Recipe]

    @property
    def temperature(self) -> float:
        """Sampling temperature of the first recipe; all recipes of a table share it."""
        return next(iter(self.rows.values())).temperature


def tables(base: Recipe, available: int, only: Sequence[str] | None = None) -> list[Table]:
    """All of them, or those named. available: generations that can be learnt from. Raises BadRequest naming an unknown one."""
    rate = base.training.learning_rate
    positions = {
        "all": base,
        Positions.REJECTIONS.value: replace(base, positions=Positions.REJECTIONS),
        "all, first rejections x2": base.having(reject_weight=2.0),
        "all, first rejections x3": base.having(reject_weight=3.0),
        Positions.SELECTED.value: replace(base, positions=Positions.SELECTED),
    }
    cases = sorted({count for count in (*CASES, base.cases) if count <= available})
    made = [
        Table("loss", "Loss at T = 0", {o.value: replace(base, objective=o) for o in Objective}),
        Table("loss_t1", "Loss at T = 1", {o.value: replace(base, objective=o, temperature=1.0) for o in Objective}),
        Table("positions", "Positions learnt from", positions),
        Table("rank", "Rank", {str(n): base.having(rank=n) for n in RANKS}),
        Table("rate", "Learning rate", {f"{rate * r:g}": base.having(learning_rate=rate * r) for r in RATES}),
        Table("epochs", "Epochs", {str(n): base.having(epochs=n) for n in EPOCHS}),
        Table("replay", "Replay share", {f"{share:.0%}": base.having(replay=share) for share in REPLAYS}),
        Table("targets", "What is learnt towards", {"top 32 and tail": base, "all logits": replace(base, full=True)}),
        Table("cases", "Generations learnt from", {str(n): replace(base, cases=n) for n in cases}),
    ]
    if only is None:
        return made
    names = {"loss": ("loss", "loss_t1")}
    wanted = {name for asked in only for name in names.get(asked, (asked,))}
    if unknown := wanted - {table.name for table in made}:
        known = ", ".join(table.name for table in made)
        raise BadRequest(f"no table is called {', '.join(sorted(unknown))}; there are {known}", field="only")
    return [table for table in made if table.name in wanted]
