"""Shared parts of the routes in other servers' shapes: what their clients send and how they are answered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from service.api.answers import Answer, collect
from service.api.asking import ForcedCalls, Frontend
from service.api.bodies import ClientModel
from service.api.errors import ToolNotFound
from service.api.exchange import EventStream, Exchange
from service.api.ignored import paths_of, with_ignored
from service.api.printing import printable
from service.api.problems import MAX_PROBLEMS
from service.api.schemas import MAX_TAG_CHARS
from service.api.strict import StrictRoute
from service.core import BadRequest, Grammar, GrammarKind, Sampling

T = TypeVar("T")


class CompatibleRoute(StrictRoute):
    """A StrictRoute that ignores unknown query parameters and names them in a header."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind these checks."""
        handle = super().get_route_handler()

        async def compatible(request: Request) -> Response:
            names = [printable(name) for name in request.query_params]
            if names:
                request = Request({**request.scope, "query_string": b""}, request.receive)
            response = await handle(request)
            return with_ignored(response, names)

        return compatible


def ignored_by(body: ClientModel, frontend: Frontend) -> list[str]:
    """Fields of a body that its answer does not follow, for the header. Raises BadRequest for unknown fields if the
    server is strict."""
    found = paths_of(body)
    unheard = [*found.unknown, *found.absent]
    if frontend.strict and unheard:
        raise BadRequest(
            f"this server is strict and does not know {', '.join(unheard[:MAX_PROBLEMS])}", field=unheard[0]
        )
    return [*found.known, *found.unknown]


def model_of(asked: str | None, frontend: Frontend) -> tuple[str, list[str]]:
    """The name of the answering model, and the field name for the header if another model was requested. Raises
    ModelNotFound if the server is strict."""
    if not asked or asked in frontend.models.all:
        return asked or frontend.models.name, []
    if frontend.strict:
        frontend.models.check(asked)
    return frontend.models.name, ["model"]


def sampling(
    defaults: Sampling,
    *,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Iterable[str] = (),
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    min_tokens: int | None = None,
    ignore_eos: bool | None = None,
    stop_token_ids: Iterable[int] | None = None,
    include_stop: bool | None = None,
) -> Sampling:
    """The sampling options of a request. defaults: for options it does not set."""
    return Sampling(
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        top_k=defaults.top_k if top_k is None else top_k,
        min_p=defaults.min_p if min_p is None else min_p,
        seed=wrapped(seed),
        stop=tuple(stop),
        logit_bias=tuple((logit_bias or {}).items()),
        repetition_penalty=defaults.repetition_penalty if repetition_penalty is None else repetition_penalty,
        presence_penalty=presence_penalty or 0.0,
        frequency_penalty=frequency_penalty or 0.0,
        min_tokens=min_tokens or 0,
        ignore_eos=bool(ignore_eos),
        stop_token_ids=tuple(stop_token_ids or ()),
        include_stop=bool(include_stop),
    )


def json_grammar(schema: Mapping[str, Any], field: str) -> Grammar:
    """The grammar for JSON that matches a schema. field: its name in the request."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), field)


def past_arguments(given: str | dict[str, Any] | None) -> object:
    """The arguments of a past call as templates take them: the JSON object, an empty one where there are none, or the text that
    is no object."""
    if isinstance(given, dict):
        return given
    try:
        value = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def template_options(
    given: Mapping[str, Any] | None, effort: str | None, *, thinks: bool | None = None
) -> dict[str, Any]:
    """Arguments of the chat template: the given ones, completed by the reasoning effort. thinks: whether the model
    should reason first, if the request has a separate field for that."""
    options = dict(given or {})
    if thinks is not None:
        options.setdefault("enable_thinking", thinks)
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
        options.setdefault("enable_thinking", effort != "none")
    return options


def allowed_tools(tools: Sequence[T], names: Mapping[str, T], allowed: Iterable[str]) -> list[T]:
    """The tools that a request allows. names: the tools by name. Raises ToolNotFound for an unknown one."""
    wanted = [names.get(name) for name in allowed]
    if None in wanted:
        raise ToolNotFound("an allowed tool is not among the tools")
    return [tool for tool in tools if tool in wanted]


def forced_calls(name: str | None, *, required: bool, several: bool) -> ForcedCalls | None:
    """The calls that a request forces: of the named tool, or of any tool if some are required."""
    if name is not None:
        return ForcedCalls(name, several=False)
    return ForcedCalls(None, several) if required else None


class Writer(Protocol):
    """Writes the answers to one request in a route's shape."""

    @property
    def exchange(self) -> Exchange:
        """The request, as it waits for the engine."""
        ...

    @property
    def answers(self) -> Sequence[Answer]:
        """Its answers so far."""
        ...

    async def whole(self) -> Mapping[str, Any]:
        """The JSON answer, once all answers are complete."""
        ...

    def frames(self, patience: float, *, one_call: bool) -> AsyncIterator[bytes]:
        """The stream. patience, one_call: see `read_parts`."""
        ...


async def respond(
    writer: Writer,
    request: Request,
    frontend: Frontend,
    *,
    stream: bool,
    one_call: bool = False,
    ignored: Sequence[str],
) -> Response:
    """The streamed answer, or the complete JSON. ignored: names for the header, before those of the exchange."""
    ignored = [*ignored, *writer.exchange.ignored]
    if stream:
        frames = writer.frames(frontend.limits.keepalive_seconds, one_call=one_call)
        return with_ignored(EventStream(writer.exchange, frames), ignored)
    if (instead := await collect(writer.exchange, writer.answers, request, one_call=one_call)) is not None:
        return instead
    return with_ignored(JSONResponse(await writer.whole()), ignored)


def wrapped(seed: int | None) -> int | None:
    """A seed reduced below 2**63 for the engine; JSON integers may have any length."""
    return None if seed is None else seed % 2**63


def client_tag(name: str | None) -> str | None:
    """A client's name as stored: its hash if it is longer than a tag may be."""
    if name is None or len(name) <= MAX_TAG_CHARS:
        return name
    return hashlib.sha256(name.encode()).hexdigest()
