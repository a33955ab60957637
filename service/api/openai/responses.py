"""POST /v1/responses, which may continue earlier responses; GET and DELETE for stored ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response

from service.api.access import caller_of
from service.api.answers import Answer, EndReason, read_parts
from service.api.asking import Asked, Chat, ForcedCalls, Frontend
from service.api.compatible import (
    CompatibleRoute,
    allowed_tools,
    client_tag,
    forced_calls,
    ignored_by,
    json_grammar,
    model_of,
    respond,
    sampling,
    template_options,
)
from service.api.errors import describe
from service.api.events import frame
from service.api.exchange import KEEP_ALIVE, Exchange
from service.api.openai.answer_schemas import MetricsAnswer
from service.api.openai.chat import choice_logprobs
from service.api.openai.response_items import ServedItem, conversation, kept_parts, response_name, turns_of
from service.api.openai.responses_schemas import (
    DeletedResponse,
    FlatAllowedTools,
    FlatNamedTool,
    FlatSchemaFormat,
    FunctionTool,
    HostedItem,
    HostedTool,
    IncompleteDetails,
    InputDetails,
    Output,
    OutputCall,
    OutputDetails,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    ResponseError,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    Status,
)
from service.api.openai.schemas import JSON_OBJECT, JsonFormat
from service.api.printing import printable
from service.api.replies import PendingReply
from service.api.schemas import MAX_TAG_CHARS, ResponseModel, TimingsAnswer
from service.api.threads import ENCODING
from service.core import Grammar, NotFound, Piece, PieceKind, RedraftError, Timings, TokenLogprobs

Id = Annotated[str, Path(alias="id", max_length=MAX_TAG_CHARS)]


def responses_routes(frontend: Frontend) -> APIRouter:
    """POST /v1/responses, GET and DELETE /v1/responses/{id}."""
    router = APIRouter(route_class=CompatibleRoute)
    replies = frontend.replies

    @router.post(
        "/v1/responses",
        response_model=ResponsesAnswer,
        responses={200: {"description": "The answer, or its stream.", "content": {"text/event-stream": {}}}},
    )
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input: one JSON answer, or server-sent events with `stream`."""
        ignored = _ignored(body, frontend)
        model, other = model_of(body.model, frontend)
        caller, stream, one_call = caller_of(request), bool(body.stream), body.parallel_tool_calls is False
        pending = replies.begin(caller, client_tag(body.user), _domain(body))
        items = conversation(body, pending, replies.not_kept)
        asked = _asked(body, items, frontend)
        exchange, (answer,) = await frontend.submit([asked], caller, live=stream or one_call, route=request.url.path)
        pending.asked(exchange.id)
        record = _Record(
            pending, items, stored=asked.store and replies.recorded, kept=asked.store and replies.max_bytes > 0
        )
        writer = _Writer(exchange, answer, frontend, body, asked, model, record)
        return await respond(writer, request, frontend, stream=stream, one_call=one_call, ignored=[*other, *ignored])

    @router.get("/v1/responses/{id}", response_model=ResponsesAnswer)
    async def show(id: Id, request: Request) -> Response:
        """A stored response, for the key that requested it."""
        reply = replies.find(id, caller_of(request))
        if reply is None or not reply.answer:
            raise NotFound(f"this response {replies.not_kept}")
        return Response(reply.answer, media_type="application/json")

    @router.delete("/v1/responses/{id}")
    async def drop(id: Id, request: Request) -> DeletedResponse:
        """Drop a stored response. Its recorded text is erased by DELETE /generations."""
        reply = replies.find(id, caller_of(request))
        if reply is None or not reply.answer or not replies.drop(id, caller_of(request)):
            raise NotFound(f"this response {replies.not_kept}")
        return DeletedResponse(id=id)

    return router


def _ignored(body: ResponsesRequest, frontend: Frontend) -> list[str]:
    names = ignored_by(body, frontend)
    if body.truncation == "auto":
        names.append("truncation")
    names += sorted({f"tools.{printable(tool.type)}" for tool in body.tools or () if isinstance(tool, HostedTool)})
    items = () if isinstance(body.input, str) else body.input
    names += sorted({f"input.{printable(item.type)}" for item in items if isinstance(item, HostedItem)})
    if _strict(body) and not frontend.encoder.binds_calls:
        names.append("tools.strict")
    return names


