"""The two HTTP applications: one that serves, and one that answers while the models load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from service.api.access import Guard, Policy, check_routes
from service.api.adapters import adapter_routes
from service.api.anthropic.messages import messages_routes
from service.api.asking import Frontend, ModelNames
from service.api.error_shapes import AnthropicErrorAnswer, ErrorAnswer
from service.api.errors import ErrorBoundary, install
from service.api.generate import generate_routes
from service.api.generations import generations_routes
from service.api.health import health_routes
from service.api.hosts import OWN_SCHEME, Hosts
from service.api.ignored import IGNORED
from service.api.limits import BodyLimit, Limits, QueueLimit
from service.api.mailbox import Mailbox
from service.api.openai.chat import chat_routes
from service.api.openai.completions import completion_routes
from service.api.openai.models import model_routes
from service.api.openai.responses import responses_routes
from service.api.page import Feed, page_files, page_routes
from service.api.rates import RateLimit
from service.api.replies import Replies
from service.api.request_id import RequestId
from service.api.request_log import RequestLog
from service.api.requests import requests_routes
from service.api.runs import run_routes
from service.api.session import session_routes
from service.api.training import training_routes
from service.core import (
    Access,
    Caller,
    Doorkeeper,
    Encoder,
    EngineStatus,
    GenerationService,
    Operator,
    Overview,
    Sampling,
    Unavailable,
)
from service.metrics import Metrics

OPERATOR_THREADS = 4
"""Operator calls block while a draft loads: separate threads keep them from occupying those for tokenising."""
START_RETRY_SECONDS = 5

Documented = dict[int | str, dict[str, Any]]
ERRORS: Documented = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
ANTHROPIC_ERRORS: Documented = {"4XX": {"model": AnthropicErrorAnswer}, "5XX": {"model": AnthropicErrorAnswer}}


@dataclass(frozen=True, slots=True)
class Doors:
    """Access rules. allowed_hosts: names and addresses of this server, without ports. cors_origins: origins of other
    pages that may call it. rate_limit: see RateLimit; None: no limit. share_across_keys: requests with different keys
    may share cached prefixes and prompt lookup. draft_counts: clients see how many tokens were drafted and accepted,
    even with several keys."""

    keeper: Doorkeeper
    allowed_hosts: Collection[str]
    cors_origins: Sequence[str] = ()
    rate_limit: str | None = None
    share_across_keys: bool = False
    draft_counts: bool = False

    def shows_draft_counts(self, caller: Caller) -> bool:
        """Whether a caller's answers contain the numbers of drafted and accepted tokens. With several keys these reveal
        something about other callers' texts, which the draft has learnt from; then they are only for operators."""
        return self.draft_counts or caller.access >= Access.LOCAL or not self.keeper.several

    def install(self, app: FastAPI, metrics: Metrics) -> None:
        """Adds the middleware in front of an application's routes."""
        hosts = Hosts(self.allowed_hosts, self.cors_origins)
        app.add_middleware(Guard, doorkeeper=self.keeper, hosts=hosts, metrics=metrics)
        app.add_middleware(ErrorBoundary, metrics=metrics)
        app.add_middleware(RequestLog)
        app.add_middleware(RequestId)
        app.add_middleware(
            CrossOrigin,
            allow_origins=self.cors_origins,
            allow_origin_regex=OWN_SCHEME,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", IGNORED],
        )


class CrossOrigin(CORSMiddleware):
    """Allows browsers to call from pages of these origins. Requests from other origins pass on to the guard, which
    refuses them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        app = super().__call__ if origin is None or self.is_allowed_origin(origin) else self.app
        await app(scope, receive, send)


def build_api(
    *,
    service: GenerationService,
    encoder: Encoder,
    operator: Operator,
    metrics: Metrics,
    limits: Limits,
    models: ModelNames,
    doors: Doors,
    overview: Overview,
    feed: Feed,
    defaults: Sampling | None = None,
    strict: bool = False,
    replies: Replies | None = None,
) -> FastAPI:
    """The ASGI application. Starting and stopping its parts is left to the caller.

    overview, feed: data of the page. defaults: sampling for OpenAI and Anthropic requests that leave it open; None:
    greedy. strict: see Frontend. replies: replies that later requests may refer to; None: none are kept.
    """
    # No documentation pages, which would load external scripts. The schema itself is at /openapi.json.
    app = FastAPI(title="Redraft", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.max_context = limits.max_context
    threads = CapacityLimiter(OPERATOR_THREADS)
    mailbox = Mailbox()
    service.on_delivered(mailbox.flush)
    frontend = Frontend(
        service,
        encoder,
        metrics,
        limits,
        models,
        defaults or Sampling(),
        mailbox,
        share=doors.share_across_keys,
        shows_draft_counts=doors.shows_draft_counts,
        strict=strict,
        replies=replies or Replies(0),
    )
    routers = [
        generate_routes(frontend),
        chat_routes(frontend),
        completion_routes(frontend),
        responses_routes(frontend),
        model_routes(models, limits.max_context),
        training_routes(operator, threads),
        run_routes(operator, threads),
        requests_routes(service),
        adapter_routes(service, operator, threads),
        generations_routes(operator, threads),
        session_routes(doors.keeper, threads),
        health_routes(service.status, metrics),
        page_files(),
        page_routes(overview, encoder, feed),
    ]
    for router, errors in [*((router, ERRORS) for router in routers), (messages_routes(frontend), ANTHROPIC_ERRORS)]:
        check_routes(router)
        app.include_router(router, responses=errors)
    install(app, metrics, Policy().methods)
    app.add_middleware(BodyLimit, limits=limits)
    app.add_middleware(QueueLimit, service=service, metrics=metrics)
    if doors.rate_limit is not None:
        app.add_middleware(RateLimit, rate=doors.rate_limit, metrics=metrics)
    doors.install(app, metrics)
    return app


def build_startup_api(*, stage: Callable[[], str], metrics: Metrics, doors: Doors) -> FastAPI:
    """The ASGI application while the models load: alive, not ready, the page, and 503 with Retry-After on every other route.

    stage: the current stage of start-up in a word; the message of every 503 ends with it.
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
    doors.install(app, metrics)
    return app
