"""Adapters on their way to the engine: checked and loaded between rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from service.core import AdapterRef, RedraftError, Staged, Unavailable
from service.engine.adapters import Draft, load_steps


@dataclass(frozen=True, slots=True)
class Loading:
    """An adapter being loaded a step at a time."""

    steps: Iterator[Draft | None]
    future: Future[Staged]


class Staging:
    """Adapters being loaded one after another, a step between two rounds."""

    def __init__(self) -> None:
        self._loading: deque[Loading] = deque()

    def __bool__(self) -> bool:
        return bool(self._loading)

    def begin(self, base: Draft | None, ref: AdapterRef | None, fingerprint: str, future: Future[Staged]) -> None:
        """base: the bare draft, which is what None asks for; fingerprint: its own."""
        if base is None:
            future.set_exception(Unavailable("this server runs without a draft model"))
        elif ref is None:
            future.set_result(base)
        else:
            self._loading.append(Loading(load_steps(base.model, ref, fingerprint), future))

    def step(self) -> None:
        """Do one loading step of the first adapter in line, if any. Its future gets the Draft once it is loaded, or the error:
        the RedraftError that was raised, Unavailable for any other."""
        if not self._loading:
            return
        loading = self._loading[0]
        try:
            draft = next(loading.steps)
        except Exception as error:  # noqa: BLE001  (who asked for it is told)
            self._loading.popleft()
            refused = error if isinstance(error, RedraftError) else Unavailable(f"loading the adapter failed: {error}")
            loading.future.set_exception(refused)
            return
        if draft is not None:
            self._loading.popleft()
            loading.future.set_result(draft)

    def give_up(self) -> list[Future[Staged]]:
        """Load nothing more; returns what was promised of it."""
        promised = [loading.future for loading in self._loading]
        self._loading.clear()
        return promised
