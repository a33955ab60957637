"""A child that scores adapters: the common part of the watch's comparison and the gain measurement."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from service.lifecycle.child import Child
from service.lifecycle.context import LifecycleContext
from service.lifecycle.messages import Done, Failed, Message, Scores

log = logging.getLogger(__name__)


class ScoringJob(ABC):
    """A job (`jobs.Job`) that ends with the scores of some adapters."""

    def __init__(self, context: LifecycleContext, child: Child) -> None:
        self._context = context
        self._child = child
        self._scores = Scores({}, golden={})

    @property
    def child(self) -> Child:
        """The child process."""
        return self._child

    @property
    def limit_seconds(self) -> float:
        """The time limit of a training run."""
        return self._context.rules.training.timeout_seconds

    def handle(self, message: Message) -> None:
        """Keeps the scores, and uses them when the child is done."""
        match message:
            case Scores():
                self._scores = message
            case Done():
                self._use(self._scores)
            case Failed(reason):
                self._fail(reason)
            case _:
                log.warning("a scoring child sent an unexpected %s", type(message).__name__)

    @abstractmethod
    def _use(self, scores: Scores) -> None:
        """Called when the child is done. scores: empty if it sent none."""

    @abstractmethod
    def _fail(self, reason: str) -> None:
        """Called when the child ended without a result."""
