"""What OpenAI's chat and completion routes take, as far as this server serves it.

Source of the shapes: the OpenAI API reference and the types of the `openai` package.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from service.api.compatible import Ignored, Unserved, json_grammar
from service.api.parameters import (
    FREE_CALLS,
    MAX_TOOLS,
    NULL,
    PLAIN_FORMAT,
    Effort,
    MinP,
    Name,
    OptionalStops,
    Schema,
    Seed,
    Temperature,
    TopP,
    minus_one_is_none,
    one_of_them,
)
from service.api.schemas import (
    INTEGRAL,
    MAX_MESSAGES,
    BadWords,
    Client,
    DraftTokens,
    Flag,
    LeastTokens,
    Number,
    Penalty,
    RepetitionPenalty,
    RequestModel,
    StopTokens,
    Tag,
    Text,
    TokenId,
    Tokens,
    Whole,
)
from service.core import Grammar, GrammarKind

MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 8
MAX_CHOICES = 1024
MAX_BIASED = 1024

TopK = Annotated[Whole, Field(ge=-1, lt=2**31), INTEGRAL]
TopLogprobs = Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGRAL]
Zero = Annotated[Number, Field(ge=0, le=0)]
One = Annotated[Number, Field(ge=1, le=1)]
UnboundedTokens = Annotated[
    Tokens | None, BeforeValidator(minus_one_is_none, json_schema_input_type=Tokens | Literal[-1] | None)
]
"""-1: as many as fit, as llama.cpp has it."""
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASED, json_schema_extra={"additionalProperties": False}),
]
"""By token id."""
FilledText = Annotated[Text, Field(min_length=1)]
FilledTokens = Annotated[list[TokenId], Field(min_length=1)]


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
    index: Ignored = None


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
    """What the assistant said before. reasoning_content (reasoning, by vLLM): what it thought, for templates that read it."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCallTurn] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
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
    """Any JSON object, or one that is valid under a schema (llama.cpp's shape)."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(default=None, alias="schema")


class JsonSchema(RequestModel, serialize_by_alias=True):
    """A schema that the answer is valid under. strict: whatever it says, the answer is."""

    description: Text | None = None
    strict: Flag | None = None


class OptionalSchema(JsonSchema):
    """See JsonSchema. Without a schema, any JSON."""

    name: Name | None = None
    schema_: Schema = Field(default_factory=Schema, alias="schema")


class SchemaFormat(RequestModel):
    """JSON under a schema."""

    type: Literal["json_schema"]
    json_schema: OptionalSchema


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
        found: list[Grammar] = []
        if self.json_ is not None:
            found.append(json_grammar(self.json_, "structured_outputs.json"))
        if self.regex is not None:
            found.append(Grammar(GrammarKind.REGEX, self.regex, "structured_outputs.regex"))
        if self.choice is not None:
            found.append(Grammar(GrammarKind.CHOICE, json.dumps(self.choice), "structured_outputs.choice"))
        if self.grammar is not None:
            found.append(Grammar(GrammarKind.LARK, self.grammar, "structured_outputs.grammar"))
        if self.json_object:
            found.append(json_grammar(JSON_OBJECT, "structured_outputs.json_object"))
        return found


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
    continuous_usage_stats: Unserved = None


class NeutralFields(RequestModel):
    """Fields of vLLM's and llama.cpp's that are not served: their neutral values alone."""

    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Unserved = None
    include_reasoning: Literal[True] | None = None
    use_beam_search: Unserved = None
    length_penalty: One | None = None
    priority: Zero | None = None
    prompt_logprobs: Unserved = None
    return_token_ids: Unserved = None
    truncate_prompt_tokens: Unserved = None
    prompt_embeds: Unserved = None
    kv_transfer_params: Unserved = None
    cache_prompt: Literal[True] | None = None
    timings_per_token: Unserved = None
    return_progress: Unserved = None
    repeat_penalty: One | None = None
    typical_p: One | None = None
    dry_multiplier: Zero | None = None
    mirostat: Zero | None = None
    n_probs: Zero | None = None


NO_FORMAT = {"response_format": PLAIN_FORMAT}
NO_STRUCTURE = {"structured_outputs": {"anyOf": [NULL, {"type": "object", "additionalProperties": NULL}]}}


class CommonRequest(NeutralFields):
    """What the chat and the completion route have in common."""

    model: Text | None = None
    max_tokens: UnboundedTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: OptionalStops = None
    n: Tokens | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    num_draft_tokens: DraftTokens | None = None
    store: Flag | None = None
    metadata: Metadata | None = None
    user: Client | None = None
    logit_bias: LogitBias | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    bad_words: BadWords | None = None
    min_tokens: LeastTokens | None = None
    ignore_eos: Flag | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: Flag | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(CommonRequest):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=one_of_them(NO_FORMAT, NO_STRUCTURE, {"tool_choice": FREE_CALLS}))

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: UnboundedTokens | None = None
    logprobs: Flag | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
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

    model_config = ConfigDict(json_schema_extra=one_of_them(NO_FORMAT, NO_STRUCTURE))

    prompt: (
        FilledText
        | Annotated[list[FilledText], Field(min_length=1, max_length=MAX_PROMPTS)]
        | FilledTokens
        | Annotated[list[FilledTokens], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: TopLogprobs | None = None
    echo: Unserved = None
    suffix: Unserved = None
    best_of: One | None = None
