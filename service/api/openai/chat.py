"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from service.api.access import caller_of
from service.api.answers import Answer, Part, combined_timings, read_parts
from service.api.asking import Asked, Chat, ForcedCalls, Frontend
from service.api.compatible import (
    CompatibleRoute,
    allowed_tools,
    client_tag,
    forced_calls,
    ignored_by,
    json_grammar,
    model_of,
    past_arguments,
    respond,
    sampling,
    template_options,
)
from service.api.errors import describe
from service.api.events import frame
from service.api.exchange import DONE, KEEP_ALIVE, Exchange
from service.api.openai.answer_schemas import (
    ChatAnswer,
    ChatChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    ChunkDelta,
    FunctionCallAnswer,
    LikelyToken,
    MessageAnswer,
    MetricsAnswer,
    TokenLogprob,
    ToolCallAnswer,
    UsageAnswer,
)
from service.api.openai.prompt_logprobs import prompt_tokens
from service.api.openai.schemas import (
    JSON_OBJECT,
    AllowedTools,
    AssistantTurn,
    ChatRequest,
    CommonRequest,
    Content,
    JsonFormat,
    Message,
    NamedTool,
    SchemaFormat,
    Tool,
    ToolCallTurn,
    ToolTurn,
)
from service.api.schemas import TimingsAnswer
from service.core import BadRequest, ChatEnd, Encoder, Grammar, PieceKind, RedraftError, TokenLogprobs, ToolCall


def chat_routes(frontend: Frontend) -> APIRouter:
    """POST /v1/chat/completions."""
    router = APIRouter(route_class=CompatibleRoute)

    @router.post(
        "/v1/chat/completions",
        response_model=ChatAnswer,
        responses={200: {"description": "The answer, or its stream.", "content": {"text/event-stream": {}}}},
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat: one JSON answer, or server-sent events with `stream`."""
        ignored = _ignored(body, frontend)
        model, other = model_of(body.model, frontend)
        asked, stream, one_call = _asked(body, frontend), bool(body.stream), body.parallel_tool_calls is False
        exchange, answers = await frontend.submit(
            [asked], caller_of(request), each=body.n or 1, live=stream or one_call, route=request.url.path
        )
        writer = _Writer(exchange, answers, frontend, body, model)
        return await respond(writer, request, frontend, stream=stream, one_call=one_call, ignored=[*other, *ignored])

    return router


def _ignored(body: ChatRequest, frontend: Frontend) -> list[str]:
    names = ignored_by(body, frontend)
    if _strict(body) and not frontend.encoder.binds_calls:
        names.append("tools.function.strict")
    return names


def _strict(body: ChatRequest) -> frozenset[str]:
    """Names of tools whose arguments must be valid."""
    return frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)


def _asked(body: ChatRequest, frontend: Frontend) -> Asked:
    tokens, name = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        # OpenAI's newer name for max_tokens.
        tokens, name = body.max_completion_tokens, "max_completion_tokens"
    options = template_options(body.chat_template_kwargs, body.reasoning_effort, thinks=_thinks(body))
    tools = [_tool(tool) for tool in _tools(body)]
    chat = Chat([template_turn(turn) for turn in body.messages], tools, options, _strict(body), _end(body))
    return asked_by(
        body,
        chat,
        frontend,
        tokens,
        max_tokens_field=name,
        logprobs=(body.top_logprobs or 0) if wants_logprobs(body) else None,
        forced=_forced_calls(body),
        prediction="" if body.prediction is None else joined(body.prediction.content),
    )


def _end(body: ChatRequest) -> ChatEnd:
    """How the prompt ends, according to vLLM's two fields. Raises BadRequest if both are true."""
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt cannot both be true: an answer either continues the last "
                "message or begins a new one",
                field="continue_final_message",
            )
        return ChatEnd.CONTINUED
    return ChatEnd.CLOSED if body.add_generation_prompt is False else ChatEnd.NEW_TURN


def _tools(body: ChatRequest) -> list[Tool]:
    """The tools shown to the model. Raises ToolNotFound if an allowed one is missing."""
    tools = body.tools or []
    match body.tool_choice:
        case "none":
            return []
        case AllowedTools(allowed_tools=allowed):
            return allowed_tools(
                tools, {tool.function.name: tool for tool in tools}, [tool.function.name for tool in allowed.tools]
            )
        case _:
            return tools