def _domain(body: ResponsesRequest) -> str | None:
    return body.metadata.domain if body.metadata is not None else None


def _strict(body: ResponsesRequest) -> frozenset[str]:
    """Names of tools whose arguments must be valid."""
    return frozenset(tool.name for tool in body.tools or () if isinstance(tool, FunctionTool) and tool.strict)


def _asked(body: ResponsesRequest, items: Sequence[ServedItem], frontend: Frontend) -> Asked:
    forced = _forced_calls(body)
    tools = [_tool(tool) for tool in _tools(body)]
    options = template_options(body.chat_template_kwargs, body.reasoning and body.reasoning.effort)
    return Asked(
        Chat(turns_of(body.instructions, items), tools, options, _strict(body)),
        sampling(
            frontend.defaults,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=None if body.top_k is None else max(body.top_k, 0),
            min_p=body.min_p,
            seed=body.seed,
        ),
        body.max_output_tokens,
        prompt_field="input",
        max_tokens_field="max_output_tokens",
        domain=_domain(body),
        client=client_tag(body.user),
        store=body.store is not False,
        logprobs=body.top_logprobs or None,
        num_draft_tokens=body.num_draft_tokens,
        # A forced call contains no text that a format could apply to.
        grammar=_grammar(body) if forced is None else None,
        forced_calls=forced,
    )


def _tools(body: ResponsesRequest) -> list[FunctionTool]:
    """The tools shown to the model. Raises ToolNotFound if an allowed one is missing."""
    tools = [tool for tool in body.tools or () if isinstance(tool, FunctionTool)]
    match body.tool_choice:
        case "none":
            return []
        case FlatAllowedTools(tools=allowed):
            names = [tool.name for tool in allowed if tool.type == "function" and tool.name is not None]
            return allowed_tools(tools, {tool.name: tool for tool in tools}, names)
        case _:
            return tools


def _grammar(body: ResponsesRequest) -> Grammar | None:
    match body.text.format if body.text is not None else None:
        case JsonFormat():
            return json_grammar(JSON_OBJECT, "text.format")
        case FlatSchemaFormat(schema_=schema):
            return json_grammar(schema, "text.format.schema")
        case _:
            return None


def _forced_calls(body: ResponsesRequest) -> ForcedCalls | None:
    choice = body.tool_choice
    name = choice.name if isinstance(choice, FlatNamedTool) else None
    required = choice == "required" or (isinstance(choice, FlatAllowedTools) and choice.mode == "required")
    return forced_calls(name, required=required, several=body.parallel_tool_calls is not False)


def _tool(tool: FunctionTool) -> dict[str, object]:
    return {
        "type": "function",
        "function": tool.model_dump(exclude_none=True, include={"name", "description", "parameters"}),
    }


@dataclass(slots=True)
class _Record:
    """The stored form of a response. items: its input. stored: whether the client is told that it is stored. kept:
    later requests may refer to it; None after it was handed over."""

    pending: PendingReply
    items: Sequence[ServedItem]
    stored: bool
    kept: bool

    def keep(self, response: ResponsesAnswer) -> None:
        """Stores the response, once."""
        if not self.kept:
            return
        self.kept = False
        parts = [*kept_parts(self.items), *kept_parts(response.output)]
        names = {item.id: len(self.items) + i for i, item in enumerate(response.output)}
        self.pending.keep(response.id, parts, names, response.model_dump_json().encode())


