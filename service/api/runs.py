"""GET /runs, GET /runs/{id} and DELETE /runs/{id}: shows training runs and ends one."""

from __future__ import annotations

from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Query

from service.api.schemas import RunAnswer, RunsAnswer
from service.api.strict import NUMERAL, StrictRoute
from service.api.training import RunId
from service.core import Operator

MAX_RUNS = 100

Limit = Annotated[int, Query(ge=1, le=MAX_RUNS), NUMERAL]
Before = Annotated[int | None, Query(ge=1, lt=2**63), NUMERAL]


def run_routes(operator: Operator, threads: CapacityLimiter) -> APIRouter:
    """Routes that show and end training runs. threads: for blocking calls."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/runs")
    async def runs(limit: Limit = 20, before: Before = None) -> RunsAnswer:
        """The newest runs, newest first. For the next page, pass the last id of this one as `before`."""
        found = await to_thread.run_sync(operator.runs, limit, before, limiter=threads)
        return RunsAnswer(runs=[RunAnswer.model_validate(run) for run in found])

    @router.get("/runs/{id}")
    async def show(run_id: RunId) -> RunAnswer:
        """The run's state, progress and outcome: the same as GET /train/{id}."""
        return RunAnswer.model_validate(await to_thread.run_sync(operator.run, run_id, limiter=threads))

    @router.delete("/runs/{id}")
    async def end(run_id: RunId) -> RunAnswer:
        """End a run in progress: its child is stopped, its state becomes `ended`, and its texts are free for the next run."""
        return RunAnswer.model_validate(await to_thread.run_sync(operator.end_run, run_id, limiter=threads))

    return router
