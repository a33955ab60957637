"""Gives an idle engine's weights back to the machine, and knows of it what outlives them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from service.core import BARE_DRAFT, AdapterRef, Prompt, Provenance
from service.engine.costs import Costs
from service.engine.drafters.lookup import Lookup
from service.engine.engine import Engine, check_length
from service.engine.planner import Planner


@dataclass(frozen=True, slots=True)
class Unloaded:
    """An engine without its weights and caches. Holds no MLX array.

    ref: the adapter that drafts once it is loaded again, None for the bare draft. timed: costs of rounds with the bare draft.
    lookup: what look-ups find, which erasures clear after loading the engine."""

    context: int
    provenance: Provenance
    ref: AdapterRef | None
    timed: Costs | None
    planner: Planner | None
    lookup: Lookup | None

    @classmethod
    def of(cls, engine: Engine) -> Unloaded:
        """What is kept of an engine that has no requests."""
        decoder = engine.decoder
        ref = None if (drafter := decoder.batch.drafter) is None else drafter.draft.ref
        return cls(engine.context, engine.provenance, ref, decoder.timed, decoder.planner, decoder.lookup)

    @property
    def adapter(self) -> int:
        """Id of the adapter; BARE_DRAFT (0) for none."""
        return BARE_DRAFT if self.ref is None else self.ref.id

    def check(self, prompt: Prompt) -> None:
        """As Engine.check. Once loaded, the engine may have less memory than before: it checks what waits again."""
        check_length(prompt, self.context)


class IdleTimer:
    """Tells when nothing has been asked of an engine for `seconds`; never where that is None."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._since = time.monotonic()

    def used(self) -> None:
        """Something was asked of the engine."""
        self._since = time.monotonic()

    @property
    def minutes(self) -> float:
        """How long it has been idle."""
        return (time.monotonic() - self._since) / 60

    @property
    def due(self) -> bool:
        """Whether the engine has been idle for long enough."""
        return self._seconds is not None and time.monotonic() - self._since >= self._seconds