def _thinks(body: ChatRequest) -> bool | None:
    """Whether the model should reason first; None: the request does not say."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    return None if body.thinking is None else body.thinking.type != "disabled"


def asked_by(
    body: CommonRequest,
    prompt: Chat | str | Sequence[int],
    frontend: Frontend,
    max_tokens: int | None,
    *,
    max_tokens_field: str = "max_tokens",
    logprobs: int | None,
    echo: bool = False,
    forced: ForcedCalls | None = None,
    prediction: str = "",
) -> Asked:
    """Translates a chat or completion request for one prompt. echo: the answer includes the prompt, and its
    log-probabilities if there are any. Raises BadRequest."""
    scored = [count for count in (body.prompt_logprobs, logprobs if echo else None) if count is not None]
    # Texts that are measured were not written for the model: they are recorded only if the request says so.
    measured = echo or bool(scored)
    return Asked(
        prompt,
        sampling(
            frontend.defaults,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(body.top_k, 0),
            min_p=body.min_p,
            seed=body.seed,
            stop=body.stop or (),
            logit_bias=_logit_bias(body, frontend.encoder),
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            stop_token_ids=body.stop_token_ids,
            include_stop=body.include_stop_str_in_output,
        ),
        max_tokens,
        prompt_field="messages" if isinstance(prompt, Chat) else "prompt",
        max_tokens_field=max_tokens_field,
        domain=body.metadata.domain if body.metadata is not None else None,
        client=client_tag(body.user),
        store=bool(body.store) if measured else body.store is not False,
        logprobs=logprobs,
        # Evaluation tools take all entries except the last as the prompt's, so there must be one for each generated
        # token.
        logprob_of_end=echo,
        prompt_logprobs=max(scored, default=None),
        num_draft_tokens=body.num_draft_tokens,
        grammar=_grammar(body, forced),
        forced_calls=forced,
        bad_words=body.bad_words or (),
        prediction=prediction,
        show_special=body.skip_special_tokens is False,
    )


def _logit_bias(body: CommonRequest, encoder: Encoder) -> dict[int, float]:
    """Raises BadRequest for invalid token ids."""
    bias = {int(token): added for token, added in (body.logit_bias or {}).items()}
    if any(token >= encoder.vocabulary for token in bias):
        raise BadRequest(f"token ids must be below {encoder.vocabulary}", field="logit_bias")
    return bias


def _grammar(body: CommonRequest, forced: ForcedCalls | None) -> Grammar | None:
    """With forced calls, a response format has no text to apply to. Raises BadRequest if more than one is given."""
    given = body.structured_outputs.grammars() if body.structured_outputs is not None else []
    match body.response_format if forced is None else None:
        case JsonFormat(schema_=dict() as schema):
            given.append(json_grammar(schema, "response_format.schema"))
        case JsonFormat():
            given.append(json_grammar(JSON_OBJECT, "response_format"))
        case SchemaFormat(json_schema=wanted):
            given.append(json_grammar(wanted.schema_, "response_format.json_schema.schema"))
        case _:
            pass
    if len(given) > 1:
        raise BadRequest("an answer can have only one format", field=given[-1].field)
    return given[0] if given else None


def _forced_calls(body: ChatRequest) -> ForcedCalls | None:
    choice = body.tool_choice
    name = choice.function.name if isinstance(choice, NamedTool) else None
    required = choice == "required" or (isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required")
    return forced_calls(name, required=required, several=body.parallel_tool_calls is not False)


def wants_logprobs(body: ChatRequest) -> bool:
    """Whether log-probabilities are sent: top_logprobs without logprobs requests them too."""
    return bool(body.top_logprobs) if body.logprobs is None else body.logprobs


def template_turn(turn: Message) -> dict[str, object]:
    """A turn in the form chat templates expect."""
    new: dict[str, object] = {
        "role": "system" if turn.role == "developer" else turn.role,
        "content": joined(turn.content),
    }
    if turn.name is not None:
        new["name"] = turn.name
    match turn:
        case ToolTurn():
            new["tool_call_id"] = turn.tool_call_id
        case AssistantTurn():
            if not new["content"] and turn.refusal:
                new["content"] = turn.refusal
            if (thought := turn.reasoning_content or turn.reasoning) is not None:
                new["reasoning_content"] = thought
            if turn.tool_calls:
                new["tool_calls"] = [_past_call(call) for call in turn.tool_calls]
        case _:
            pass
    return new


def _past_call(call: ToolCallTurn) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": past_arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def joined(content: Content | None) -> str:
    """A message's content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _tool(tool: Tool) -> dict[str, object]:
    described = tool.function.model_dump(exclude_none=True, include={"name", "description", "parameters"})
    return {"type": "function", "function": described}


def likely_token(encoder: Encoder, token: int, logprob: float) -> LikelyToken:
    """A token and its log-probability, in the form shown to clients."""
    raw = encoder.token_bytes(token)
    return LikelyToken(token=raw.decode(errors="replace"), bytes=list(raw), logprob=logprob)


def choice_logprobs(encoder: Encoder, logprobs: Sequence[TokenLogprobs]) -> ChoiceLogprobs:
    """The log-probabilities of output tokens, in the form shown to clients."""
    content = [
        TokenLogprob(
            **likely_token(encoder, each.token, each.logprob).model_dump(),
            top_logprobs=[likely_token(encoder, token, logprob) for token, logprob in each.top],
        )
        for each in logprobs
    ]
    return ChoiceLogprobs(content=content, refusal=None)


def _call(call: ToolCall) -> ToolCallAnswer:
    function = FunctionCallAnswer(name=call.name, arguments=call.arguments)
    return ToolCallAnswer(id=call.id or "", type="function", function=function)


