"""POST /train and GET /train/{id}: start a training run, and show its progress."""

from __future__ import annotations

from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Path, Query, Response

from service.api.schemas import RunAnswer
from service.api.strict import StrictRoute
from service.core import Operator

RunId = Annotated[int, Path(alias="id", ge=1, lt=2**63)]
Minutes = Annotated[float | None, Query(gt=0, le=1440)]
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
]


def training_routes(operator: Operator, threads: CapacityLimiter) -> APIRouter:
    """The routes that start and show training runs. threads: for calls that block."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/train", status_code=202)
    async def train(
        response: Response, practice_minutes: Minutes = None, idempotency_key: IdempotencyKey = None
    ) -> RunAnswer:
        """Start one run now; with `practice_minutes` on text that the target writes, for so long. The same Idempotency-Key gets
        the same run, however often it is sent."""
        run = await to_thread.run_sync(operator.request_training, idempotency_key, practice_minutes, limiter=threads)
        response.headers["location"] = f"/train/{run.id}"
        return RunAnswer.model_validate(run)

    @router.get("/train/{id}")
    async def show(run_id: RunId) -> RunAnswer:
        """The run's state, progress and outcome."""
        return RunAnswer.model_validate(await to_thread.run_sync(operator.run, run_id, limiter=threads))

    return router
