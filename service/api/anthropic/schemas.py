"""Requests and answers of Anthropic's messages route, as far as this server supports them.

Source of the shapes: the Anthropic API reference and the types of the `anthropic` package.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from service.api.bodies import ClientModel, Ignored, NotServed, Unserved
from service.api.parameters import (
    MAX_TOOLS,
    Effort,
    Name,
    PastArguments,
    Schema,
    Temperature,
    TopP,
)
from service.api.schemas import (
    INTEGRAL,
    MAX_STOPS,
    Client,
    DraftTokens,
    Flag,
    ResponseModel,
    StopString,
    Text,
    TimingsAnswer,
    Tokens,
    Whole,
)


class TextBlock(ClientModel):
    """Text."""

    type: Literal["text"]
    text: Text
    cache_control: Ignored = None
    citations: Ignored = None


class ToolUseBlock(ClientModel):
    """An earlier call of the assistant."""

    type: Literal["tool_use"]
    id: Text
    name: Name
    input: PastArguments = None
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Unserved = None


class ToolResultBlock(ClientModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | list[TextBlock] | None = None
    is_error: Flag | None = None
    cache_control: Ignored = None
    toolset_name: Unserved = None


class ThinkingBlock(ClientModel):
    """Earlier reasoning of the assistant."""

    type: Literal["thinking"]
    thinking: Text
    signature: Ignored = None


class RedactedThinkingBlock(ClientModel):
    """Encrypted reasoning, which cannot be read here; ignored."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class UserTurn(ClientModel):
    """A user message with tool results."""

    role: Literal["user"]
    content: Text | list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]]


class AssistantTurn(ClientModel):
    """An assistant message with reasoning and calls."""

    role: Literal["assistant"]
    content: (
        Text
        | list[Annotated[TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")]]
    )


class SystemTurn(ClientModel):
    """A system message within a conversation."""

    role: Literal["system"]
    content: Text | list[TextBlock]


Message = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class Tool(ClientModel):
    """A client's tool. input_schema: a JSON schema; without one the tool has no parameters."""

    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: Schema | None = None
    strict: Flag | None = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Ignored = None


class ToolChoice(ClientModel):
    """auto, none, or any: one tool must be called."""

    type: Literal["auto", "none", "any"]
    disable_parallel_tool_use: Flag | None = None


class NamedToolChoice(ClientModel):
    """This tool must be called."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: Flag | None = None


class Thinking(ClientModel):
    """Whether the model reasons first, if its chat template supports the choice. Budgets are not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Ignored = None


class SchemaFormat(ClientModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(ClientModel):
    """effort: passed to the chat template. format: of the answer."""

    effort: Effort | None = None
    format: SchemaFormat | None = None


class RequestMetadata(ClientModel):
    """user_id: the client, in logs and counts."""

    user_id: Client | None = None


class CountRequest(ClientModel):
    """The body of POST /v1/messages/count_tokens. output_format: the older name of `output_config.format`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: Text | None = None
    system: Text | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None
    cache_control: Ignored = None
    context_management: Ignored = None
    mcp_servers: Annotated[Any, NotServed("MCP servers are not served: give their tools")] = None


class ThreadCreate(ClientModel):
    """Later requests may continue this one's answer."""

    type: Literal["create"]


class ThreadContinue(ClientModel):
    """The request continues after an earlier answer, whose conversation it does not repeat."""

    type: Literal["continue"]
    previous_message_id: Annotated[Text, Field(min_length=1)]


class ThreadHead(ClientModel):
    """The parts of a thread other than its messages."""

    system: Text | list[TextBlock] | None = None
    tools: list[Tool] | None = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages. max_tokens: lowered to what the context leaves."""

    max_tokens: Tokens
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[Whole, Field(ge=0, lt=2**31), INTEGRAL] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: Flag | None = None
    metadata: RequestMetadata | None = None
    num_draft_tokens: DraftTokens | None = None
    store: Flag | None = None
    thread: Annotated[ThreadCreate | ThreadContinue, Field(discriminator="type")] | None = None
    container: Annotated[Any, NotServed("containers are not served")] = None
    service_tier: Ignored = None
    speed: Ignored = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None


# ------------------------------------------------------------------------------------------------------------- answers


class TextAnswer(ResponseModel):
    """Text."""

    type: Literal["text"] = "text"
    text: str


class ThinkingAnswer(ResponseModel):
    """The model's reasoning. signature: empty, nothing is signed here."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseAnswer(ResponseModel):
    """A tool call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


BlockAnswer = TextAnswer | ThinkingAnswer | ToolUseAnswer
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class UsageAnswer(ResponseModel):
    """Tokens. input_tokens: without those found in the prefix cache (cache_read_input_tokens)."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class MessagesAnswer(ResponseModel):
    """The JSON answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockAnswer]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: UsageAnswer
    timings: TimingsAnswer | None = None


class CountAnswer(ResponseModel):
    """Tokens of the prompt."""

    input_tokens: int