class _Writer:
    """Writes one answer, whole or as a stream of events."""

    def __init__(
        self,
        exchange: Exchange,
        answer: Answer,
        frontend: Frontend,
        body: ResponsesRequest,
        asked: Asked,
        model: str,
        record: _Record,
    ) -> None:
        self.exchange = exchange
        self.answers = [answer]
        self._answer = answer
        self._encoder = frontend.encoder
        self._body = body
        self._asked = asked
        self._model = model
        self._record = record
        self._created = int(time.time())
        self._sequence = 0
        self._ids: list[str] = []
        self._index = -1
        """Index of the item being streamed."""
        self._unsent: list[TokenLogprobs] = []
        """Log-probabilities of tokens whose text has not been sent."""
        self._open: list[Piece] = []
        """Pieces of the item being streamed."""

    async def whole(self) -> dict[str, Any]:
        """See Writer."""
        return (await self._whole()).model_dump(mode="json")

    async def _whole(self) -> ResponsesAnswer:
        cut = self._answer.reason is EndReason.LENGTH
        items = self._answer.items
        output = [
            self._item(i, item, "incomplete" if cut and i == len(items) - 1 else "completed")
            for i, item in enumerate(items)
        ]
        if len(output) == 1 and isinstance(output[0], OutputMessage) and self._answer.logprobs:
            # With other parts in the answer, tokens cannot be assigned to parts.
            output[0].content[0].logprobs = choice_logprobs(self._encoder, self._answer.logprobs).content
        answer = self._response("incomplete" if cut else "completed", output)
        if cut:
            answer.incomplete_details = IncompleteDetails()
        spent = self._answer.timings
        # Off the event loop: the tokenizer may be busy with a long prompt.
        thought = await ENCODING.run(self._reasoning_tokens) if self._answer.reasoning else 0
        answer.usage = self._usage(spent, min(thought, spent.predicted_n))
        counts = self.exchange.draft_counts
        answer.timings = TimingsAnswer.of(spent, draft_counts=counts)
        answer.metrics = MetricsAnswer.of(spent, draft_counts=counts)
        # Before its client has all of it, because the next request may arrive at once.
        self._record.keep(answer)
        return answer

    def _keep_the_rest(self) -> None:
        """Stores the part of an aborted answer: its client has seen item ids and may refer to them."""
        items = self._answer.items
        if items:
            self._record.keep(
                self._response("incomplete", [self._item(i, each, "incomplete") for i, each in enumerate(items)])
            )

    def _reasoning_tokens(self) -> int:
        encode = self._encoder.encode_text
        return len(encode(self._answer.reasoning)) - len(encode(""))

    def _usage(self, spent: Timings, reasoning_tokens: int) -> ResponsesUsage:
        return ResponsesUsage(
            input_tokens=spent.prompt_n,
            input_tokens_details=InputDetails(cached_tokens=spent.cache_n),
            output_tokens=spent.predicted_n,
            output_tokens_details=OutputDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=spent.prompt_n + spent.predicted_n,
        )

    def _response(
        self, status: Literal["in_progress", "completed", "incomplete", "failed"], output: Sequence[Output]
    ) -> ResponsesAnswer:
        body, chosen = self._body, self._asked.sampling
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
        text.setdefault("format", {"type": "text"})
        return ResponsesAnswer(
            id=response_name(self.exchange.id),
            created_at=self._created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata.model_dump(exclude_unset=True) if body.metadata is not None else {},
            model=self._model,
            output=list(output),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id or None,
            reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            store=self._record.stored and not self._record.pending.forgotten,
            temperature=chosen.temperature,
            text=text,
            tool_choice=body.tool_choice or "auto",
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or () if isinstance(tool, FunctionTool)],
            top_logprobs=body.top_logprobs or 0,
            top_p=chosen.top_p,
            user=body.user,
        )

    def _item(self, index: int, item: Piece, status: Status) -> Output:
        """Item number `index` of the output, with a stable id."""
        id = self._item_id(index, item)
        if item.call is not None:
            call = item.call
            return OutputCall(id=id, call_id=call.id or "", name=call.name, arguments=call.arguments, status=status)
        if item.kind is PieceKind.REASONING:
            return OutputReasoning(id=id, content=[OutputReasoningText(text=item.text)], status=status)
        return OutputMessage(id=id, status=status, content=[OutputText(text=item.text)])

    def _item_id(self, index: int, item: Piece) -> str:
        prefix = {PieceKind.TEXT: "msg", PieceKind.REASONING: "rs", PieceKind.CALL: "fc"}[item.kind]
        while len(self._ids) <= index:
            self._ids.append(uuid.uuid4().hex)
        return f"{prefix}_{self._ids[index]}"

    # ---------------------------------------------------------------------------------------------------------- stream

    async def frames(self, patience: float, *, one_call: bool) -> AsyncIterator[bytes]:
        """See Writer."""
        try:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response("in_progress", []))
            async for part in read_parts(self.exchange, [self._answer], patience, one_call=one_call):
                if part is None:
                    yield KEEP_ALIVE
                    continue
                self._unsent += part.logprobs
                for piece in part.pieces:
                    for frame in self._piece(piece):
                        yield frame
            whole = await self._whole()
            if whole.output:
                for frame in self._close(whole.output[-1].status):
                    yield frame
            yield self._event(f"response.{whole.status}", response=whole)
        except RedraftError as error:
            failed = self._response("failed", [])
            failed.error = ResponseError(message=describe(error).error.message)
            yield self._event("response.failed", response=failed)
        finally:
            self._keep_the_rest()
            self.exchange.close()

    def _piece(self, piece: Piece) -> list[bytes]:
        """Events for a new piece, either of the current item or of a new one."""
        frames: list[bytes] = []
        last = self._open[-1] if self._open else None
        if last is None or piece.call is not None or last.kind is not piece.kind:
            frames += self._close("completed") if last is not None else []
            self._index, self._open = self._index + 1, []
            frames += self._begin(piece)
        self._open.append(piece)
        place = self._place(piece)
        match piece.kind:
            case PieceKind.TEXT:
                new = choice_logprobs(self._encoder, self._unsent).content
                self._unsent = []
                frames.append(self._event("response.output_text.delta", **place, delta=piece.text, logprobs=new))
            case PieceKind.REASONING:
                frames.append(self._event("response.reasoning_text.delta", **place, delta=piece.text))
            case PieceKind.CALL:
                assert piece.call is not None
                delta = piece.call.arguments
                frames.append(self._event("response.function_call_arguments.delta", **place, delta=delta))
        return frames

    def _begin(self, piece: Piece) -> list[bytes]:
        item = self._item(self._index, piece, "in_progress")
        match item:
            case OutputCall():
                return [self._added(item.model_copy(update={"arguments": ""}))]
            case OutputMessage():
                part: ResponseModel = OutputText(text="")
            case OutputReasoning():
                part = OutputReasoningText(text="")
        added = self._added(item.model_copy(update={"content": []}))
        return [added, self._event("response.content_part.added", **self._place(piece), part=part)]

    def _added(self, item: Output) -> bytes:
        return self._event("response.output_item.added", output_index=self._index, item=item)

    def _close(self, status: Status) -> list[bytes]:
        """Events at the end of the open item."""
        whole = replace(self._open[0], text="".join(piece.text for piece in self._open))
        place, item = self._place(whole), self._item(self._index, whole, status)
        match item:
            case OutputCall():
                arguments = item.arguments
                frames = [
                    self._event("response.function_call_arguments.done", **place, name=item.name, arguments=arguments)
                ]
            case OutputMessage(content=[part]):
                frames = [self._event("response.output_text.done", **place, text=part.text, logprobs=[])]
                frames.append(self._event("response.content_part.done", **place, part=part))
            case _:
                part = item.content[0]
                frames = [self._event("response.reasoning_text.done", **place, text=part.text)]
                frames.append(self._event("response.content_part.done", **place, part=part))
        return [*frames, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _place(self, piece: Piece) -> dict[str, object]:
        """The item and the part of it."""
        place: dict[str, object] = {
            "item_id": self._item_id(self._index, piece),
            "output_index": self._index,
        }
        return place if piece.call is not None else {**place, "content_index": 0}

    def _event(self, kind: str, **fields: object) -> bytes:
        event = _Event.model_validate({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return frame(event.model_dump_json(), kind)


class _Event(ResponseModel, extra="allow"):
    type: str
    sequence_number: int
