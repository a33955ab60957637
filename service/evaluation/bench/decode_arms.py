"""The arms of `redraft bench decode`: this engine's ways of decoding one stream, and mlx-lm's on the very same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from service.core import BadRequest, Prompt
from service.engine.adapters import Draft
from service.evaluation.bench.arms import PLAIN, Arm, EngineArm, choose, missing
from service.evaluation.bench.mlx_lm_arm import MlxLmArm, speed_by_k, with_full_head
from service.models.pair import Pair
from service.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class DecodeArms:
    """Makes the arms.

    static, adapted: drafts of this engine. mlx_lm_static, mlx_lm_adapted: drafts of mlx-lm. k: draft length of every arm that
    drafts; None: this engine chooses, and mlx-lm gets its fastest K on the `probes`.
    """

    pair: Pair
    static: Draft | None
    adapted: Draft | None
    mlx_lm_static: Draft | None
    mlx_lm_adapted: Draft | None
    engine: EngineSettings
    k: int | None
    probes: Sequence[Prompt]

    def plain(self) -> Arm:
        """The target alone on this engine."""
        return EngineArm(self.pair, None, k=0, prefill_chunk=self.engine.prefill_chunk)

    def drafting(self, draft: Draft | None) -> Arm | None:
        """This engine with `draft`, at draft length `k`, or as the settings say; None without a draft."""
        if draft is None:
            return None
        k, adaptive = (self.engine.num_draft_tokens, self.engine.adaptive) if self.k is None else (self.k, False)
        return EngineArm(self.pair, draft, k=k, adaptive=adaptive, prefill_chunk=self.engine.prefill_chunk)

    def lookup(self) -> Arm | None:
        """This engine with the adapted or else the static draft and with prompt look-up, of which the planner chooses; None
        where the settings have no look-up, or `k` is given."""
        if not self.engine.num_lookup_tokens or self.k is not None:
            return None
        return EngineArm(
            self.pair,
            self.adapted or self.static,
            k=self.engine.num_draft_tokens,
            lookup=self.engine.num_lookup_tokens,
            prefill_chunk=self.engine.prefill_chunk,
        )

    def mlx_lm_plain(self) -> Arm:
        """mlx-lm's `generate_step` on the target alone."""
        return MlxLmArm(self.pair.target.model, self.pair.eos)

    def mlx_lm_drafting(self, draft: Draft | None) -> Arm | None:
        """mlx-lm's speculative decoding with `draft`, at `k` or its fastest K on the probes; None without a draft."""
        if draft is None:
            return None
        target, model, eos = self.pair.target.model, with_full_head(draft.model), self.pair.eos
        if self.k is not None:
            return MlxLmArm(target, eos, model, self.k)
        by_k = speed_by_k(target, model, eos, self.probes)
        return MlxLmArm(target, eos, model, next(iter(by_k)), {"tokens_per_second_by_k": by_k})


ARMS: dict[str, Callable[[DecodeArms], Arm | None]] = {
    PLAIN: DecodeArms.plain,
    "static": lambda arms: arms.drafting(arms.static),
    "adapted": lambda arms: arms.drafting(arms.adapted),
    "lookup": DecodeArms.lookup,
    "mlx_lm_plain": DecodeArms.mlx_lm_plain,
    "mlx_lm_spec_static": lambda arms: arms.mlx_lm_drafting(arms.mlx_lm_static),
    "mlx_lm_spec_adapted": lambda arms: arms.mlx_lm_drafting(arms.mlx_lm_adapted),
}
"""Name -> what makes the arm; None where the draft or the adapter it needs is not at hand."""


def make_arms(source: DecodeArms, names: Sequence[str] | None) -> dict[str, Arm]:
    """The arms by name. names: None for all that can be made. Raises BadRequest for a named one that lacks what it needs."""
    made: dict[str, Arm] = {}
    for name in choose(names, list(ARMS)):
        arm = ARMS[name](source)
        if arm is not None:
            made[name] = arm
        elif names is not None:
            raise BadRequest(missing(name), field="arms")
    return made
