"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

import time

from fastapi import APIRouter

from service.api.asking import ModelNames
from service.api.openai.schemas import ModelAnswer, ModelsAnswer


def model_routes(names: ModelNames, context: int) -> APIRouter:
    """The names by which requests may call the served model. context: tokens of a prompt and its answer, at most."""
    router = APIRouter()
    started = int(time.time())

    def describe(name: str) -> ModelAnswer:
        return ModelAnswer(id=name, object="model", created=started, owned_by="redraft", max_model_len=context)

    @router.get("/v1/models")
    async def models() -> ModelsAnswer:
        """Every name, the model's own first."""
        return ModelsAnswer(object="list", data=[describe(name) for name in names.all])

    @router.get("/v1/models/{id:path}")
    async def model(id: str) -> ModelAnswer:
        """One of them; 404 for another name."""
        names.check(id)
        return describe(id)

    return router
