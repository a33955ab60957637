"""GET /requests and DELETE /requests/{id}: shows waiting and running requests, and ends one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from service.api.schemas import MAX_TAG_CHARS, RequestAnswer, RequestsAnswer
from service.api.strict import StrictRoute
from service.core import GenerationService, request_id

Id = Annotated[str, Path(alias="id", max_length=MAX_TAG_CHARS)]


def requests_routes(service: GenerationService) -> APIRouter:
    """Routes that show and end current requests."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/requests")
    async def show() -> RequestsAnswer:
        """Every waiting or running request in order of arrival, without text."""
        return RequestsAnswer(requests=[RequestAnswer.model_validate(status) for status in service.requests()])

    @router.delete("/requests/{id}", status_code=202)
    async def cancel(id: Id) -> RequestAnswer:
        """End a request before the engine's next round, by its id or that of its answer. Its client receives the answer
        so far."""
        return RequestAnswer.model_validate(service.cancel(request_id(id)))

    return router
