"""Cases for what was decoded while the draft rested: a child asks the draft afterwards what it would have proposed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from service.lifecycle.children import Cases, Child, Crashed, Done, GaveUp, Message
from service.lifecycle.parts import Parts

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Children in a row that may fail before the generations they were to look at are passed over."""


class Supply:
    """Which generations wait for their cases, and the child that works them out. The queue is in rows and shrinks with every
    message that was acted on: whatever ends a child, the next one goes on from there."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._failures = 0

    def tokens(self) -> int:
        """Output tokens of what waits."""
        if self._parts.rules.spec.get("k") == 0:
            return 0  # by its owner's word the draft never drafts: there is nothing to learn for
        return self._parts.unseen.tokens(self._parts.who)

    def begin(self) -> SupplyJob | None:
        """Start a child on the draft as it serves and the newest generations, no more than a run trains on; None when it
        could not be started."""
        parts = self._parts
        generations = parts.unseen.names(parts.who, parts.rules.training.max_generations)
        try:
            child = parts.launch(kind="cases", adapter=parts.folder(parts.serving()), generations=generations)
        except OSError as error:
            self.failed(generations, f"the child could not be started: {error}")
            return None
        return SupplyJob(parts, self, generations, child)

    def failed(self, generations: Sequence[str], reason: str) -> None:
        """No cases of these this time."""
        self._failures += 1
        log.warning("no cases for %d generations without drafts: %s", len(generations), reason)
        if self._failures >= ATTEMPTS:
            self.done(generations)

    def done(self, generations: Sequence[str]) -> None:
        """There will be no cases of these but those that were supplied."""
        self._parts.unseen.supply(dict.fromkeys(generations, ()))
        self._failures = 0


class SupplyJob:
    """A child that works out cases."""

    def __init__(self, parts: Parts, supply: Supply, generations: Sequence[str], child: Child) -> None:
        self._parts = parts
        self._supply = supply
        self._generations = generations
        self._child = child

    @property
    def child(self) -> Child:
        """The child process."""
        return self._child

    def pause(self, busy: bool, strain: str | None) -> None:
        """Does nothing: this job does not pause for `strain`."""
        # Not for strain: it is short, and a comparison may be waiting for it to end.

    def heed(self, message: Message) -> None:
        """Store the cases of a message; when the child is done or fails, settle which generations still wait."""
        match message:
            case Cases(found):
                if count := self._parts.unseen.supply(found):
                    self._parts.events.cases_supplied(count)
            case Done():
                self._supply.done(self._generations)
            case GaveUp(reason) | Crashed(reason):
                self._supply.failed(self._generations, reason)
            case _:
                log.warning("a child that works out cases has no use for %s", type(message).__name__)

    def abandon(self, reason: str) -> None:
        """Log the reason; generations without cases go on waiting."""
        log.info("working out cases ended: %s", reason)
