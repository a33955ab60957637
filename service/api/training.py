"""POST /train and GET /train/{id}: start a training run, and show its progress. GET /learning: when the next one starts by
itself. GET /gains: what was gained. GET and PUT /practice: whether practice starts by itself."""

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
    """The routes that start and show training runs, and turn practice on and off. threads: for calls that block."""
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

    @router.get("/learning")
    async def learning() -> LearningAnswer:
        """Whether a run on logged texts starts by itself or why not, what its gate would ask of it, and what the active adapter
        was found to gain or lose against the base draft. 409 without a draft."""
        return LearningAnswer.model_validate(await to_thread.run_sync(operator.learning, limiter=threads))

    @router.get("/gains")
    async def gains() -> GainsAnswer:
        """What the adapter that serves gains against the base draft on answers given since its promotion, with the 90 %
        interval and what the engine realised; or why nothing has been gained yet."""
        return GainsAnswer.model_validate(await to_thread.run_sync(operator.gains, limiter=threads))

    @router.get("/practice")
    async def practice() -> PracticeAnswer:
        """Whether practice starts by itself, why that cannot be changed, and why none starts now."""
        return PracticeAnswer.model_validate(operator.practice())

    @router.put("/practice")
    async def choose_practice(asked: PracticeRequest) -> PracticeAnswer:
        """Let practice start by itself, after a restart too, or not; off ends a run of it that started by itself. Turned on it
        makes do with the memory that is free: a server that starts with it on sets some aside. 409 where the configuration sets
        `training.practice`, or no run can start here."""
        chosen = await to_thread.run_sync(operator.choose_practice, asked.on, limiter=threads)
        return PracticeAnswer.model_validate(chosen)

    return router
