"""The versions of the draft's adapter: lists them, switches between them, and deletes their files."""

from __future__ import annotations

from typing import Annotated

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Path, Query

from service.api.schemas import AdapterAnswer, AdaptersAnswer, SwitchAnswer
from service.api.strict import NUMERAL, StrictRoute
from service.core import BARE_DRAFT, AdapterRef, GenerationService, Operator

AdapterId = Annotated[int, Path(alias="id", ge=0, lt=2**63), NUMERAL]

Expected = Annotated[int | None, Query(ge=0, lt=2**63), NUMERAL]


def adapter_routes(service: GenerationService, operator: Operator, threads: CapacityLimiter) -> APIRouter:
    """Routes that show and delete adapter versions and change the active one. threads: for blocking calls."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/adapters")
    async def adapters() -> AdaptersAnswer:
        """Every adapter version, newest first, and which one is active."""
        known = await to_thread.run_sync(operator.adapters, limiter=threads)
        return AdaptersAnswer(
            active=service.status().adapter, adapters=[AdapterAnswer.model_validate(ref) for ref in known]
        )

    @router.post("/adapters/{id}/activate")
    async def activate(adapter_id: AdapterId) -> SwitchAnswer:
        """Make this version the active one from the next round on; 0 is the base draft."""
        return _switched(await to_thread.run_sync(operator.activate, adapter_id, limiter=threads))

    @router.delete("/adapters/{id}/files")
    async def remove(adapter_id: AdapterId) -> AdapterAnswer:
        """Delete the files of a version that is not serving; 409 for the active one."""
        return AdapterAnswer.model_validate(
            await to_thread.run_sync(operator.remove_adapter, adapter_id, limiter=threads)
        )

    @router.post("/adapters/rollback")
    async def rollback(expected: Expected = None) -> SwitchAnswer:
        """Roll back to the version that the active one was trained on; 409 if another version than `expected` is serving."""
        return _switched(await to_thread.run_sync(operator.rollback, expected, limiter=threads))

    return router


def _switched(ref: AdapterRef | None) -> SwitchAnswer:
    return SwitchAnswer(
        active=ref.id if ref else BARE_DRAFT, adapter=AdapterAnswer.model_validate(ref) if ref else None
    )
