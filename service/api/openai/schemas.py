"""Requests to OpenAI's chat and completion routes, as far as this server supports them.

Source of the shapes: the OpenAI API reference and the types of the `openai` package.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from service.api.bodies import NEUTRAL, ClientModel, Ignored, NotServed, Unserved, not_served
from service.api.compatible import json_grammar
from service.api.parameters import (
    FREE_CALLS,
    MAX_TOOLS,
    PLAIN_FORMAT,
    Effort,
    MinP,
    Name,
    OptionalStops,
    PastArguments,
    Schema,
    Seed,
    Temperature,
    TopP,
    minus_one_is_none,
    one_of_them,
)
from service.api.parts import Part, not_served_as
from service.api.schemas import (
    INTEGRAL,
    BadWords,
    Client,
    DraftTokens,
    Flag,
    LeastTokens,
    Number,
    Penalty,
    RepetitionPenalty,
    StopTokens,
    Tag,
    Text,
    TokenId,
    Tokens,
    Whole,
)
from service.core import Grammar, GrammarKind

MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 2**15
MAX_BIASED = 1024

TopK = Annotated[Whole, Field(ge=-1, lt=2**31), INTEGRAL]
TopLogprobs = Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS), INTEGRAL]
Zero = Annotated[Any, NotServed()]
One = Annotated[Any, NotServed(default=1)]
OnlyTrue = Annotated[Any, NotServed(default=True)]
UnboundedTokens = Annotated[
    Tokens | None, BeforeValidator(minus_one_is_none, json_schema_input_type=Tokens | Literal[-1] | None)
]
"""-1: up to the context length, as in llama.cpp."""
NoneOrMoreTokens = Annotated[
    Tokens | Literal[0] | None,
    BeforeValidator(minus_one_is_none, json_schema_input_type=Tokens | Literal[0, -1] | None),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[Number, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASED, json_schema_extra={"additionalProperties": False}),
]
"""By token id."""
FilledText = Annotated[Text, Field(min_length=1)]
FilledTokens = Annotated[list[TokenId], Field(min_length=1)]


class Metadata(ClientModel):
    """The client's labels. domain: the kind of traffic."""

    extras_are_labels = True

    domain: Tag | None = None


Content = Text | list[Part]


class FunctionCall(ClientModel):
    """A call by the assistant."""

    name: Name
    arguments: PastArguments = None


class ToolCallTurn(ClientModel):
    """A tool call in an assistant's turn."""

    id: Text
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored = None


class Turn(ClientModel):
    """Fields common to all turns of a chat."""

    name: Text | None = None
    images: Annotated[Any, NotServed("images are not served")] = None
    videos: Annotated[Any, NotServed("videos are not served")] = None
    files: Annotated[Any, NotServed("files are not served")] = None


class SystemTurn(Turn):
    """A system message."""

    role: Literal["system", "developer"]
    content: Content


class UserTurn(Turn):
    """A user message."""

    role: Literal["user"]
    content: Content


class AssistantTurn(Turn):
    """An earlier assistant message. reasoning_content (vLLM: reasoning): its reasoning, for templates that read it.
    refusal: replaces `content`."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCallTurn] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    refusal: Text | None = None
    audio: Annotated[Any, NotServed("audio is not served")] = None
    function_call: Annotated[Any, NotServed("function_call is not served: give tool_calls")] = None


class ToolTurn(Turn):
    """The result of a function call; empty without content."""

    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: Text


Message = Annotated[SystemTurn | UserTurn | AssistantTurn | ToolTurn, Field(discriminator="role")]


class FunctionDescription(ClientModel):
    """The description of a function. parameters: a JSON schema."""

    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: Flag | None = None


class Tool(ClientModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDescription


class TextFormat(ClientModel):
    """Unconstrained text."""

    type: Literal["text"]


class JsonFormat(ClientModel):
    """Any JSON object, or one that matches a schema (llama.cpp's shape)."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(default=None, alias="schema")


class JsonSchema(ClientModel, serialize_by_alias=True):
    """A schema that the answer must match. The answer always matches, whatever `strict` says."""

    description: Text | None = None
    strict: Flag | None = None


class OptionalSchema(JsonSchema):
    """See JsonSchema. Without a schema, any JSON."""

    name: Name | None = None
    schema_: Schema = Field(default_factory=Schema, alias="schema")


class SchemaFormat(ClientModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: OptionalSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]
JSON_OBJECT: Schema = {"type": "object"}


_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(ClientModel):
    """A constraint on the answer, in vLLM's names; exactly one. json: a schema. grammar: in llguidance's dialect of Lark."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {other: {"type": "null"} for other in _STRUCTURES if other != name}}
                for name in _STRUCTURES
            ]
        }
    )

    json_: Schema | None = Field(default=None, alias="json")
    regex: FilledText | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: FilledText | None = None
    json_object: Literal[True] | None = None

    def grammars(self) -> list[Grammar]:
        """The given constraints."""
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


class NamedFunction(ClientModel):
    """The name of a function."""

    name: Name


class NamedTool(ClientModel):
    """A function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunction(ClientModel):
    """A function that may be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(ClientModel):
    """The functions that may be called, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Field(max_length=MAX_TOOLS)]


