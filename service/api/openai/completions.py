"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, cast

from anyio import to_thread
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
from service.api.openai.chat import asked_by, server_sent
from service.api.openai.completion_logprobs import completion_logprobs, echoed_logprobs, joined, prompt_text
from service.api.openai.prompt_logprobs import prompt_tokens
from service.api.openai.schemas import CompletionRequest
from service.api.schemas import TimingsAnswer
from service.core import RedraftError, Timings


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
        asked = [
            asked_by(body, prompt, frontend, body.max_tokens, logprobs=body.logprobs, echo=bool(body.echo))
            for prompt in prompts
        ]
        exchange, answers = await frontend.submit(
            asked, caller_of(request), each=body.n or 1, live=bool(body.stream), route=request.url.path
        )
        writer = _Writer(exchange, answers, prompts, frontend, body, model)
        return await respond(writer, request, frontend, stream=bool(body.stream), ignored=[*other, *ignored])

    return router


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if isinstance(body.prompt[0], int):
        return [cast("list[int]", body.prompt)]
    return [*cast("list[str] | list[list[int]]", body.prompt)]


class _Writer:
    """Writes the answers to one request, whole or in chunks."""

    def __init__(
        self,
        exchange: Exchange,
        answers: Sequence[Answer],
        prompts: Sequence[str | Sequence[int]],
        frontend: Frontend,
        body: CompletionRequest,
        model: str,
    ) -> None:
        self.exchange = exchange
        self.answers = answers
        self._prompts = prompts
        self._each = len(answers) // len(prompts)
        self._encoder = frontend.encoder
        self._model = model
        self._logprobs = body.logprobs
        self._echo = bool(body.echo)
        self._prompt_logprobs = body.prompt_logprobs
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._continuous = body.stream_options is not None and body.stream_options.continuous
        self._id = f"cmpl-{exchange.id}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """See Writer."""
        if self._echo or self._prompt_logprobs is not None:
            # About a hundred bytes per prompt token: this would block the event loop.
            return await to_thread.run_sync(self._whole)
        return self._whole()

    def _whole(self) -> dict[str, Any]:
        choices: list[CompletionChoice] = []
        for index, answer in enumerate(self.answers):
            before, logprobs = self._echoed(index)
            if self._logprobs is not None:
                own = completion_logprobs(self._encoder, answer.logprobs, len(before))
                logprobs = own if logprobs is None else joined(logprobs, own)
            choices.append(self._choice(index, before + answer.text, logprobs, ended=True))
        spent, whole = combined_timings(self.answers, self._each), self._answer(choices)
        whole.usage, whole.timings, whole.metrics = UsageAnswer.of(spent), self._timings(spent), self._metrics(spent)
        return whole.model_dump(mode="json", exclude_unset=True)

    async def frames(self, patience: float, *, one_call: bool) -> AsyncIterator[bytes]:
        """See Writer."""
        offsets: list[int | None] = [None] * len(self.answers)
        try:
            async for part in read_parts(self.exchange, self.answers, patience, one_call=one_call):
                if part is None:
                    yield KEEP_ALIVE
                    continue
                index, answer, before, logprobs = part.index, self.answers[part.index], "", None
                offset = offsets[index]
                if offset is None:
                    # The first chunk includes the prompt.
                    before, logprobs = self._echoed(index)
                    offset = len(before)
                if part.logprobs:
                    own = completion_logprobs(self._encoder, part.logprobs, offset)
                    offset += sum(map(len, own.tokens))
                    logprobs = own if logprobs is None else joined(logprobs, own)
                offsets[index] = offset
                text = before + "".join(piece.text for piece in part.pieces)
                choice = self._choice(index, text, logprobs, ended=part.ended)
                chunk = self._answer([choice])
                if part.ended:
                    chunk.metrics = self._metrics(answer.timings)
                    if not self._usage:
                        chunk.timings = self._timings(answer.timings)
                if self._continuous:
                    chunk.usage = UsageAnswer.so_far(self.exchange.prompt_tokens_of(index), answer.tokens)
                yield server_sent(chunk)
            if self._usage:
                spent, last = combined_timings(self.answers, self._each), self._answer([])
                # Together, as on the chat route.
                last.usage, last.timings = UsageAnswer.of(spent), self._timings(spent)
                yield server_sent(last)
            yield DONE
        except RedraftError as error:
            yield server_sent(describe(error))
        finally:
            self.exchange.close()

    def _echoed(self, index: int) -> tuple[str, CompletionLogprobs | None]:
        """What precedes an answer: its prompt's text and log-probabilities, if requested."""
        if not self._echo:
            return "", None
        text, known = (
            prompt_text(self._encoder, self._prompts[index // self._each]),
            self.answers[index].prompt_logprobs,
        )
        if self._logprobs is None or known is None:
            return text, None
        return text, echoed_logprobs(self._encoder, known, text, self._logprobs)

    def _choice(self, index: int, text: str, logprobs: CompletionLogprobs | None, *, ended: bool) -> CompletionChoice:
        answer = self.answers[index]
        choice = CompletionChoice(
            index=index, text=text, logprobs=logprobs, finish_reason=_reason(answer) if ended else None
        )
        if ended and self._prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_tokens(self._encoder, answer, self._prompt_logprobs)
        return choice

    def _answer(self, choices: list[CompletionChoice]) -> CompletionAnswer:
        kind = "text_completion"
        return CompletionAnswer(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)

    def _timings(self, spent: Timings) -> TimingsAnswer:
        return TimingsAnswer.of(spent, draft_counts=self.exchange.draft_counts)

    def _metrics(self, spent: Timings) -> MetricsAnswer:
        return MetricsAnswer.of(spent, draft_counts=self.exchange.draft_counts)


def _reason(answer: Answer) -> Literal["stop", "length"]:
    return "length" if answer.reason is EndReason.LENGTH else "stop"
