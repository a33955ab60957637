"""What OpenAI's chat and completion routes take and answer, as far as this server serves it.

Source of the shapes: the OpenAI API reference and the types of the `openai` package.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from service.api.compatible import Ignored, Unserved
from service.api.schemas import (
    INTEGRAL,
    MAX_MESSAGES,
    MAX_STOPS,
    Client,
    Flag,
    Number,
    RequestModel,
    ResponseModel,
    StopString,
    Tag,
    Text,
    TimingsAnswer,
    Tokens,
    Whole,
)
from service.core import Grammar, GrammarKind, Timings

MAX_ANSWERS = 8
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 256
MAX_NAME_CHARS = 128

Temperature = Annotated[Number, Field(ge=0, le=10)]
TopP = Annotated[Number, Field(gt=0, le=1)]
TopK = Annotated[Whole, Field(ge=-1, lt=2**31), INTEGRAL]
MinP = Annotated[Number, Field(ge=0, le=1)]
Seed = Annotated[Whole, Field(ge=0), INTEGRAL]
TokenId = Annotated[Whole, Field(ge=0, lt=2**31), INTEGRAL]
DraftTokens = Annotated[Whole, Field(ge=0, le=64), INTEGRAL]
Name = Annotated[Text, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Zero = Annotated[Number, Field(ge=0, le=0)]
One = Annotated[Number, Field(ge=1, le=1)]
Schema = dict[str, Any]
MAX_PROMPTS = 8
MAX_CHOICES = 1024
FilledText = Annotated[Text, Field(min_length=1)]
FilledTokens = Annotated[list[TokenId], Field(min_length=1)]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


OptionalStops = Annotated[
    list[StopString] | None,
    Field(max_length=MAX_STOPS),
    BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString] | None),
]


class Metadata(RequestModel, extra="allow"):
    """Labels of the client's. domain: the kind of traffic."""

    __pydantic_extra__: dict[str, Annotated[Text, Field(max_length=512)]]  # pyright: ignore[reportIncompatibleVariableOverride]
    domain: Tag | None = None


class TextPart(RequestModel):
    """A part of a message's content. Text alone is served."""

    type: Literal["text"]
    text: Text


Content = Text | list[TextPart]


class FunctionCall(RequestModel):
    """A call that the assistant made. arguments: JSON."""

    name: Name
    arguments: Text


class ToolCallTurn(RequestModel):
    """A tool call in an assistant's turn."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall


class Turn(RequestModel):
    """What every turn of a chat may have."""

    name: Text | None = None


class SystemTurn(Turn):
    """What the system says."""

    role: Literal["system", "developer"]
    content: Content


class UserTurn(Turn):
    """What the user says."""

    role: Literal["user"]
    content: Content


class AssistantTurn(Turn):
    """What the assistant said before. reasoning_content: what it thought, for templates that read it."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCallTurn] | None = None
    reasoning_content: Text | None = None
    refusal: Unserved = None
    audio: Unserved = None
    annotations: Unserved = None
    function_call: Unserved = None


class ToolTurn(Turn):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Text


Message = Annotated[SystemTurn | UserTurn | AssistantTurn | ToolTurn, Field(discriminator="role")]


class FunctionDescription(RequestModel):
    """What a function does and takes. parameters: a JSON schema."""

    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: Flag | None = None


class Tool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDescription


class TextFormat(RequestModel):
    """Text as the model writes it."""

    type: Literal["text"]


class JsonFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel, serialize_by_alias=True):
    """A schema that the answer is valid under. strict: whatever it says, the answer is."""

    name: Name
    description: Text | None = None
    schema_: Schema = Field(default_factory=Schema, alias="schema")
    strict: Flag | None = None


class SchemaFormat(RequestModel):
    """JSON under a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
JSON_OBJECT: Schema = {"type": "object"}


class StructuredOutputs(RequestModel):
    """What the answer must be, by vLLM's names; one of them. json: a schema. grammar: in llguidance's dialect of Lark."""

    model_config = ConfigDict(json_schema_extra={"maxProperties": 1})

    json_: Schema | None = Field(default=None, alias="json")
    regex: FilledText | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: FilledText | None = None
    json_object: Literal[True] | None = None

    def grammars(self) -> list[Grammar]:
        """Those that are given."""
        given = {
            "json": (GrammarKind.JSON_SCHEMA, None if self.json_ is None else json.dumps(self.json_)),
            "regex": (GrammarKind.REGEX, self.regex),
            "choice": (GrammarKind.CHOICE, None if self.choice is None else json.dumps(self.choice)),
            "grammar": (GrammarKind.LARK, self.grammar),
            "json_object": (GrammarKind.JSON_SCHEMA, json.dumps(JSON_OBJECT) if self.json_object else None),
        }
        return [
            Grammar(kind, source, f"structured_outputs.{name}")
            for name, (kind, source) in given.items()
            if source is not None
        ]


class NamedFunction(RequestModel):
    """The name of a function."""

    name: Name


class NamedTool(RequestModel):
    """A function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(RequestModel):
    """include_usage: a last chunk with the tokens used."""

    include_usage: Flag | None = None
    include_obfuscation: Unserved = None


