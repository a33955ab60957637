"""A process that trains for the servers of its pair, on a machine of its own: it shares their database and adapter folders."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager

from service.app import PRACTICE, TARGETS, resolve_models
from service.core import BARE_DRAFT, AdapterRef, AdapterRefused, BadRequest, Forget, Staged, Unavailable, ending_signals
from service.learning import practice_text
from service.learning.targets import remove_files
from service.learning_loop import LearningLoop, Place
from service.metrics import Metrics
from service.models.fingerprint import is_unaltered
from service.models.machine import machine_kind
from service.models.pair import provenance_of
from service.settings import Settings
from service.store.permissions import private_folder
from service.store.processes.members import Role

log = logging.getLogger(__name__)


class _Checked:
    """Staged, without weights."""

    def __init__(self, adapter: int) -> None:
        self.adapter = adapter


class Unserved:
    """core.DraftSwitch where nothing is served: adapters' files are checked, nothing is loaded or timed."""

    def __init__(self) -> None:
        self.active = BARE_DRAFT

    def stage(self, ref: AdapterRef | None) -> Future[Staged]:
        """See core.DraftSwitch."""
        future: Future[Staged] = Future()
        try:
            if ref is not None and not is_unaltered(ref.folder, ref.sha256):
                raise AdapterRefused(f"adapter {ref.id}: its files are not the ones that were registered")
            future.set_result(_Checked(ref.id if ref is not None else BARE_DRAFT))
        except AdapterRefused as error:
            future.set_exception(error)
        except OSError as error:
            future.set_exception(Unavailable(f"its files cannot be read now: {error}"))
        return future

    def switch(self, staged: Staged) -> Future[None]:
        """See core.DraftSwitch."""
        self.active = staged.adapter
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...] | None:
        """See core.DraftSwitch."""
        return None


def run_trainer(settings: Settings, on_ready: Callable[[], None]) -> int:
    """Train for the servers of this pair until a signal comes. Returns the exit status. Raises what made it impossible."""
    os.umask(0o077)
    ended = threading.Event()
    fatal: list[str] = []

    def failed(reason: str) -> None:
        fatal.append(reason)
        log.critical("%s: ending", reason)
        ended.set()

    private_folder(settings.home)
    with _signals(ended):
        loop = LearningLoop(settings, Role.TRAINER, failed)
        try:
            folders = resolve_models(settings)
            if folders.draft is None:
                raise BadRequest("there is no draft to train: these settings name a target alone", field="models.draft")
            place = Place(folders, provenance_of(folders.target, folders.draft), machine_kind())
            events = Metrics(max(settings.engine.num_draft_tokens, settings.engine.num_lookup_tokens))
            forget: dict[str, Forget] = {
                "targets": lambda selection: remove_files(settings.home / TARGETS),
                "practice": lambda selection: practice_text.remove(settings.home / PRACTICE),
            }
            try:
                loop.start(place, Unserved(), events, forget=forget)
                on_ready()
                ended.wait()
            finally:
                loop.stop()
        finally:
            loop.close()
    return 1 if fatal else 0


@contextmanager
def _signals(ended: threading.Event) -> Generator[None]:
    """The ending signals (see ending_signals) set `ended`."""
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