class _Writer:
    """Writes the answers to one request, whole or in chunks."""

    def __init__(
        self, exchange: Exchange, answers: Sequence[Answer], frontend: Frontend, body: ChatRequest, model: str
    ) -> None:
        self.exchange = exchange
        self.answers = answers
        self._encoder = frontend.encoder
        self._model = model
        self._logprobs = wants_logprobs(body)
        self._prompt_logprobs = body.prompt_logprobs
        self._usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._continuous = body.stream_options is not None and body.stream_options.continuous
        self._id = f"chatcmpl-{exchange.id}"
        self._created = int(time.time())

    async def whole(self) -> dict[str, Any]:
        """See Writer."""
        spent = combined_timings(self.answers, len(self.answers))
        whole = ChatAnswer(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._choice(i, answer) for i, answer in enumerate(self.answers)],
            usage=UsageAnswer.of(spent),
            timings=TimingsAnswer.of(spent, draft_counts=self.exchange.draft_counts),
            metrics=MetricsAnswer.of(spent, draft_counts=self.exchange.draft_counts),
        )
        if self._prompt_logprobs is not None:
            whole.prompt_logprobs = prompt_tokens(self._encoder, self.answers[0], self._prompt_logprobs)
        return whole.model_dump(mode="json", exclude_unset=True)

    def _choice(self, index: int, answer: Answer) -> Choice:
        text, calls = answer.text, answer.calls
        message = MessageAnswer(role="assistant", content=text if text or not calls else None, refusal=None)
        if answer.reasoning:
            message.reasoning_content = answer.reasoning
        if calls:
            message.tool_calls = [_call(call) for call in calls]
        logprobs = choice_logprobs(self._encoder, answer.logprobs) if self._logprobs else None
        return Choice(index=index, message=message, logprobs=logprobs, finish_reason=answer.reason.value)

    async def frames(self, patience: float, *, one_call: bool) -> AsyncIterator[bytes]:
        """See Writer."""
        try:
            async for part in read_parts(self.exchange, self.answers, patience, one_call=one_call):
                if part is None:
                    yield KEEP_ALIVE
                    continue
                for frame in self._part(part):
                    yield frame
            if self._usage:
                spent, last = combined_timings(self.answers, len(self.answers)), self._chunk([])
                last.usage = UsageAnswer.of(spent)
                last.timings = TimingsAnswer.of(spent, draft_counts=self.exchange.draft_counts)
                yield server_sent(last)
            yield DONE
        except RedraftError as error:
            yield server_sent(describe(error))
        finally:
            self.exchange.close()

    def _part(self, part: Part) -> list[bytes]:
        chunks: list[ChatChunk] = []
        if part.first:
            # Not earlier: benchmark tools take the first chunk of a choice for its first token.
            chunks.append(self._delta(part.index, ChunkDelta(role="assistant", content="")))
        logprobs = choice_logprobs(self._encoder, part.logprobs) if part.logprobs else None
        number = len(self.answers[part.index].calls) - sum(piece.call is not None for piece in part.pieces)
        for piece in part.pieces:
            if piece.call is not None:
                call = _call(piece.call)
                call.index = number
                delta, number = ChunkDelta(tool_calls=[call]), number + 1
            elif piece.kind is PieceKind.REASONING:
                delta = ChunkDelta(reasoning_content=piece.text)
            else:
                delta = ChunkDelta(content=piece.text)
            chunks.append(self._delta(part.index, delta, logprobs))
            logprobs = None
        if logprobs is not None:
            chunks.append(self._delta(part.index, ChunkDelta(content=""), logprobs))
        if part.ended:
            chunks.append(self._last(part.index))
        return [server_sent(chunk) for chunk in chunks]

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        kind = "chat.completion.chunk"
        return ChatChunk(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)

    def _delta(self, index: int, delta: ChunkDelta, logprobs: ChoiceLogprobs | None = None) -> ChatChunk:
        choice = ChunkChoice(index=index, delta=delta, finish_reason=None)
        if logprobs is not None:
            choice.logprobs = logprobs
        return self._with_usage(self._chunk([choice]), index)

    def _with_usage(self, chunk: ChatChunk, index: int) -> ChatChunk:
        """The chunk, with its answer's usage so far if every chunk includes it."""
        if self._continuous:
            chunk.usage = UsageAnswer.so_far(self.exchange.prompt_tokens_of(index), self.answers[index].tokens)
        return chunk

    def _last(self, index: int) -> ChatChunk:
        answer = self.answers[index]
        choice = ChunkChoice(index=index, delta=ChunkDelta(), finish_reason=answer.reason.value)
        chunk = self._with_usage(self._chunk([choice]), index)
        counts = self.exchange.draft_counts
        if not self._usage:
            # Clients that add up what a stream says (Open WebUI) take both for usage: they come in one chunk.
            chunk.timings = TimingsAnswer.of(answer.timings, draft_counts=counts)
        chunk.metrics = MetricsAnswer.of(answer.timings, draft_counts=counts)
        if self._prompt_logprobs is not None and index == 0:
            chunk.prompt_logprobs = prompt_tokens(self._encoder, answer, self._prompt_logprobs)
        return chunk


def server_sent(data: BaseModel) -> bytes:
    """An event of a stream, with the fields that were set."""
    return frame(data.model_dump_json(exclude_unset=True))
