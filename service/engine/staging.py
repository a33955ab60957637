"""Loads adapters on the engine thread, in steps between rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from service.core import AdapterRef, RedraftError, Staged, Unavailable
from service.engine.adapters import Draft, load_steps


@dataclass(frozen=True, slots=True)
class Loading:
    """An adapter being loaded. future: receives the Draft or the error."""

    steps: Iterator[Draft | None]
    future: Future[Staged]


class Staging:
    """A queue of adapters that are loaded one after another. True while it is not empty."""

    def __init__(self) -> None:
        self._loading: deque[Loading] = deque()

    def __bool__(self) -> bool:
        return bool(self._loading)

    def start(self, base: Draft | None, ref: AdapterRef | None, fingerprint: str, future: Future[Staged]) -> None:
        """Queue an adapter. base: the base draft, None on a server without one. ref: the adapter; None: the base draft itself.
        fingerprint: of the base draft."""
        if base is None:
            future.set_exception(Unavailable("this server runs without a draft model"))
        elif ref is None:
            future.set_result(base)
        else:
            self._loading.append(Loading(load_steps(base.model, ref, fingerprint), future))

    def step(self) -> None:
        """Run one loading step of the first adapter in the queue, if any.

        Its future receives the Draft once it is loaded, or the error: a RedraftError unchanged, Unavailable for any other.
        """
        if not self._loading:
            return
        loading = self._loading[0]
        try:
            draft = next(loading.steps)
        except Exception as error:  # noqa: BLE001  (it becomes the future's exception)
            self._loading.popleft()
            refused = error if isinstance(error, RedraftError) else Unavailable(f"loading the adapter failed: {error}")
            loading.future.set_exception(refused)
            return
        if draft is not None:
            self._loading.popleft()
            loading.future.set_result(draft)

    def abandon(self) -> list[Future[Staged]]:
        """Empty the queue. Returns the futures of its adapters, for the caller to resolve."""
        futures = [loading.future for loading in self._loading]
        self._loading.clear()
        return futures
