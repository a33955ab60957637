"""POST /generate: text from the target model, as one JSON answer or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from service.api.access import caller_of
from service.api.answers import collect
from service.api.asking import Asked, Chat, Frontend
from service.api.compatible import ignored_by, wrapped
from service.api.errors import describe
from service.api.events import frame
from service.api.exchange import DONE, KEEP_ALIVE, EventStream, Exchange
from service.api.ignored import with_ignored
from service.api.schemas import (
    DEFAULTS,
    CompletionTokensDetails,
    DeltaAnswer,
    GenerateAnswer,
    GenerateRequest,
    Summary,
    TimingsAnswer,
    Usage,
)
from service.api.strict import StrictRoute
from service.core import BadRequest, Delta, Finished, RedraftError, Sampling


def generate_routes(frontend: Frontend) -> APIRouter:
    """POST /generate."""
    router = APIRouter(route_class=StrictRoute)
    model = frontend.models.name

    @router.post(
        "/generate",
        response_model=GenerateAnswer,
        responses={200: {"description": "The answer, or its stream.", "content": {"text/event-stream": {}}}},
    )
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Generate text: one JSON answer, or server-sent events with `stream`."""
        ignored, caller = ignored_by(body, frontend), caller_of(request)
        exchange, answers = await frontend.submit([_asked(body)], caller, live=body.stream, route=request.url.path)
        ignored += exchange.ignored
        if body.stream:
            patience = frontend.limits.keepalive_seconds
            frames = _server_sent(exchange, model, patience, body.return_tokens)
            return with_ignored(EventStream(exchange, frames), ignored)
        if (instead := await collect(exchange, answers, request)) is not None:
            return instead
        finished = answers[0].finished
        assert finished is not None
        whole = GenerateAnswer(text=answers[0].text, **dict(_summary(finished, model, exchange, body.return_tokens)))
        return with_ignored(JSONResponse(whole.model_dump(mode="json", exclude_none=True)), ignored)

    return router


def _asked(body: GenerateRequest) -> Asked:
    """Raises BadRequest for conflicting fields."""
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=wrapped(body.seed),
        stop=tuple(body.stop or ()),
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=body.include_stop_str_in_output,
    )
    return Asked(
        _prompt(body),
        sampling,
        body.max_tokens,
        default_max_tokens=DEFAULTS.max_tokens,
        prompt_field="prompt" if body.messages is None else "messages",
        domain=body.domain,
        client=body.client,
        store=body.store,
        num_draft_tokens=body.num_draft_tokens,
        split=False,
        bad_words=body.bad_words or (),
        prediction=body.prediction or "",
        show_special=not body.skip_special_tokens,
    )


def _prompt(body: GenerateRequest) -> Chat | str:
    if body.prompt is not None and body.messages is not None:
        raise BadRequest("give either prompt or messages, not both", field="messages")
    if body.messages is not None:
        if not body.chat_template:
            raise BadRequest("messages always go through the chat template", field="chat_template")
        return Chat([{"role": message.role, "content": message.content} for message in body.messages])
    if body.prompt is None:
        raise BadRequest("give a prompt or messages", field="prompt")
    return Chat([{"role": "user", "content": body.prompt}]) if body.chat_template else body.prompt


async def _server_sent(exchange: Exchange, model: str, patience: float, with_tokens: bool) -> AsyncIterator[bytes]:
    try:
        async for event in exchange.events(patience):
            match event:
                case None:
                    yield KEEP_ALIVE
                case _, Delta(text, tokens, drafted) if with_tokens:
                    guessed = list(drafted) if exchange.draft_counts else None
                    yield _data(DeltaAnswer(text=text, tokens=list(tokens), drafted=guessed))
                case _, Delta(text) if text:
                    yield _data(DeltaAnswer(text=text))
                case _, Finished() as finished:
                    yield _data(_summary(finished, model, exchange, with_tokens))
                    yield DONE
                case _:
                    pass
    except RedraftError as error:
        yield b"event: error\n" + _data(describe(error), exclude_none=False)
    finally:
        exchange.close()


def _summary(finished: Finished, model: str, exchange: Exchange, with_tokens: bool) -> Summary:
    """How a request ended, as clients see it."""
    spent = finished.timings
    return Summary(
        id=finished.id,
        model=model,
        finish_reason=finished.finish,
        usage=Usage(
            prompt_tokens=spent.prompt_n,
            completion_tokens=spent.predicted_n,
            total_tokens=spent.prompt_n + spent.predicted_n,
            completion_tokens_details=CompletionTokensDetails.of(spent),
        ),
        timings=TimingsAnswer.of(spent, draft_counts=exchange.draft_counts),
        tokens=list(finished.output) if with_tokens else None,
    )


def _data(answer: BaseModel, *, exclude_none: bool = True) -> bytes:
    return frame(answer.model_dump_json(exclude_none=exclude_none))
