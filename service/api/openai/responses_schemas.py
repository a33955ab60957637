"""What OpenAI's responses route takes and answers, as far as this server serves it.

Source of the shapes: the OpenAI API reference and the types of the `openai` package.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Discriminator, Field, Tag

from service.api.bodies import NEUTRAL, ClientModel, Ignored, NotServed, Unserved, is_neutral
from service.api.openai.answer_schemas import MetricsAnswer, TokenLogprob
from service.api.openai.schemas import JsonFormat, JsonSchema, Metadata, TextFormat, TopK, TopLogprobs
from service.api.parameters import (
    FREE_CALLS,
    MAX_TOOLS,
    PLAIN_FORMAT,
    Effort,
    MinP,
    Name,
    Schema,
    Seed,
    Temperature,
    TopP,
    one_of_them,
)
from service.api.parts import AS_PART, TextPart
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
    """What every item of the input may have."""

    id: Ignored = None
    status: Ignored = None


class MessageItem(InputItem):
    """A message of the input."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Ignored = None


class FunctionCallItem(InputItem):
    """A call that the assistant made before."""

    type: Literal["function_call"]
    call_id: Text
    name: Name
    arguments: Text
    namespace: Unserved = None
    caller: Unserved = None


class FunctionCallOutputItem(InputItem):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts
    name: Ignored = None
    namespace: Unserved = None
    caller: Unserved = None


class ReasoningPart(ClientModel):
    """A part of what the assistant thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(InputItem):
    """What the assistant thought before. Encrypted content cannot be read here and is ignored."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None
    summary: Ignored = None
    encrypted_content: Ignored = None


def _item_type(item: object) -> str | None:
    """The type of an item of the input: a message's need not be said. None: it has no type that could be one."""
    if not isinstance(item, dict):
        return str(getattr(item, "type", "message"))
    kind = cast("dict[str, object]", item).get("type")
    return "message" if is_neutral(kind) else kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
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
    """A tool that may be called. Those without a name are not the client's."""

    type: Text
    name: Name | None = None


class FlatAllowedTools(ClientModel):
    """The model knows these of the tools alone. mode: whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatAllowedTool], Field(max_length=MAX_TOOLS)]


class HostedTool(ClientModel, extra="ignore"):
    """A tool that OpenAI runs itself: accepted and ignored."""

    type: Literal[
        "web_search",
        "web_search_preview",
        "local_shell",
        "shell",
        "custom",
        "apply_patch",
        "image_generation",
        "namespace",
    ]


class ReasoningOptions(ClientModel):
    """effort: passed to the chat template; "none" turns reasoning off where the template can."""

    effort: Effort | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None


class FlatSchemaFormat(JsonSchema):
    """JSON under a schema."""

    type: Literal["json_schema"]
    name: Name
    schema_: Schema = Field(alias="schema")


class TextOptions(ClientModel):
    """How text is written."""

    format: Annotated[TextFormat | JsonFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Ignored = None


class ResponsesRequest(ClientModel):
    """The body of POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra=one_of_them(
            {"text": {"anyOf": [NEUTRAL, {"type": "object", "properties": {"format": PLAIN_FORMAT}}]}},
            {"tool_choice": FREE_CALLS},
        )
    )

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
    tools: (
        Annotated[list[Annotated[FunctionTool | HostedTool, Field(discriminator="type")]], Field(max_length=MAX_TOOLS)]
        | None
    ) = None
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
    truncation: Annotated[Any, NotServed("truncation of the input is not served", default="disabled")] = None
    background: Annotated[Any, NotServed("answers in the background are not served")] = None
    conversation: Annotated[Any, NotServed("stored conversations are not served: send the items themselves")] = None
    context_management: Unserved = None
    max_tool_calls: Unserved = None
    previous_response_id: Annotated[
        Any, NotServed("stored responses (previous_response_id) are not served: send the items themselves")
    ] = None
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
    """What the model thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(ResponseModel):
    """What the model thought, before its message."""

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
    """cached_tokens: those that another request's prefill left."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(ResponseModel):
    """reasoning_tokens: of the reasoning's text, encoded again."""

    reasoning_tokens: int


class ResponsesUsage(ResponseModel):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(ResponseModel):
    """What went wrong."""

    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(ResponseModel):
    """Why an answer is not complete."""

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
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    store: Literal[False] = False
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
