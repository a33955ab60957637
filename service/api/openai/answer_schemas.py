"""Answers of OpenAI's chat and completion routes.

Source of the shapes: the OpenAI API reference and the types of the `openai` package; vLLM's for metrics.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from service.api.schemas import CompletionTokensDetails, ResponseModel, TimingsAnswer
from service.core import Timings


class PromptTokensDetails(ResponseModel):
    """cached_tokens: those found in the prefix cache."""

    cached_tokens: int


class UsageAnswer(ResponseModel):
    """Tokens; `completion_tokens` of all answers together. prompt_tokens_details: absent while an answer is in progress."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(cls, spent: Timings) -> UsageAnswer:
        """In the form shown to clients."""
        usage = cls(
            prompt_tokens=spent.prompt_n,
            completion_tokens=spent.predicted_n,
            total_tokens=spent.prompt_n + spent.predicted_n,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=spent.cache_n),
        )
        if (details := CompletionTokensDetails.of(spent)) is not None:
            usage.completion_tokens_details = details
        return usage

    @classmethod
    def so_far(cls, prompt: int, completion: int) -> UsageAnswer:
        """For an answer in progress."""
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class SpeculativeMetrics(ResponseModel):
    """Speculation statistics, in vLLM's names. mean_acceptance_length: accepted tokens per step with proposals, plus
    one. acceptance_histogram: entry j counts the steps with j accepted tokens; their sum is num_spec_steps."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: list[int]


class MetricsAnswer(ResponseModel):
    """vLLM's `metrics`; speculative_decoding is null if nothing was proposed or this caller may not see it."""

    speculative_decoding: SpeculativeMetrics | None

    @classmethod
    def of(cls, spent: Timings, *, draft_counts: bool) -> MetricsAnswer:
        """In the form shown to clients. draft_counts: see TimingsAnswer."""
        if not draft_counts or not spent.draft_rounds or not spent.draft_n:
            return cls(speculative_decoding=None)
        speculative = SpeculativeMetrics(
            mean_acceptance_length=1 + spent.draft_n_accepted / spent.draft_rounds,
            draft_acceptance_rate=spent.draft_n_accepted / spent.draft_n,
            num_spec_steps=spent.draft_rounds,
            num_draft_tokens=spent.draft_n,
            num_accepted_draft_tokens=spent.draft_n_accepted,
            acceptance_histogram=list(spent.accepted_rounds),
        )
        return cls(speculative_decoding=speculative)


class LikelyToken(ResponseModel):
    """A token and its log-probability. bytes: of its text, if that is not a whole character."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(LikelyToken):
    """An output token with the most likely tokens at its position."""

    top_logprobs: list[LikelyToken]


class ChoiceLogprobs(ResponseModel):
    """For the tokens of an answer, or of a chunk of it."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptTokenLogprob(ResponseModel):
    """A token's log-probability at a position of the prompt, in vLLM's names. rank: 1 for the most likely token there."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens: TypeAlias = list[dict[str, PromptTokenLogprob] | None]
"""For each token of a prompt, by token id: the token itself and the most likely ones at its position; null for the first."""


class FunctionCallAnswer(ResponseModel):
    """A call: arguments is a JSON object, as text."""

    name: str
    arguments: str


class ToolCallAnswer(ResponseModel):
    """A tool call. index: its number, only in chunks."""

    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: FunctionCallAnswer


class MessageAnswer(ResponseModel):
    """The assistant's turn. content: null if there are only tool calls."""

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
    """The JSON answer of the chat route. timings, metrics: for all choices together. prompt_logprobs: if requested."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageAnswer
    timings: TimingsAnswer
    metrics: MetricsAnswer
    prompt_logprobs: PromptTokens | None = None


class ChunkDelta(ResponseModel):
    """The new part."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallAnswer] | None = None


class ChunkChoice(ResponseModel):
    """The new part of one answer."""

    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: Reason | None = None


class ChatChunk(ResponseModel):
    """One event of a chat stream. usage: in a last chunk without choices if requested; on request also in every other
    chunk, for its answer so far. metrics: in an answer's last chunk, for that answer. timings: in the same chunk, or for all
    answers together in the chunk with the requested usage. prompt_logprobs: in the first answer's last chunk if requested."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageAnswer | None = None
    timings: TimingsAnswer | None = None
    metrics: MetricsAnswer | None = None
    prompt_logprobs: PromptTokens | None = None


class CompletionLogprobs(ResponseModel):
    """Four lists with one entry per token; null for the first token of a prompt. text_offset: the token's start in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One answer, or its new part. prompt_logprobs: of its prompt if requested; in a stream at the answer's end."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: PromptTokens | None = None


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