class CommonRequest(RequestModel):
    """What the chat and the completion route have in common."""

    model: Text | None = None
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: OptionalStops = None
    n: Annotated[Whole, Field(ge=1, le=MAX_ANSWERS), INTEGRAL] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    num_draft_tokens: DraftTokens | None = None
    store: Flag | None = None
    metadata: Metadata | None = None
    user: Client | None = None
    logit_bias: Unserved = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    repetition_penalty: One | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(CommonRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGRAL] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[Text, Field(min_length=1, max_length=16)] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Unserved = None
    prediction: Unserved = None
    functions: Unserved = None
    function_call: Unserved = None
    web_search_options: Unserved = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    verbosity: Ignored = None


class CompletionRequest(CommonRequest):
    """The body of POST /v1/completions. prompt: a text or token ids, or several of them."""

    prompt: (
        FilledText
        | Annotated[list[FilledText], Field(min_length=1, max_length=MAX_PROMPTS)]
        | FilledTokens
        | Annotated[list[FilledTokens], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGRAL] | None = None
    echo: Unserved = None
    suffix: Unserved = None
    best_of: One | None = None


# ------------------------------------------------------------------------------------------------------------- answers


class PromptTokensDetails(ResponseModel):
    """cached_tokens: those that another request's prefill left."""

    cached_tokens: int


class UsageAnswer(ResponseModel):
    """Tokens; `completion_tokens` of all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, spent: Timings) -> UsageAnswer:
        """As clients see it."""
        return cls(
            prompt_tokens=spent.prompt_n,
            completion_tokens=spent.predicted_n,
            total_tokens=spent.prompt_n + spent.predicted_n,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=spent.cache_n),
        )


class SpeculativeMetrics(ResponseModel):
    """How speculation went, by vLLM's names. mean_acceptance_length: accepted tokens a step with proposals, and one."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class MetricsAnswer(ResponseModel):
    """vLLM's `metrics`; speculative_decoding is null where nothing was proposed."""

    speculative_decoding: SpeculativeMetrics | None

    @classmethod
    def of(cls, spent: Timings) -> MetricsAnswer:
        """As clients see it."""
        if not spent.draft_rounds or not spent.draft_n:
            return cls(speculative_decoding=None)
        speculative = SpeculativeMetrics(
            mean_acceptance_length=1 + spent.draft_n_accepted / spent.draft_rounds,
            draft_acceptance_rate=spent.draft_n_accepted / spent.draft_n,
            num_spec_steps=spent.draft_rounds,
            num_draft_tokens=spent.draft_n,
            num_accepted_draft_tokens=spent.draft_n_accepted,
        )
        return cls(speculative_decoding=speculative)


class LikelyToken(ResponseModel):
    """A token and its log-probability. bytes: what it stands for, where that is not a whole character."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(LikelyToken):
    """An output token with the most likely tokens at its place."""

    top_logprobs: list[LikelyToken]


class ChoiceLogprobs(ResponseModel):
    """Of the tokens of an answer, or of a chunk of it."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCallAnswer(ResponseModel):
    """A call: arguments is a JSON object, as text."""

    name: str
    arguments: str


class ToolCallAnswer(ResponseModel):
    """A tool call. index: its number, in chunks alone."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: FunctionCallAnswer


class MessageAnswer(ResponseModel):
    """The assistant's turn. content: null where there are tool calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


Reason = Literal["stop", "length", "tool_calls"]


class Choice(ResponseModel):
    """One answer."""

    index: int
    message: MessageAnswer
    logprobs: ChoiceLogprobs | None
    finish_reason: Reason


class ChatAnswer(ResponseModel):
    """The JSON answer of the chat route. timings, metrics: of all choices together."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageAnswer
    timings: TimingsAnswer
    metrics: MetricsAnswer


class ChunkDelta(ResponseModel):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChunkChoice(ResponseModel):
    """What is new of one answer."""

    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Reason | None = None


class ChatChunk(ResponseModel):
    """One event of a chat stream. usage: in a last chunk without choices, when asked for. timings, metrics: in the last chunk
    of an answer, of that answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageAnswer | None = None
    timings: TimingsAnswer | None = None
    metrics: MetricsAnswer | None = None


class CompletionLogprobs(ResponseModel):
    """Four lists of one entry a token. text_offset: where it begins in the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(ResponseModel):
    """The JSON answer of the completion route, and a chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None
    timings: TimingsAnswer | None = None
    metrics: MetricsAnswer | None = None


class ModelAnswer(ResponseModel):
    """A name that requests may use. max_model_len: tokens of a prompt and its answer, at most (vLLM's name)."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["redraft"] = "redraft"
    max_model_len: int


class ModelsAnswer(ResponseModel):
    """Every name that requests may use."""

    object: Literal["list"] = "list"
    data: list[ModelAnswer]
