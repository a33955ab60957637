"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter

from service.api.asking import ModelNames
from service.api.schemas import ResponseModel


class ModelAnswer(ResponseModel):
    """A name that requests may use. max_model_len: maximum tokens of prompt and answer (vLLM's name)."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["redraft"] = "redraft"
    max_model_len: int


class ModelsAnswer(ResponseModel):
    """Every name that requests may use."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]


def model_routes(names: ModelNames, context: int) -> APIRouter:
    """The names under which requests may call the served model. context: maximum tokens of prompt and answer."""
    router = APIRouter()
    started = int(time.time())

    def describe(name: str) -> ModelAnswer:
        return ModelAnswer(id=name, object="model", created=started, owned_by="redraft", max_model_len=context)

    @router.get("/v1/models")
    async def models() -> ModelsAnswer:
        """Every name, the model's main name first."""
        return ModelsAnswer(object="list", data=[describe(name) for name in names.all])

    @router.get("/v1/models/{id:path}")
    async def model(id: str) -> ModelAnswer:
        """One of them; 404 for another name."""
        names.check(id)
        return describe(id)

    return router
