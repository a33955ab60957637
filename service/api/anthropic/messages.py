"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request, Response

from service.api.access import caller_of
from service.api.answers import Answer, EndReason, read_parts
from service.api.anthropic.schemas import (
    Block,
    BlockAnswer,
    CountAnswer,
    CountRequest,
    Message,
    MessagesAnswer,
    MessagesRequest,
    NamedToolChoice,
    RedactedThinkingBlock,
    StopReason,
    TextAnswer,
    TextBlock,
    ThinkingAnswer,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseAnswer,
    ToolUseBlock,
    UsageAnswer,
)
from service.api.anthropic.threads import continued, kept_parts, message_name
from service.api.asking import Asked, Chat, ForcedCalls, Frontend, check_size, encode_chat
from service.api.compatible import (
    CompatibleRoute,
    client_tag,
    forced_calls,
    ignored_by,
    json_grammar,
    model_of,
    past_arguments,
    respond,
    sampling,
)
from service.api.errors import describe_to_anthropic
from service.api.events import frame
from service.api.exchange import KEEP_ALIVE, Exchange
from service.api.ignored import with_ignored
from service.api.request_id import id_of
from service.api.schemas import TimingsAnswer
from service.api.threads import COUNTING
from service.core import Grammar, Piece, PieceKind, RedraftError, Sampling

BILLING = "x-anthropic-billing-header:"


