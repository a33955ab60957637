"""What OpenAI's chat and completion routes answer.

Source of the shapes: the OpenAI API reference and the types of the `openai` package; vLLM's for metrics.
"""

from __future__ import annotations

from typing import Literal

from service.api.schemas import CompletionTokensDetails, ResponseModel, TimingsAnswer
from service.core import Timings


class PromptTokensDetails(ResponseModel):
    """cached_tokens: those that another request's prefill left."""

    cached_tokens: int


class UsageAnswer(ResponseModel):
    """Tokens; `completion_tokens` of all answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(cls, spent: Timings) -> UsageAnswer:
        """As clients see it."""
        usage = cls(
            prompt_tokens=spent.prompt_n,
            completion_tokens=spent.predicted_n,
            total_tokens=spent.prompt_n + spent.predicted_n,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=spent.cache_n),
        )
        if (details := CompletionTokensDetails.of(spent)) is not None:
            usage.completion_tokens_details = details
        return usage


class SpeculativeMetrics(ResponseModel):
    """How speculation went, by vLLM's names. mean_acceptance_length: accepted tokens a step with proposals, and one."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int


class MetricsAnswer(ResponseModel):
    """vLLM's `metrics`; speculative_decoding is null where nothing was proposed, or where it is not for this caller."""

    speculative_decoding: SpeculativeMetrics | None

    @classmethod
    def of(cls, spent: Timings, *, draft_counts: bool) -> MetricsAnswer:
        """As clients see it. draft_counts: see TimingsAnswer."""
        if not draft_counts or not spent.draft_rounds or not spent.draft_n:
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
