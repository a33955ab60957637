"""Looking after a promotion: the adapter against its parent on traffic that came after it."""

from __future__ import annotations

import logging

from service.core import AdapterRef, AdapterState, Verdict
from service.lifecycle import gate
from service.lifecycle.children import Child, Crashed, Done, GaveUp, Message, Scores
from service.lifecycle.parts import Parts

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Comparisons of one adapter that may fail before it is left alone."""


class Watch:
    """Which adapter is still to be compared, and its comparison. A watch is over when its evaluation is recorded: by
    its verdict, by an operator who chose the adapter, or because comparing failed too often."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._failures: dict[int, int] = {}

    def pending(self) -> AdapterRef | None:
        """The active adapter, when it was promoted by a gate and not yet compared with its parent."""
        adapters = self._parts.adapters
        ref = adapters.active(self._parts.who.draft)
        if ref is None or not adapters.evaluations(ref.id, "gate") or adapters.evaluations(ref.id, "watch"):
            return None
        return ref

    def begin(self) -> WatchJob | None:
        """Start the comparison once enough has been generated since the promotion."""
        ref = self.pending()
        if ref is None:
            return None
        promoted, _ = self._parts.adapters.evaluations(ref.id, "gate")[-1]
        wanted = self._parts.rules.gate.watch_generations
        fresh = self._parts.generations.after(self._parts.who, promoted, wanted)
        if len(fresh) < wanted:
            return None
        try:
            child = self._parts.launch(
                kind="score",
                adapters={str(adapter): self._parts.folder(adapter) for adapter in (ref.id, ref.parent)},
                generations=[generation.id for generation in fresh],
            )
        except OSError as error:
            self.failed(ref, f"the child could not be started: {error}")
            return None
        return WatchJob(self._parts, self, ref, child)

    def failed(self, ref: AdapterRef, reason: str) -> None:
        """No comparison this time."""
        self._failures[ref.id] = self._failures.get(ref.id, 0) + 1
        log.warning("adapter %d could not be compared with its parent: %s", ref.id, reason)
        if self._failures[ref.id] >= ATTEMPTS:
            self.excuse(ref, f"stays: it could not be compared ({reason})")

    def excuse(self, ref: AdapterRef, reason: str) -> None:
        """End the watch without a comparison; once it has ended, nothing happens."""
        if not self._parts.adapters.evaluations(ref.id, "watch"):
            self._parts.adapters.record_evaluation(ref.id, "watch", Verdict(True, reason, 0, 0, 0.0, 0.0, 0.0))


class WatchJob:
    """A child that scores the watched adapter and its parent."""

    def __init__(self, parts: Parts, watch: Watch, ref: AdapterRef, child: Child) -> None:
        self._parts = parts
        self._watch = watch
        self._ref = ref
        self._child = child
        self._scores: Scores | None = None

    @property
    def child(self) -> Child:
        return self._child

    def heed(self, message: Message) -> None:
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
        log.info("comparing adapter %d ended: %s", self._ref.id, reason)

    def _decide(self) -> None:
        ref, adapters = self._ref, self._parts.adapters
        if adapters.evaluations(ref.id, "watch"):
            return  # an operator chose it meanwhile
        scores = self._scores.by_adapter if self._scores is not None else {}
        try:
            verdict = gate.watch(
                scores.get(str(ref.id), ()),
                scores.get(str(ref.parent), ()),
                resamples=self._parts.rules.gate.bootstrap,
                seed=ref.id,
            )
        except ValueError as error:
            self._watch.failed(ref, f"its scores cannot be judged: {error}")
            return
        if not verdict.promoted and adapters.get(ref.id).state is AdapterState.ACTIVE:
            # Before the evaluation, which ends the watch: a server that dies in between must not keep a worse adapter.
            adapters.roll_back(ref.id)
            self._parts.events.rolled_back()
        adapters.record_evaluation(ref.id, "watch", verdict)
        log.info("adapter %d %s", ref.id, verdict.reason)