def messages_routes(frontend: Frontend) -> APIRouter:
    """POST /v1/messages and POST /v1/messages/count_tokens."""
    router = APIRouter(route_class=CompatibleRoute)
    replies = frontend.replies

    @router.post(
        "/v1/messages",
        response_model=MessagesAnswer,
        responses={200: {"description": "The answer, or its stream.", "content": {"text/event-stream": {}}}},
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation: one JSON answer, or server-sent events with `stream`."""
        ignored = _ignored(body, frontend)
        model, other = model_of(body.model, frontend)
        one_call = body.tool_choice is not None and bool(body.tool_choice.disable_parallel_tool_use)
        caller, stream = caller_of(request), bool(body.stream)
        pending = replies.begin(caller, _client(body), None)
        whole = continued(body, pending, replies.not_kept)
        asked = _asked(whole, frontend)
        keeps = body.thread is not None and asked.store and replies.max_bytes > 0
        exchange, (answer,) = await frontend.submit([asked], caller, live=stream or one_call, route=request.url.path)
        pending.asked(exchange.id)

        def keep(answer: MessagesAnswer) -> None:
            if keeps:
                pending.keep(answer.id, kept_parts(whole, answer.content), {})

        writer = _Writer(exchange, answer, model, frontend.limits.max_context, id_of(request.scope), keep)
        if body.thread is not None and not keeps:
            ignored.append("thread")
        return await respond(writer, request, frontend, stream=stream, one_call=one_call, ignored=[*other, *ignored])

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, response: Response) -> CountAnswer:
        """The number of tokens in a conversation; generates nothing."""
        ignored = ignored_by(body, frontend)
        with_ignored(response, [*model_of(body.model, frontend)[1], *ignored])
        chat = _chat(body)
        check_size(Asked(chat, Sampling(), None), frontend.limits)
        encoded = await COUNTING.run(encode_chat, chat, frontend.encoder)
        return CountAnswer(input_tokens=len(encoded.tokens))

    return router


def _ignored(body: CountRequest, frontend: Frontend) -> list[str]:
    names = ignored_by(body, frontend)
    if _strict(body) and not frontend.encoder.binds_calls:
        names.append("tools.strict")
    return names


def _strict(body: CountRequest) -> frozenset[str]:
    """Names of tools whose arguments must be valid."""
    return frozenset(tool.name for tool in body.tools or () if tool.strict)


def _asked(body: MessagesRequest, frontend: Frontend) -> Asked:
    forced = _forced_calls(body)
    return Asked(
        _chat(body),
        sampling(
            frontend.defaults,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences or (),
        ),
        body.max_tokens,
        capped=True,
        client=_client(body),
        store=body.store is not False,
        num_draft_tokens=body.num_draft_tokens,
        # A forced call contains no text that a format could apply to.
        grammar=_grammar(body) if forced is None else None,
        forced_calls=forced,
    )


def _client(body: MessagesRequest) -> str | None:
    return client_tag(body.metadata.user_id if body.metadata is not None else None)


def _grammar(body: CountRequest) -> Grammar | None:
    if body.output_config is not None and body.output_config.format is not None:
        return json_grammar(body.output_config.format.schema_, "output_config.format.schema")
    return None if body.output_format is None else json_grammar(body.output_format.schema_, "output_format.schema")


def _forced_calls(body: CountRequest) -> ForcedCalls | None:
    choice = body.tool_choice
    if choice is None:
        return None
    name = choice.name if isinstance(choice, NamedToolChoice) else None
    return forced_calls(name, required=choice.type == "any", several=not choice.disable_parallel_tool_use)


def _chat(body: CountRequest) -> Chat:
    options: dict[str, object] = {}
    if body.thinking is not None:
        options["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        options["reasoning_effort"] = body.output_config.effort
    turns: list[Mapping[str, object]] = []
    if system := _system(body):
        turns.append({"role": "system", "content": system})
    for role, neighbours in groupby(body.messages, key=lambda message: message.role):
        turns += _turns(role, _joined(neighbours))
    tools = body.tools or ()
    if body.tool_choice is not None and body.tool_choice.type == "none":
        tools = ()
    return Chat(turns, [_tool(tool) for tool in tools], options, _strict(body))


def _system(body: CountRequest) -> str:
    """The system prompt without Claude Code's billing block, which changes with every request and would prevent sharing
    a prefix."""
    if body.system is None or isinstance(body.system, str):
        return body.system or ""
    return _text([block for block in body.system if not block.text.startswith(BILLING)])


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _joined(messages: Iterable[Message]) -> list[Block]:
    """The blocks of adjacent messages with the same role, which Anthropic's API reads as one message."""
    blocks: list[Block] = []
    for message in messages:
        content = message.content
        new: list[Block] = [TextBlock(type="text", text=content)] if isinstance(content, str) else [*content]
        said = (any(isinstance(block, TextBlock) and block.text for block in some) for some in (blocks, new))
        if all(said):
            blocks.append(TextBlock(type="text", text="\n\n"))
        blocks += new
    return blocks


def _turns(role: str, blocks: Iterable[Block]) -> list[Mapping[str, object]]:
    """A message in the form chat templates expect: each tool result is a separate turn."""
    results: list[Mapping[str, object]] = []
    texts, thoughts, calls = list[str](), list[str](), list[object]()
    for block in blocks:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock():
                content = _text(block.content or "")
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case ToolUseBlock():
                function = {"name": block.name, "arguments": past_arguments(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
    turn: dict[str, object] = {"role": role, "content": "".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if texts or thoughts or calls or not results else results


def _tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.input_schema is not None:
        function["parameters"] = tool.input_schema
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


class _Writer:
    """Writes one answer, whole or as a stream of events. context: maximum tokens of prompt and answer. request_id: as
    clients see it. keep: stores the answer before its client has all of it, because the next request may arrive at
    once."""

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        model: str,
        context: int,
        request_id: str,
        keep: Callable[[MessagesAnswer], None],
    ) -> None:
        self.exchange = exchange
        self.answers = [answer]
        self._answer = answer
        self._model = model
        self._context = context
        self._request_id = request_id
        self._keep = keep
        self._blocks = 0
        """Content blocks of the stream so far."""
        self._open: PieceKind | None = None
        """The kind of the last one, unless it has ended."""

    async def whole(self) -> dict[str, Any]:
        """See Writer."""
        return self._whole().model_dump(mode="json")

    def _whole(self) -> MessagesAnswer:
        answer = self._answer
        whole = MessagesAnswer(
            id=self._id,
            model=self._model,
            content=[_block(item) for item in answer.items],
            stop_reason=self._stop_reason(),
            stop_sequence=answer.stopped_by,
            usage=self._usage(),
            timings=TimingsAnswer.of(answer.timings, draft_counts=self.exchange.draft_counts),
        )
        self._keep(whole)
        return whole

    @property
    def _id(self) -> str:
        return message_name(self.exchange.id)

    def _usage(self) -> UsageAnswer:
        spent = self._answer.timings
        return UsageAnswer(
            input_tokens=spent.prompt_n - spent.cache_n,
            cache_read_input_tokens=spent.cache_n,
            output_tokens=spent.predicted_n,
        )

    def _stop_reason(self) -> StopReason:
        answer = self._answer
        match answer.reason:
            case EndReason.TOOL_CALLS:
                return "tool_use"
            case EndReason.STOP:
                return "end_turn" if answer.stopped_by is None else "stop_sequence"
            case EndReason.LENGTH:
                full = answer.timings.prompt_n + answer.timings.predicted_n >= self._context
                return "model_context_window_exceeded" if full else "max_tokens"

    async def frames(self, patience: float, *, one_call: bool) -> AsyncIterator[bytes]:
        """See Writer."""
        try:
            async for part in read_parts(self.exchange, [self._answer], patience, one_call=one_call):
                if part is None:
                    # A message has no pings before its first event, which comes with the first token.
                    yield _event("ping") if self._answer.begun else KEEP_ALIVE
                    continue
                if part.first:
                    yield self._start()
                for piece in part.pieces:
                    for event in self._piece(piece):
                        yield event
            for event in self._close():
                yield event
            whole = self._whole()
            delta = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
            timings = whole.timings.model_dump(mode="json") if whole.timings is not None else None
            yield _event("message_delta", delta=delta, usage=whole.usage.model_dump(mode="json"), timings=timings)
            yield _event("message_stop")
        except RedraftError as error:
            body = describe_to_anthropic(error, self._request_id)
            yield frame(json.dumps(body, ensure_ascii=False), "error")
        finally:
            self.exchange.close()

    def _start(self) -> bytes:
        usage = UsageAnswer(input_tokens=self.exchange.prompt_tokens, output_tokens=0)
        start = MessagesAnswer(
            id=self._id, model=self._model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        message = start.model_dump(mode="json", exclude_none=False, exclude={"timings"})
        return _event("message_start", message=message)

    def _piece(self, piece: Piece) -> list[bytes]:
        frames: list[bytes] = []
        kind = piece.kind
        if kind is not self._open or kind is PieceKind.CALL:
            frames += self._close()
            block = _block(Piece(kind, call=piece.call and replace(piece.call, arguments="{}")))
            self._open, self._blocks = kind, self._blocks + 1
            frames.append(
                _event("content_block_start", index=self._blocks - 1, content_block=block.model_dump(mode="json"))
            )
        match kind:
            case PieceKind.TEXT:
                delta = {"type": "text_delta", "text": piece.text}
            case PieceKind.REASONING:
                delta = {"type": "thinking_delta", "thinking": piece.text}
            case PieceKind.CALL:
                assert piece.call is not None
                delta = {"type": "input_json_delta", "partial_json": piece.call.arguments}
        return [*frames, _event("content_block_delta", index=self._blocks - 1, delta=delta)]

    def _close(self) -> list[bytes]:
        """The end of the open block."""
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._blocks - 1)]


def _block(item: Piece) -> BlockAnswer:
    if item.call is not None:
        return ToolUseAnswer(id=item.call.id or "", name=item.call.name, input=json.loads(item.call.arguments))
    return ThinkingAnswer(thinking=item.text) if item.kind is PieceKind.REASONING else TextAnswer(text=item.text)


def _event(kind: str, **fields: object) -> bytes:
    return frame(json.dumps({"type": kind, **fields}, ensure_ascii=False), kind)
