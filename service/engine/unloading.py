"""Releases an idle engine's weights, and keeps what outlives them."""

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

    ref: the adapter to load with the engine, None for the base draft. timed: costs of rounds with the base draft. lookup: the
    texts of prompt lookup; erasure clears them after reloading the engine.
    """

    context: int
    provenance: Provenance
    ref: AdapterRef | None
    timed: Costs | None
    planner: Planner | None
    lookup: Lookup | None

    @classmethod
    def of(cls, engine: Engine) -> Unloaded:
        """What is kept of an engine without requests."""
        decoder = engine.decoder
        ref = None if (drafter := decoder.batch.drafter) is None else drafter.draft.ref
        return cls(engine.context, engine.provenance, ref, decoder.timed, decoder.planner, decoder.lookup)

    @property
    def adapter(self) -> int:
        """Id of the adapter; BARE_DRAFT (0) for none."""
        return BARE_DRAFT if self.ref is None else self.ref.id

    def check(self, prompt: Prompt) -> None:
        """As Engine.check. A reloaded engine may have less memory than before, so it checks waiting requests again."""
        check_length(prompt, self.context)


class IdleTimer:
    """Tells when an engine has been idle for `seconds`; never if that is None."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._since = time.monotonic()

    def used(self) -> None:
        """Record that the engine was used."""
        self._since = time.monotonic()

    @property
    def minutes(self) -> float:
        """How long it has been idle."""
        return (time.monotonic() - self._since) / 60

    @property
    def due(self) -> bool:
        """Whether the engine has been idle long enough."""
        return self._seconds is not None and time.monotonic() - self._since >= self._seconds
