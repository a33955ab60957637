"""GET /requests and DELETE /requests/{id}: the requests that wait and run now, and ending one."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from service.api.schemas import MAX_TAG_CHARS, RequestAnswer, RequestsAnswer
from service.api.strict import StrictRoute
from service.core import GenerationService, request_id

Id = Annotated[str, Path(alias="id", max_length=MAX_TAG_CHARS)]


def requests_routes(service: GenerationService) -> APIRouter:
    """The routes that show requests under way and end them."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/requests")
    async def show() -> RequestsAnswer:
        """Every request that waits or runs, in the order of arrival; never a text."""
        return RequestsAnswer(requests=[RequestAnswer.model_validate(status) for status in service.requests()])

    @router.delete("/requests/{id}", status_code=202)
    async def cancel(id: Id) -> RequestAnswer:
        """End a request before the engine's next round, by its id or that of its answer. Its client gets what there is."""
        return RequestAnswer.model_validate(service.cancel(request_id(id)))

    return router
