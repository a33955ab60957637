"""DELETE /generations: erases recorded text wherever it is stored."""

from __future__ import annotations

from functools import partial

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter

from service.api.compatible import client_tag
from service.api.schemas import ErasedAnswer, EraseRequest
from service.api.strict import StrictRoute
from service.core import Operator, Selection


def generations_routes(operator: Operator, threads: CapacityLimiter) -> APIRouter:
    """The route that erases. threads: for blocking calls."""
    router = APIRouter(route_class=StrictRoute)

    @router.delete("/generations")
    async def erase(asked: EraseRequest) -> ErasedAnswer:
        """Erase the generations that match all given criteria, or everything."""
        selection = Selection(
            ids=None if asked.ids is None else frozenset(asked.ids),
            api_key=asked.api_key,
            client=client_tag(asked.client),
            domain=asked.domain,
            before=asked.before,
            everything=asked.everything,
        )
        call = partial(operator.erase, selection, retire_adapters=asked.retire_adapters)
        return ErasedAnswer.model_validate(await to_thread.run_sync(call, limiter=threads))

    return router
