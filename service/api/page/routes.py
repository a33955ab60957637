"""GET /events, /history and /cases: data for the page. /cases contains clients' text."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query, Request, Response

from service.api.access import still_allowed
from service.api.page.feed import Feed
from service.api.page.files import SECURITY
from service.api.page.schemas import CaseAnswer, CasesAnswer, HistoryAnswer
from service.api.strict import NUMERAL, StrictRoute
from service.core import Disagreement, Encoder, Overview

THREADS = 2
"""Concurrent database reads: many open pages must not slow down requests."""
FRESH_SECONDS = 2.0
"""Maximum age of a history: it is read once in that time, however many pages are open."""
Hours = Annotated[int, Query(ge=1, le=24 * 366), NUMERAL]
MAX_CASES = 100
Limit = Annotated[int, Query(ge=1, le=MAX_CASES), NUMERAL]
Before = Annotated[int | None, Query(ge=1, lt=2**63), NUMERAL]


def page_routes(overview: Overview, encoder: Encoder, feed: Feed) -> APIRouter:
    """The routes that the page reads. encoder: decodes tokens."""
    router = APIRouter(route_class=StrictRoute)
    threads = CapacityLimiter(THREADS)
    recent = _RecentHistory(overview, threads)

    @router.get(
        "/events",
        response_class=Response,
        responses={
            200: {
                "description": "Snapshots, until the server ends or the caller's key is revoked.",
                "content": {"text/event-stream": {}},
            }
        },
    )
    async def events(request: Request) -> Response:
        """Server-sent events: a snapshot after a change, at most once a second."""
        return feed.listen(still_allowed(request))

    @router.get("/history")
    async def history(response: Response, hours: Hours = 24) -> HistoryAnswer:
        """Acceptance over the last hours, by adapter and by position, and the adapters with their verdicts."""
        response.headers.update(SECURITY)
        return await recent.of(hours)

    @router.get("/cases")
    async def cases(
        response: Response, limit: Limit = 20, order: Literal["worst", "newest"] = "worst", before: Before = None
    ) -> CasesAnswer:
        """Among the newest failure cases, those in which the draft was most and the target least confident, with the
        text before them; or, with `order=newest`, the newest, including near-ties. For the next page, pass the last
        `case` of this one as `before`."""
        response.headers.update({**SECURITY, "cache-control": "no-store"})

        def read() -> list[CaseAnswer]:
            newest = order == "newest"
            found = overview.newest_cases(limit, before) if newest else overview.disagreements(limit)
            return [_case(each, encoder) for each in found]

        return CasesAnswer(cases=await to_thread.run_sync(read, limiter=threads))

    return router


class _RecentHistory:
    """The last history that was read."""

    def __init__(self, overview: Overview, threads: CapacityLimiter) -> None:
        self._overview = overview
        self._threads = threads
        self._lock = asyncio.Lock()
        self._read: tuple[int, float, HistoryAnswer] | None = None

    async def of(self, hours: int) -> HistoryAnswer:
        """The history of the last `hours`. Only one is read at a time."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._read is None or self._read[0] != hours or loop.time() - self._read[1] > FRESH_SECONDS:
                found = await to_thread.run_sync(self._overview.history, hours, limiter=self._threads)
                self._read = hours, loop.time(), HistoryAnswer.model_validate(found)
            return self._read[2]


def _case(found: Disagreement, encoder: Encoder) -> CaseAnswer:
    def text(*tokens: int) -> str:
        return b"".join(map(encoder.token_bytes, tokens)).decode("utf-8", "replace")

    return CaseAnswer(
        id=found.generation,
        position=found.position,
        domain=found.domain,
        client=found.client,
        adapter=found.adapter,
        # The context may start inside a character.
        context=text(*found.context).lstrip("\ufffd"),
        drafted=text(found.drafted),
        target=text(found.target),
        p=found.p,
        q=found.q,
        created_at=found.created_at,
        tie=found.tie,
        case=found.case,
    )
