"""The arms of `redraft bench decode`: this engine's ways of decoding one stream, and mlx-lm's on the very same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.core import BadRequest, Prompt
from service.engine.adapters import Draft
from service.evaluation.bench.mlx_lm_arm import MlxLmArm, best_k, whole
from service.evaluation.bench.arms import Arm, EngineArm
from service.models.pair import Pair
from service.settings import EngineSettings

PLAIN = "plain"
"""The target alone: always measured, for everything is compared with it."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What arms are made of. theirs, theirs_adapted: what mlx-lm drafts with. k: exactly so many drafted tokens in every arm
    that drafts; None: what pays for this engine, and mlx-lm's best K on the `probes`."""

    pair: Pair
    static: Draft | None
    adapted: Draft | None
    theirs: Draft | None
    theirs_adapted: Draft | None
    engine: EngineSettings
    k: int | None
    probes: Sequence[Prompt]

    def plain(self) -> Arm:
        """The target alone on this engine."""
        return EngineArm(self.pair, None, k=0, prefill_chunk=self.engine.prefill_chunk)

    def drafting(self, draft: Draft | None) -> Arm | None:
        """This engine with `draft`, at exactly `k` drafted tokens or adaptive; None without a draft."""
        if draft is None:
            return None
        k, adaptive = (self.engine.num_draft_tokens, self.engine.adaptive) if self.k is None else (self.k, False)
        return EngineArm(self.pair, draft, k=k, adaptive=adaptive, prefill_chunk=self.engine.prefill_chunk)

    def looking_up(self) -> Arm | None:
        """With the best draft at hand; which of the two proposes is chosen by what was measured, at any K."""
        most = self.engine.num_lookup_tokens
        if not most or self.k is not None:
            return None
        return EngineArm(
            self.pair,
            self.adapted or self.static,
            k=self.engine.num_draft_tokens,
            lookup=most,
            prefill_chunk=self.engine.prefill_chunk,
        )

    def mlx_lm(self) -> Arm:
        """mlx-lm's `generate_step` on the target alone."""
        return MlxLmArm(self.pair.target.model, self.pair.eos)

    def mlx_lm_drafting(self, draft: Draft | None) -> Arm | None:
        """mlx-lm's speculative decoding with `draft`, at `k` or its fastest K on the probes; None without a draft."""
        if draft is None:
            return None
        target, model, eos = self.pair.target.model, whole(draft.model), self.pair.eos
        if self.k is not None:
            return MlxLmArm(target, eos, model, self.k)
        tried = best_k(target, model, eos, self.probes)
        return MlxLmArm(target, eos, model, next(iter(tried)), {"tokens_per_second_by_k": tried})


ARMS: dict[str, Callable[[Contest], Arm | None]] = {
    PLAIN: Contest.plain,
    "static": lambda contest: contest.drafting(contest.static),
    "adapted": lambda contest: contest.drafting(contest.adapted),
    "lookup": Contest.looking_up,
    "mlx_lm_plain": Contest.mlx_lm,
    "mlx_lm_spec_static": lambda contest: contest.mlx_lm_drafting(contest.theirs),
    "mlx_lm_spec_adapted": lambda contest: contest.mlx_lm_drafting(contest.theirs_adapted),
}
"""Name -> what makes it; None where the draft or the adapter it needs is not at hand."""


def choose(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The named ones of the known arms in their usual order, with PLAIN in any case; None: all. Raises BadRequest."""
    for name in names or ():
        if name not in known:
            raise BadRequest(f"no arm {name!r}: choose among {', '.join(known)}", field="arms")
    return [name for name in known if names is None or name in names or name == PLAIN]


def make(contest: Contest, names: Sequence[str] | None) -> dict[str, Arm]:
    """The arms by name; None: all that can be made. Raises BadRequest for a named one that lacks what it needs."""
    made: dict[str, Arm] = {}
    for name in choose(names, list(ARMS)):
        arm = ARMS[name](contest)
        if arm is not None:
            made[name] = arm
        elif names is not None:
            raise BadRequest(missing(name), field="arms")
    return made


def missing(name: str) -> str:
    """What the named arm needs, as the text of the error."""
    if name == "lookup":
        return "the arm lookup needs engine.num_lookup_tokens above 0, and no --k"
    if name.startswith("mlx_lm"):
        return f"the arm {name} needs a draft that mlx-lm runs: give --mlx-lm-draft" + (
            ", and --adapt-on" if name.endswith("adapted") else ""
        )
    needs = "an adapter: give --adapter or --adapt-on" if name.endswith("adapted") else "a draft"
    return f"the arm {name} needs {needs}"
