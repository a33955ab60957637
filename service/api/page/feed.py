"""Snapshots of the server, once a second, for every open page."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from anyio import to_thread
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from service.api.exchange import KEEP_ALIVE
from service.api.page.files import SECURITY
from service.api.schemas import RunAnswer
from service.core import EngineStatus, Overloaded, PracticeState, StoreError, TrainingRun
from service.metrics import Metrics

log = logging.getLogger(__name__)

SECONDS = 1.0
"""Interval between snapshots."""
SILENCE = 15.0
"""Maximum time without a byte, so that proxies do not close the connection."""
LISTENERS = 32
"""Maximum number of simultaneous listeners."""
RETRY_SECONDS = 5


class Feed:
    """The stream of GET /events. One snapshot is made for all listeners, and only while there are any. Each listener
    gets the newest one when it is ready: a slow reader misses snapshots, and nothing waits or accumulates for it.

    status, practice: states of engine and practice; must return at once. newest_run: the newest training run; may block.
    """

    def __init__(
        self,
        model: str,
        status: Callable[[], EngineStatus],
        metrics: Metrics,
        newest_run: Callable[[], TrainingRun | None],
        practice: Callable[[], PracticeState],
    ) -> None:
        self._model = model
        self._status = status
        self._metrics = metrics
        self._newest_run = newest_run
        self._practice = practice
        self._run: TrainingRun | None = None
        self._snapshot = b""
        self._made_at = -SECONDS
        self._lock = asyncio.Lock()
        self._listeners = 0
        self._ended = False

    @property
    def listeners(self) -> int:
        """Number of listeners."""
        return self._listeners

    def end(self) -> None:
        """Ends every stream within SECONDS and starts no new one. From any thread."""
        self._ended = True

    def listen(self, allowed: Callable[[], bool]) -> EventFeed:
        """The response to one more listener. It ends when the listener is no longer `allowed`. Raises Overloaded with
        LISTENERS listeners."""
        if self._ended or self._listeners >= LISTENERS:
            raise Overloaded(f"{LISTENERS} pages are listening already", retry_after=RETRY_SECONDS)
        self._listeners += 1
        return EventFeed(self._frames(allowed), self._left)

    def _left(self) -> None:
        self._listeners -= 1

    async def _frames(self, allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        sent, sent_at = b"", 0.0
        loop = asyncio.get_running_loop()
        while not self._ended and allowed():
            newest = await self._newest()
            if newest != sent:
                sent, sent_at = newest, loop.time()
                yield b"event: snapshot\ndata: " + newest + b"\n\n"
            elif loop.time() - sent_at >= SILENCE:
                sent_at = loop.time()
                yield KEEP_ALIVE
            await asyncio.sleep(SECONDS)

    async def _newest(self) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() - self._made_at >= SECONDS / 2:
                self._snapshot = await to_thread.run_sync(self._make)
                self._made_at = loop.time()
            return self._snapshot

    def _make(self) -> bytes:
        # The engine's state is shown even while the database is unavailable.
        with suppress(StoreError):
            self._run = self._newest_run()
        status, run = self._status(), self._run
        shown: dict[str, Any] = {
            "model": self._model,
            **asdict(status),
            "totals": self._metrics.totals(),
            "run": None if run is None else RunAnswer.model_validate(run).model_dump(mode="json"),
            "practice": asdict(self._practice()),
        }
        return json.dumps(shown, separators=(",", ":")).encode()


class EventFeed(StreamingResponse):
    """One listener's stream. left: called when it ends for any reason."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        headers = {**SECURITY, "cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(frames, headers=headers)
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()