class AllowedTools(ClientModel):
    """The model is shown only these tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class Thinking(ClientModel):
    """Whether the model reasons first, if its chat template supports the choice. Budgets are not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None


class Predicted(ClientModel):
    """The expected answer, which speeds up generation where it is right."""

    type: Literal["content"] = "content"
    content: Content


class StreamOptions(ClientModel):
    """include_usage: adds a last chunk with the token usage. continuous_usage_stats: with include_usage, every chunk
    contains its answer's usage so far."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Ignored = None

    @property
    def continuous(self) -> bool:
        """Whether every chunk includes the usage."""
        return bool(self.include_usage and self.continuous_usage_stats)


_STRUCTURED = "grammars by this name are not served: give structured_outputs or response_format"


def _text_alone(value: object) -> object:
    if isinstance(value, str) and value != "text":
        raise not_served(not_served_as(value, "modalities"))
    return value


Modality = Annotated[Literal["text"], BeforeValidator(_text_alone, json_schema_input_type=Literal["text"])]


class NeutralFields(ClientModel):
    """Unsupported fields of vLLM and llama.cpp. Those that would change the answer only accept neutral values."""

    guided_json: Annotated[Any, NotServed(_STRUCTURED)] = None
    guided_regex: Annotated[Any, NotServed(_STRUCTURED)] = None
    guided_choice: Annotated[Any, NotServed(_STRUCTURED)] = None
    guided_grammar: Annotated[Any, NotServed(_STRUCTURED)] = None
    grammar: Annotated[Any, NotServed(_STRUCTURED)] = None
    json_schema: Annotated[Any, NotServed(_STRUCTURED)] = None
    allowed_token_ids: Unserved = None
    logits_processors: Unserved = None
    response_prefix: Unserved = None

    spaces_between_special_tokens: OnlyTrue = None
    include_reasoning: OnlyTrue = None
    use_beam_search: Unserved = None
    length_penalty: One = None
    priority: Ignored = None
    return_token_ids: Unserved = None
    truncate_prompt_tokens: Unserved = None
    prompt_embeds: Unserved = None
    kv_transfer_params: Unserved = None
    cache_prompt: Ignored = None
    timings_per_token: Unserved = None
    return_progress: Unserved = None
    repeat_penalty: One = None
    typical_p: One = None
    dry_multiplier: Zero = None
    mirostat: Zero = None
    n_probs: Zero = None


BOTH_ENDS: dict[str, Any] = {
    "required": ["add_generation_prompt", "continue_final_message"],
    "properties": {"add_generation_prompt": {"const": True}, "continue_final_message": {"const": True}},
}
"""For the OpenAPI document: two mutually exclusive fields."""
NO_FORMAT = {"response_format": PLAIN_FORMAT}
NO_STRUCTURE = {"structured_outputs": {"anyOf": [NEUTRAL, {"type": "object", "additionalProperties": NEUTRAL}]}}


class CommonRequest(NeutralFields):
    """Fields common to the chat and completion routes."""

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
    skip_special_tokens: Flag | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: TopLogprobs | None = None


class ChatRequest(CommonRequest):
    """The body of POST /v1/chat/completions. add_generation_prompt: false leaves the assistant's turn unopened.
    continue_final_message: the answer continues the last message."""

    model_config = ConfigDict(
        json_schema_extra=one_of_them(NO_STRUCTURE, {**NO_FORMAT, "tool_choice": FREE_CALLS}) | {"not": BOTH_ENDS}
    )

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: UnboundedTokens | None = None
    logprobs: Flag | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["auto", "none", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: Flag | None = None
    thinking: Thinking | None = None
    modalities: list[Modality] | None = None
    audio: Annotated[Any, NotServed("audio is not served")] = None
    prediction: Predicted | None = None
    functions: Annotated[Any, NotServed("functions are not served: give tools")] = None
    function_call: Annotated[Any, NotServed("function_call is not served: give tool_choice")] = None
    web_search_options: Annotated[Any, NotServed("web search is not served")] = None
    documents: Annotated[Any, NotServed("documents are not served")] = None
    chat_template: Annotated[Any, NotServed("templates of a request's own are not served")] = None
    echo: Unserved = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    verbosity: Ignored = None


class CompletionRequest(CommonRequest):
    """The body of POST /v1/completions. prompt: a text or token ids, or several of them. max_tokens: 0 generates
    nothing. echo: the prompt precedes the answer, with `logprobs` for its tokens too. A request with echo or
    prompt_logprobs is recorded only with `store`."""

    model_config = ConfigDict(json_schema_extra=one_of_them(NO_FORMAT, NO_STRUCTURE))

    prompt: (
        FilledText
        | Annotated[list[FilledText], Field(min_length=1)]
        | FilledTokens
        | Annotated[list[FilledTokens], Field(min_length=1)]
    )
    max_tokens: NoneOrMoreTokens | None = None
    logprobs: TopLogprobs | None = None
    echo: Flag | None = None
    add_generation_prompt: OnlyTrue = None
    continue_final_message: Unserved = None
    suffix: Annotated[Any, NotServed("text behind the answer (suffix) is not served")] = None
    best_of: One = None
