"""Requests and answers of OpenAI's responses route, as far as this server supports them.

Source of the shapes: the OpenAI API reference and the types of the `openai` package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag

from service.api.bodies import ClientModel, Ignored, NotServed, Unserved, is_neutral, not_served
from service.api.openai.answer_schemas import MetricsAnswer, TokenLogprob
from service.api.openai.schemas import JsonFormat, JsonSchema, Metadata, TextFormat, TopK, TopLogprobs
from service.api.parameters import (
    MAX_TOOLS,
    Effort,
    MinP,
    Name,
    PastArguments,
    Schema,
    Seed,
    Temperature,
    TopP,
)
from service.api.parts import AS_PART, TextPart, not_served_as
from service.api.schemas import (
    Client,
    DraftTokens,
    Flag,
    ResponseModel,
    Text,
    TimingsAnswer,
    Tokens,
)

# ------------------------------------------------------------------------------------------------------------- request


class InputText(TextPart):
    """A part of a message's content, or of a tool's output."""

    annotations: Ignored = None
    logprobs: Ignored = None


Parts = Text | list[Annotated[InputText, AS_PART]]


class InputItem(ClientModel):
    """Fields common to all input items."""

    id: Ignored = None
    status: Ignored = None


class MessageItem(InputItem):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Ignored = None


class FunctionCallItem(InputItem):
    """An earlier call of the assistant."""

    type: Literal["function_call"]
    call_id: Text
    name: Name
    arguments: PastArguments = None
    namespace: Unserved = None
    caller: Unserved = None


class FunctionCallOutputItem(InputItem):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts
    name: Ignored = None
    namespace: Unserved = None
    caller: Unserved = None


class ReasoningPart(ClientModel):
    """A part of earlier reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(InputItem):
    """Earlier reasoning of the assistant. Encrypted content cannot be read here and is ignored."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: Ignored = None
    encrypted_content: Ignored = None


class Reference(ClientModel):
    """An item of an earlier response, by its id."""

    id: Annotated[Text, Field(min_length=1)]


class ItemReference(Reference):
    """A reference with an explicit type."""

    type: Literal["item_reference"]


class UntypedReference(Reference):
    """A reference without a type: an item with neither role nor content."""

    model_config = ConfigDict(json_schema_extra={"not": {"anyOf": [{"required": ["role"]}, {"required": ["content"]}]}})

    type: None = None


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_PARTS = r"^(input_|output_)?(text|image|image_url|audio|video|video_url|file|document)$|^refusal$"


def _hosted(kind: str) -> str:
    if re.search(_PARTS, kind):
        raise not_served(not_served_as(kind, "input"))
    return kind


def _other(schema: dict[str, Any], names: Sequence[str], pattern: str | None = None) -> None:
    """The OpenAPI schema of a type other than these."""
    schema["minLength"] = 1
    schema["not"] = {"anyOf": [{"enum": list(names)}, *([{"pattern": pattern}] if pattern else [])]}


class HostedItem(ClientModel, extra="ignore"):
    """An item of any other type, such as a call of a tool hosted by OpenAI: accepted and ignored. Message parts outside
    a message are not accepted."""

    type: Annotated[
        Text, AfterValidator(_hosted), Field(json_schema_extra=lambda schema: _other(schema, ITEM_TYPES, _PARTS))
    ]


def _item_type(item: object) -> str | None:
    """The tag of an input item; messages and references may omit their type. None: its type is invalid."""
    if not isinstance(item, dict):
        return "untyped" if isinstance(item, UntypedReference) else _tag(str(getattr(item, "type", "message")))
    fields = cast("dict[str, object]", item)
    kind = fields.get("type")
    if is_neutral(kind):
        return "message" if "id" not in fields or "role" in fields or "content" in fields else "untyped"
    return _tag(kind) if isinstance(kind, str) else None


def _tag(kind: str) -> str:
    return kind if kind in ITEM_TYPES else "hosted"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[UntypedReference, Tag("untyped")]
    | Annotated[HostedItem, Tag("hosted")],
    Discriminator(_item_type),
]


class FunctionTool(ClientModel):
    """A function that the model may call. parameters: a JSON schema."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: Flag | None = None
    output_schema: Ignored = None
    defer_loading: Ignored = None


class FlatNamedTool(ClientModel):
    """A function that must be called."""

    type: Literal["function"]
    name: Name


class FlatAllowedTool(ClientModel):
    """A tool that may be called. Those without a name are hosted tools."""

    type: Text
    name: Name | None = None


class FlatAllowedTools(ClientModel):
    """The model is shown only these tools. mode: whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatAllowedTool], Field(max_length=MAX_TOOLS)]


class HostedTool(ClientModel, extra="ignore"):
    """A tool of any other type, such as one hosted by OpenAI: accepted and ignored."""

    type: Annotated[Text, Field(min_length=1, json_schema_extra=lambda schema: _other(schema, ["function"]))]


def _tool_type(tool: object) -> str | None:
    """The tag of a tool. None: its type is invalid."""
    kind = cast("dict[str, object]", tool).get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if not isinstance(kind, str):
        return None
    return "function" if kind == "function" else "hosted"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[HostedTool, Tag("hosted")], Discriminator(_tool_type)
]


class ReasoningOptions(ClientModel):
    """effort: passed to the chat template; "none" turns reasoning off if the template supports it."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None


class FlatSchemaFormat(JsonSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: Schema = Field(alias="schema")


class TextOptions(ClientModel):
    """Options for text output."""

    format: Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Ignored = None


class ResponsesRequest(ClientModel):
    """The body of POST /v1/responses."""

    input: Text | Annotated[list[Item], Field(min_length=1)]
    model: Text | None = None
    instructions: Text | None = None
    max_output_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["auto", "none", "required"]
        | Annotated[FlatNamedTool | FlatAllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: Flag | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: Flag | None = None
    num_draft_tokens: DraftTokens | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Flag | None = None
    metadata: Metadata | None = None
    user: Client | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: Text | None = None
    background: Annotated[Any, NotServed("answers in the background are not served")] = None
    conversation: Annotated[Any, NotServed("stored conversations are not served: send the items themselves")] = None
    context_management: Unserved = None
    max_tool_calls: Unserved = None
    prompt: Annotated[Any, NotServed("stored prompts are not served")] = None
    stream_options: Ignored = None
    include: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    client_metadata: Ignored = None


# -------------------------------------------------------------------------------------------------------------- answer


class OutputText(ResponseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = Field(default_factory=list[None])
    logprobs: list[TokenLogprob] | None = None


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(ResponseModel):
    """A message of the answer."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputReasoningText(ResponseModel):
    """The model's reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(ResponseModel):
    """The model's reasoning, before its message."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[None] = Field(default_factory=list[None])
    content: list[OutputReasoningText]
    status: Status


class OutputCall(ResponseModel):
    """A function call of the answer."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


Output = OutputMessage | OutputReasoning | OutputCall


class InputDetails(ResponseModel):
    """cached_tokens: those found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(ResponseModel):
    """reasoning_tokens: number of tokens of the reasoning text, encoded again."""

    reasoning_tokens: int


class ResponsesUsage(ResponseModel):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(ResponseModel):
    """The error of a failed response."""

    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(ResponseModel):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesAnswer(ResponseModel):
    """The JSON answer; events of a stream carry it as `response`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    model: str
    output: list[Output]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["auto", "none", "required"] | FlatNamedTool | FlatAllowedTools
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None
    timings: TimingsAnswer | None = None
    metrics: MetricsAnswer | None = None


class DeletedResponse(ResponseModel):
    """A dropped response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
