"""The HTTP applications, put together from their parts: one that serves, and one that answers while the models load."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from service.api.adapters import adapter_routes
from service.api.anthropic.messages import messages_routes
from service.api.asking import Frontend, ModelNames
from service.api.errors import ErrorAnswer, ErrorBoundary, install
from service.api.generate import generate_routes
from service.api.generations import generations_routes
from service.api.health import health_routes
from service.api.hosts import HostGuard
from service.api.limits import BodyLimit, Limits, QueueLimit
from service.api.mailbox import Mailbox
from service.api.openai.chat import chat_routes
from service.api.openai.completions import completion_routes
from service.api.openai.models import model_routes
from service.api.openai.responses import responses_routes
from service.api.page import Feed, page_files, page_routes
from service.api.request_id import RequestId
from service.api.training import training_routes
from service.core import Encoder, EngineStatus, GenerationService, Operator, Overview, Sampling, Unavailable
from service.metrics import Metrics

OPERATOR_THREADS = 4
"""Calls to the operator block while a draft loads: threads of their own keep them from taking up those that tokenise."""
START_RETRY_SECONDS = 5

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def build_api(
    *,
    service: GenerationService,
    encoder: Encoder,
    operator: Operator,
    metrics: Metrics,
    limits: Limits,
    models: ModelNames,
    allowed_hosts: Collection[str],
    overview: Overview,
    feed: Feed,
    defaults: Sampling | None = None,
) -> FastAPI:
    """The ASGI application. It starts and stops nothing: that is its builder's business.

    allowed_hosts: names and addresses by which clients may call this server, without ports. overview, feed: what the page
    shows. defaults: sampling where a request to an OpenAI or Anthropic route says nothing; None: greedy.
    """
    # No documentation pages: they would load scripts from elsewhere. The schema itself is at /openapi.json.
    app = FastAPI(title="Redraft", docs_url=None, redoc_url=None, redirect_slashes=False)
    threads = CapacityLimiter(OPERATOR_THREADS)
    mailbox = Mailbox()
    service.on_delivered(mailbox.flush)
    frontend = Frontend(service, encoder, metrics, limits, models, defaults or Sampling(), mailbox)
    for router in (
        generate_routes(frontend),
        chat_routes(frontend),
        completion_routes(frontend),
        responses_routes(frontend),
        messages_routes(frontend),
        model_routes(models, limits.max_context),
        training_routes(operator, threads),
        adapter_routes(service, operator, threads),
        generations_routes(operator, threads),
        health_routes(service.status, metrics),
        page_files(),
        page_routes(overview, encoder, feed),
    ):
        app.include_router(router, responses=ERRORS)
    install(app, metrics)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(QueueLimit, service=service, metrics=metrics)
    app.add_middleware(HostGuard, allowed_hosts=allowed_hosts, metrics=metrics)
    app.add_middleware(ErrorBoundary, metrics=metrics)
    app.add_middleware(RequestId)
    return app


def build_startup_api(*, stage: Callable[[], str], metrics: Metrics, allowed_hosts: Collection[str]) -> FastAPI:
    """The ASGI application while the models load: alive, not ready, the page, and 503 with Retry-After on every other route.

    stage: what start-up is doing now, in a word; the message of every 503 ends with it.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False)

    def starting() -> EngineStatus:
        raise Unavailable(f"the server is starting: {stage()}", retry_after=START_RETRY_SECONDS)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        starting()

    app.include_router(health_routes(starting, metrics))
    app.include_router(page_files())
    app.router.default = refuse
    install(app, metrics)
    app.add_middleware(HostGuard, allowed_hosts=allowed_hosts, metrics=metrics)
    app.add_middleware(ErrorBoundary, metrics=metrics)
    app.add_middleware(RequestId)
    return app
