"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, cast

from fastapi import APIRouter, Request, Response

from service.api.access import caller_of
from service.api.answers import Answer, EndReason, combined_timings, read_parts
from service.api.asking import Frontend
from service.api.compatible import CompatibleRoute, ignored_by, model_of, respond
from service.api.errors import describe
from service.api.exchange import DONE, KEEP_ALIVE, Exchange
from service.api.openai.answer_schemas import (
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    MetricsAnswer,
    UsageAnswer,
)
from service.api.openai.chat import asked_by, likely_token, server_sent
from service.api.openai.schemas import CompletionRequest
from service.api.schemas import TimingsAnswer
from service.core import Encoder, RedraftError, Timings, TokenLogprobs


def completion_routes(frontend: Frontend) -> APIRouter:
    """POST /v1/completions."""
    router = APIRouter(route_class=CompatibleRoute)

    @router.post(
        "/v1/completions",
        response_model=CompletionAnswer,
        responses={200: {"description": "The answer, or its stream.", "content": {"text/event-stream": {}}}},
    )
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts: one JSON answer, or server-sent events with `stream`."""
        ignored = ignored_by(body, frontend)
        model, other = model_of(body.model, frontend)
        prompts = _prompts(body)
        asked = [asked_by(body, prompt, frontend, body.max_tokens, logprobs=body.logprobs) for prompt in prompts]
        exchange, answers = await frontend.submit(
            asked, caller_of(request), each=body.n or 1, live=bool(body.stream), route=request.url.path
        )
        writer = _Writer(exchange, answers, len(prompts), frontend, body, model)
        return await respond(writer, request, frontend, stream=bool(body.stream), ignored=[*other, *ignored])

    return router


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], int):
        return [cast("list[int]", body.prompt)]
    return [*cast("list[str] | list[list[int]]", body.prompt)]


class _Writer:
    """Writes the answers to one request, whole or in chunks. prompts: how many there are."""

    def __init__(
        self,
        exchange: Exchange,
        answers: Sequence[Answer],
        prompts: int,
        frontend: Frontend,
        body: CompletionRequest,
        model: str,
    ) -> None:
        self.exchange = exchange
        self.answers = answers
        self._each = len(answers) // prompts
        self._encoder = frontend.encoder
        self._model = model
        self._logprobs = body.logprobs is not None
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._id = f"cmpl-{exchange.id}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """See Writer."""
        choices: list[CompletionChoice] = []
        for index, answer in enumerate(self.answers):
            logprobs = completion_logprobs(self._encoder, answer.logprobs, 0) if self._logprobs else None
            choices.append(
                CompletionChoice(index=index, text=answer.text, logprobs=logprobs, finish_reason=_reason(answer))
            )
        spent = combined_timings(self.answers, self._each)
        return self._answer(choices, usage=spent, timings=spent).model_dump(mode="json", exclude_unset=True)

    async def frames(self, patience: float, *, one_call: bool) -> AsyncIterator[bytes]:
        """See Writer."""
        offsets = [0] * len(self.answers)
        try:
            async for part in read_parts(self.exchange, self.answers, patience, one_call=one_call):
                if part is None:
                    yield KEEP_ALIVE
                    continue
                index, answer, logprobs = part.index, self.answers[part.index], None
                if part.logprobs:
                    logprobs = completion_logprobs(self._encoder, part.logprobs, offsets[index])
                    offsets[index] += sum(map(len, logprobs.tokens))
                text, reason = "".join(piece.text for piece in part.pieces), _reason(answer) if part.ended else None
                choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)
                yield server_sent(self._answer([choice], timings=answer.timings if part.ended else None))
            if self._usage:
                yield server_sent(self._answer([], usage=combined_timings(self.answers, self._each)))
            yield DONE
        except RedraftError as error:
            yield server_sent(describe(error))
        finally:
            self.exchange.close()

    def _answer(
        self, choices: list[CompletionChoice], *, usage: Timings | None = None, timings: Timings | None = None
    ) -> CompletionAnswer:
        kind = "text_completion"
        new = CompletionAnswer(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)
        if usage is not None:
            new.usage = UsageAnswer.of(usage)
        if timings is not None:
            counts = self.exchange.draft_counts
            new.timings = TimingsAnswer.of(timings, draft_counts=counts)
            new.metrics = MetricsAnswer.of(timings, draft_counts=counts)
        return new


def _reason(answer: Answer) -> Literal["stop", "length"]:
    return "length" if answer.reason is EndReason.LENGTH else "stop"


def _key(encoder: Encoder, token: int) -> str:
    """A token's text or, where it is no whole character, its bytes, as OpenAI writes them."""
    raw = encoder.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(encoder: Encoder, logprobs: Sequence[TokenLogprobs], offset: int) -> CompletionLogprobs:
    """The log-probabilities of output tokens, as clients see them. offset: characters of the text before them."""
    tokens = [likely_token(encoder, each.token, each.logprob).token for each in logprobs]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[each.logprob for each in logprobs],
        top_logprobs=[
            {_key(encoder, token): p for token, p in [*each.top, (each.token, each.logprob)]} for each in logprobs
        ],
        text_offset=offsets[:-1],
    )
