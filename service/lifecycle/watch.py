"""Looking after a promotion: the adapter against its parent and the bare draft on traffic that came after it."""

from __future__ import annotations

import logging

from service.core import BARE_DRAFT, AdapterRef, AdapterState, IllegalMove, Verdict
from service.lifecycle.children import Child, Crashed, Done, GaveUp, Message, Scores
from service.lifecycle.looks import look, looks
from service.lifecycle.parts import Parts
from service.store.sampler import sample

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Comparisons of one adapter that may fail before it is left alone."""
PATIENCE = 4
"""Generations for each text that a look wants, after which any but the last look makes do with fewer: what is very bad shows in
a few."""
LOOKED_THROUGH = 10
"""Generations that are looked through for each that a watch wants; after so many, or as many as the log may hold, it
ends with what there is."""


class Watch:
    """Which adapter is still to be compared, and its comparison. Looks that decided nothing are evaluations "look"; the watch
    is over when one of kind "watch" is recorded: by a look that decided, by an operator who chose the adapter or rolled it
    back, or because comparing failed too often."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._failures: dict[int, int] = {}

    def pending(self) -> AdapterRef | None:
        """The active adapter, when it was promoted by a gate and its watch is not over."""
        adapters = self._parts.adapters
        ref = adapters.active(self._parts.who.draft)
        if ref is None or not adapters.evaluations(ref.id, "gate") or adapters.evaluations(ref.id, "watch"):
            return None
        return ref

    def begin(self) -> WatchJob | None:
        """Start the next comparison once enough has been generated since the promotion."""
        ref = self.pending()
        if ref is None:
            return None
        adapters, due = self._parts.adapters, looks(self._parts.rules.gate.watch_generations)
        promoted = adapters.serves_since(self._parts.who.draft)
        done = len(adapters.evaluations(ref.id, "look"))
        wanted = due[min(done, len(due) - 1)]
        logged, who = self._parts.generations, self._parts.who
        most = min(LOOKED_THROUGH * due[-1], self._parts.rules.max_generations)
        if len(logged.names_after(who, promoted, wanted)) < wanted:
            return None
        texts = logged.texts_after(who, promoted, most)
        # As at the gate: a health check every few seconds is one text, not evidence.
        fresh = [one.id for one in sample(texts, due[-1], seed=ref.id)]
        # Traffic that repeats itself may never bring enough; runs wait for the watch, so it must end.
        last = len(fresh) >= due[-1] or len(texts) >= most
        early = done < len(due) - 1 and len(texts) >= PATIENCE * wanted
        if len(fresh) < wanted and not early and not last:
            return None
        try:
            child = self._parts.launch(
                kind="score",
                adapters={str(adapter): self._parts.folder(adapter) for adapter in (ref.id, ref.parent, BARE_DRAFT)},
                generations=fresh,
            )
        except OSError as error:
            self.failed(ref, f"the child could not be started: {error}")
            return None
        return WatchJob(self._parts, self, ref, child, done=done, last=last)

    def failed(self, ref: AdapterRef, reason: str) -> None:
        """No comparison this time."""
        self._failures[ref.id] = self._failures.get(ref.id, 0) + 1
        log.warning("adapter %d could not be compared with what served before: %s", ref.id, reason)
        if self._failures[ref.id] >= ATTEMPTS:
            self.excuse(ref, f"stays: it could not be compared ({reason})")

    def excuse(self, ref: AdapterRef, reason: str) -> None:
        """End the watch without a comparison; once it has ended, nothing happens."""
        if not self._parts.adapters.evaluations(ref.id, "watch"):
            self._parts.adapters.record_evaluation(ref.id, "watch", Verdict(True, reason, 0, 0, 0.0, 0.0, 0.0))


class WatchJob:
    """A child that scores the watched adapter, its parent and the bare draft. done: looks before this one. last: there will be
    no other look."""

    def __init__(self, parts: Parts, watch: Watch, ref: AdapterRef, child: Child, *, done: int, last: bool) -> None:
        self._parts = parts
        self._watch = watch
        self._ref = ref
        self._child = child
        self._done = done
        self._last = last
        self._scores: Scores | None = None

    @property
    def child(self) -> Child:
        """The child process."""
        return self._child

    def pause(self, busy: bool, strain: str | None) -> None:
        """Does nothing: a comparison does not pause for `strain`."""
        # Whatever the machine is short of: a comparison is short, and a bad adapter costs more while it waits.

    def heed(self, message: Message) -> None:
        """Take the scores; when the child is done decide about the adapter; a failure counts against its ATTEMPTS."""
        match message:
            case Scores():
                self._scores = message
            case Done():
                self._decide()
            case GaveUp(reason) | Crashed(reason):
                self._watch.failed(self._ref, reason)
            case _:
                log.warning("a child that compares has no use for %s", type(message).__name__)

    def abandon(self, reason: str) -> None:
        """Log the reason; the watch stays pending and a later tick compares again."""
        log.info("comparing adapter %d ended: %s", self._ref.id, reason)

    def _decide(self) -> None:
        ref, adapters, rules = self._ref, self._parts.adapters, self._parts.rules.gate
        if adapters.evaluations(ref.id, "watch"):
            return  # an operator chose it meanwhile
        said = self._scores or Scores({}, golden={})
        scores = said.by_adapter
        opponents, costs = (ref.parent, BARE_DRAFT), self._parts.own_costs()
        steps = {other: said.step(str(other), relative_to=str(ref.id)) for other in opponents}
        try:
            found = look(
                scores.get(str(ref.id), ()),
                {other: scores.get(str(other), ()) for other in opponents},
                # What engines measure is what rounds cost with the adapter that serves.
                seconds=costs.seconds if costs is not None else None,
                others_seconds={other: costs.scaled(step) for other, step in steps.items()}
                if costs is not None
                else None,
                parent=ref.parent,
                count=len(looks(rules.watch_generations)),
                last=self._last,
                resamples=rules.bootstrap,
                seed=ref.id,
            )
        except ValueError as error:
            self._watch.failed(ref, f"its scores cannot be judged: {error}")
            return
        if found.back_to is not None and adapters.get(ref.id).state is AdapterState.ACTIVE:
            try:
                adapters.take_back(ref.id, found.back_to, found.verdict, looks=self._done)
            except IllegalMove as error:
                log.warning("adapter %d is not rolled back: %s", ref.id, error)
                return
            self._parts.events.rolled_back()
        elif not adapters.record_evaluation(ref.id, "watch" if found.over else "look", found.verdict, looks=self._done):
            log.warning("adapter %d has been looked at by another process meanwhile", ref.id)
            return
        log.info("adapter %d %s", ref.id, found.verdict.reason)
        if found.short:
            log.warning("adapter %d: the engine accepts less of its drafts than its scores say", ref.id)
