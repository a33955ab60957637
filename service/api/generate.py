"""POST /generate: text from the target model, as one JSON answer or as a stream."""

from __future__ import annotations

import asyncio
import math

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from service.api.errors import answer
from service.api.limits import Limits
from service.api.mailbox import Mailbox
from service.api.schemas import DEFAULTS, GenerateAnswer, GenerateRequest
from service.api.streaming import EventStream, Exchange, summary
from service.api.strict import StrictRoute
from service.core import BadRequest, Delta, Encoder, Finished, GenerationService, Prompt, RedraftError, Sampling
from service.metrics import Metrics

CLIENT_GONE = 499
"""nginx's status for a client that disconnected, which no client sees."""


def generate_routes(
    service: GenerationService, encoder: Encoder, metrics: Metrics, limits: Limits, model: str
) -> APIRouter:
    """POST /generate. A prompt that cannot fit by its bytes, or for which the queue has no place, is not tokenised."""
    router = APIRouter(route_class=StrictRoute)
    mailbox = Mailbox()
    service.on_delivered(mailbox.flush)

    @router.post(
        "/generate",
        response_model=GenerateAnswer,
        responses={200: {"description": "The answer, or its stream.", "content": {"text/event-stream": {}}}},
    )
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Generate text: one JSON answer, or server-sent events with `stream`."""
        check_size(body, limits)
        exchange = Exchange(metrics, mailbox, limits.request_timeout, stream=body.stream)
        with service.reserve() as place:
            prompt = await to_thread.run_sync(to_prompt, body, encoder, limits)
            exchange.submit(service, prompt, place)
        if body.stream:
            return EventStream(exchange, model, limits.keepalive_seconds, body.return_tokens)
        try:
            ended = await _unless_gone(exchange, request)
        except RedraftError as error:
            return answer(error)
        finally:
            exchange.close()
        if ended is None:
            return Response(status_code=CLIENT_GONE)
        text, finished = ended
        whole = GenerateAnswer(text=text, **dict(summary(finished, model, body.return_tokens)))
        return JSONResponse(whole.model_dump(mode="json", exclude_none=True))

    return router


def check_size(body: GenerateRequest, limits: Limits) -> None:
    """Raises BadRequest for a prompt that cannot fit by its bytes, which costs nothing to count."""
    if limits.max_prompt_bytes is None:
        return
    # Chat templates may trim messages, and drop system messages or earlier answers, so neither is counted.
    turns = [turn.content for turn in body.messages or () if turn.role == "user"]
    size = sum(len(text.strip().encode()) for text in (body.prompt or "", *turns))
    if size > limits.max_prompt_bytes:
        field = "prompt" if body.messages is None else "messages"
        raise BadRequest(
            f"{field} is too long: {size} bytes cannot fit in a context of {limits.max_context} tokens", field=field
        )


def to_prompt(body: GenerateRequest, encoder: Encoder, limits: Limits) -> Prompt:
    """The request as the engine takes it, tokenised. Raises BadRequest naming the field that cannot be served."""
    if body.max_tokens is not None and body.max_tokens > limits.max_tokens:
        raise BadRequest(f"max_tokens is {limits.max_tokens} at most", field="max_tokens")
    field = "prompt" if body.messages is None else "messages"
    tokens, first_user = _encode(body, encoder)
    left = limits.max_context - len(tokens)
    if left < 1:
        reason = f"{len(tokens)} tokens leave no room in a context of {limits.max_context}"
        raise BadRequest(f"{field} is too long: {reason}", field=field)
    if body.max_tokens is not None and body.max_tokens > left:
        reason = f"{len(tokens)} prompt tokens leave room for {left} in a context of {limits.max_context}"
        raise BadRequest(f"max_tokens is too large: {reason}", field="max_tokens")
    sampling = Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        max_tokens=body.max_tokens or min(DEFAULTS.max_tokens, limits.max_tokens, left),
        stop=tuple(body.stop or ()),
    )
    return Prompt(tokens, sampling, body.domain, body.client, body.store, first_user)


def _encode(body: GenerateRequest, encoder: Encoder) -> tuple[tuple[int, ...], str]:
    if body.prompt is not None and body.messages is not None:
        raise BadRequest("give either prompt or messages, not both", field="messages")
    if body.messages is not None:
        if not body.chat_template:
            raise BadRequest("messages always go through the chat template", field="chat_template")
        turns = [{"role": message.role, "content": message.content} for message in body.messages]
        first_user = next((turn["content"] for turn in turns if turn["role"] == "user"), "")
        return encoder.encode_chat(turns), first_user
    if body.prompt is None:
        raise BadRequest("give a prompt or messages", field="prompt")
    if body.chat_template:
        return encoder.encode_chat([{"role": "user", "content": body.prompt}]), body.prompt
    return encoder.encode_text(body.prompt), body.prompt


async def _unless_gone(exchange: Exchange, request: Request) -> tuple[str, Finished] | None:
    """The whole text and how it ended; None as soon as the client disconnects, which a handler that writes nothing learns
    only by receiving."""
    answered = asyncio.create_task(_whole(exchange))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answered.result() if answered.done() else None
    finally:
        answered.cancel()
        gone.cancel()


async def _whole(exchange: Exchange) -> tuple[str, Finished]:
    text: list[str] = []
    async for event in exchange.events(patience=math.inf):
        if isinstance(event, Delta):
            text.append(event.text)
        elif event is not None:
            return "".join(text), event
    raise AssertionError("events() ends with Finished or raises")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
