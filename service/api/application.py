"""The HTTP application, put together from its parts."""

from __future__ import annotations

from typing import Any

from anyio import CapacityLimiter
from fastapi import FastAPI

from service.api.adapters import adapter_routes
from service.api.errors import ErrorAnswer, ErrorBoundary, install
from service.api.generate import generate_routes
from service.api.health import health_routes
from service.api.limits import BodyLimit, Limits
from service.api.training import training_routes
from service.core import Encoder, GenerationService, Operator
from service.metrics import Metrics

OPERATOR_THREADS = 4
"""Calls to the operator block while a draft loads: threads of their own keep them from taking up those that encode."""

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def build_api(
    *,
    service: GenerationService,
    encoder: Encoder,
    operator: Operator,
    metrics: Metrics,
    limits: Limits,
    model: str,
) -> FastAPI:
    """The ASGI application. It starts and stops nothing: that is its builder's business.

    model: the name that answers carry.
    """
    # No documentation pages: they would load scripts from elsewhere. The schema itself is at /openapi.json.
    app = FastAPI(title="Redraft", docs_url=None, redoc_url=None, redirect_slashes=False)
    threads = CapacityLimiter(OPERATOR_THREADS)
    for router in (
        generate_routes(service, encoder, metrics, limits, model),
        training_routes(operator, threads),
        adapter_routes(service, operator, threads),
        health_routes(service, metrics),
    ):
        app.include_router(router, responses=ERRORS)
    install(app, metrics)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(ErrorBoundary, metrics=metrics)
    return app
