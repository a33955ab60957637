"""GET /health/live, /health/ready (or /health) and /metrics: for probes and scrapers."""

from __future__ import annotations

from collections.abc import Callable

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from service.api.schemas import LiveAnswer, ReadyAnswer
from service.core import EngineStatus, Unavailable
from service.metrics import Metrics


def health_routes(engine_status: Callable[[], EngineStatus], metrics: Metrics) -> APIRouter:
    """Routes for probes and scrapers. engine_status: must return at once; may raise Unavailable with the reason."""
    router = APIRouter()

    @router.get("/health/live")
    async def live() -> LiveAnswer:
        """200 while this process responds. Does not ask the engine, so that a probe cannot hang with it."""
        return LiveAnswer()

    @router.get("/health", include_in_schema=False)
    @router.get("/health/ready")
    async def ready() -> ReadyAnswer:
        """200 while the engine serves; 503 with the reason while it loads, drains, hangs, or after it died."""
        status = engine_status()
        if not status.ready:
            raise Unavailable(status.reason)
        return ReadyAnswer(
            rows=status.rows,
            waiting=status.waiting,
            idle_seconds=status.idle_seconds,
            adapter=status.adapter,
            draft_failures=status.draft_failures,
            loaded=status.loaded,
        )

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def scrape(request: Request) -> Response:
        """All metrics, in the Prometheus text format or in OpenMetrics, as the scraper accepts."""
        text, content_type = await to_thread.run_sync(metrics.exposition, request.headers.get("accept"))
        return Response(text, headers={"content-type": content_type})

    return router
