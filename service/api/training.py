"""POST /train and GET /train/{id}: start a training run and show its progress. GET /learning: when the next run starts
automatically. GET /gains: the measured gain. GET and PUT /practice: whether practice starts automatically."""

from __future__ import annotations

from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Header, Path, Query, Response

from service.api.schemas import GainsAnswer, LearningAnswer, PracticeAnswer, PracticeRequest, RunAnswer
from service.api.strict import NUMERAL, StrictRoute
from service.core import Operator

RunId = Annotated[int, Path(alias="id", ge=1, lt=2**63), NUMERAL]
Minutes = Annotated[float | None, Query(gt=0, le=1440), NUMERAL]
IdempotencyKey = Annotated[
    str | None, Header(alias="Idempotency-Key", min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
]


def training_routes(operator: Operator, threads: CapacityLimiter) -> APIRouter:
    """Routes that start and show training runs, and turn practice on and off. threads: for blocking calls."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/train", status_code=202)
    async def train(
        response: Response, practice_minutes: Minutes = None, idempotency_key: IdempotencyKey = None
    ) -> RunAnswer:
        """Start a run now; with `practice_minutes`, for that long on text that the target writes. Requests with the
        same Idempotency-Key get the same run."""
        run = await to_thread.run_sync(operator.request_training, idempotency_key, practice_minutes, limiter=threads)
        response.headers["location"] = f"/train/{run.id}"
        return RunAnswer.model_validate(run)

    @router.get("/train/{id}")
    async def show(run_id: RunId) -> RunAnswer:
        """The run's state, progress and outcome."""
        return RunAnswer.model_validate(await to_thread.run_sync(operator.run, run_id, limiter=threads))

    @router.get("/learning")
    async def learning() -> LearningAnswer:
        """Whether a run on logged texts starts automatically or why not, what its gate would require, and the active
        adapter's gain or loss against the base draft. 409 without a draft."""
        return LearningAnswer.model_validate(await to_thread.run_sync(operator.learning, limiter=threads))

    @router.get("/gains")
    async def gains() -> GainsAnswer:
        """The serving adapter's gain over the base draft on answers given since its promotion, with the 90 % interval
        and the engine's realised acceptance length; or why there is none yet."""
        return GainsAnswer.model_validate(await to_thread.run_sync(operator.gains, limiter=threads))

    @router.get("/practice")
    async def practice() -> PracticeAnswer:
        """Whether practice starts automatically, why that cannot be changed, and why none starts now."""
        return PracticeAnswer.model_validate(operator.practice())

    @router.put("/practice")
    async def choose_practice(asked: PracticeRequest) -> PracticeAnswer:
        """Turn automatic practice on or off, also for later starts; off ends an automatic practice run in progress.
        When it is turned on at run time, it uses free memory; a server that starts with it on reserves some. 409 if the
        configuration sets `training.practice`, or if no run can start here."""
        chosen = await to_thread.run_sync(operator.choose_practice, asked.on, limiter=threads)
        return PracticeAnswer.model_validate(chosen)

    return router
