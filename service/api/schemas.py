"""Requests and responses: every field of a request is bounded."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Any, Literal, cast

from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field

from service.api.bodies import NEUTRAL, NEUTRAL_VALUES, ClientModel
from service.core import AdapterState, FinishReason, RequestState, RunState, Sampling, Timings, Trigger

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TAG_CHARS = 128
MAX_IDS = 1000
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 1024
DEFAULTS = Sampling()


def _whole(value: object) -> object:
    """JSON has one kind of number: 2.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Tag = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_TAG_CHARS, pattern=r"^[^\x00-\x1f\x7f]+$")]
Client = Annotated[str, Field(strict=True, min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A client's name as other servers' routes take it; see compatible.client_tag."""
Whole = Annotated[int, Field(strict=True)]
INTEGRAL = BeforeValidator(_whole)
"""Comes last, so that the schema keeps the bounds."""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Tokens = Annotated[Whole, Field(ge=1, lt=2**53), INTEGRAL]
"""Below 2**53, up to which every JSON library reads integers exactly (RFC 8259, section 6)."""
DraftTokens = Annotated[Whole, Field(ge=0, le=64), INTEGRAL]
StopString = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARS)]


TokenId = Annotated[Whole, Field(ge=0, lt=2**31), INTEGRAL]
StopTokens = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)]
BadWords = Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)]
LeastTokens = Annotated[Whole, Field(ge=0, lt=2**31), INTEGRAL]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
"""Added up; 0: none."""
RepetitionPenalty = Annotated[Number, Field(ge=0.01, le=10)]
"""A factor; 1: none."""


def _finite_or_none(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_list(value: object) -> object:
    """A text as a list with one entry, and a list without absent entries ("" and null). Anything else is unchanged."""
    values = [value] if isinstance(value, str) else value
    return (
        [one for one in cast("list[object]", values) if one not in ("", None)] if isinstance(values, list) else values
    )


def _moment(value: object) -> datetime:
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError("is no moment such as 2026-01-31T12:00:00+00:00") from None


Moment = Annotated[
    AwareDatetime,
    BeforeValidator(_moment, json_schema_input_type=Annotated[str, Field(json_schema_extra={"format": "date-time"})]),
]
"""With an offset from UTC. Pydantic alone would take numbers for seconds since 1970."""
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS)]
GivenStop = Annotated[str, Field(strict=True, max_length=MAX_STOP_CHARS)]
GivenStops = Annotated[list[GivenStop | None], Field(max_length=MAX_STOPS)]
Stops = Annotated[StopStrings, BeforeValidator(as_list, json_schema_input_type=GivenStop | GivenStops)]
"""One string or several; empty ones count as absent."""
Finite = Annotated[float | None, BeforeValidator(_finite_or_none)]
"""JSON has no NaN: a value that is not finite is sent as null."""
Interval = Annotated[list[Finite], Field(min_length=3, max_length=3)]
"""An estimate and the two ends of its 90 % interval."""


class RequestModel(BaseModel):
    """Base of operator requests: unknown fields are refused, because a mistyped selection would erase more. Errors must
    not quote bodies."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class ResponseModel(BaseModel):
    """Base of responses, made from core's values."""

    model_config = ConfigDict(from_attributes=True)


class ChatMessage(ClientModel):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Text


_OF_PROMPT: dict[str, Any] = {
    "required": ["prompt"],
    "properties": {"prompt": {"type": "string", "minLength": 1}, "messages": NEUTRAL},
}
_OF_MESSAGES: dict[str, Any] = {
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "minItems": 1},
        "prompt": NEUTRAL,
        "chat_template": {"enum": [True, *(value for value in NEUTRAL_VALUES if value is not False)]},
    },
}


class GenerateRequest(ClientModel):
    """The body of POST /generate: exactly one of `prompt` and `messages`. A prompt is one user turn, or plain text to
    complete when `chat_template` is false."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_OF_PROMPT, _OF_MESSAGES]})

    prompt: Annotated[Text, Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    chat_template: Flag = True
    max_tokens: Tokens | None = None
    """Maximum tokens of the answer; None: 256, or what the context leaves. `finish_reason` is "length" if it was reached."""
    temperature: Annotated[Number, Field(ge=0, le=10)] = DEFAULTS.temperature
    """0, and anything below 1e-5, is greedy."""
    top_p: Annotated[Number, Field(ge=0, le=1)] = DEFAULTS.top_p
    """0: only the most likely token."""
    top_k: Annotated[Whole, Field(ge=0, lt=2**31), INTEGRAL] = DEFAULTS.top_k
    min_p: Annotated[Number, Field(ge=0, le=1)] = DEFAULTS.min_p
    seed: Annotated[Whole, Field(ge=0), INTEGRAL] | None = None
    stop: Stops | None = None
    """One string or several."""
    repetition_penalty: RepetitionPenalty = DEFAULTS.repetition_penalty
    presence_penalty: Penalty = DEFAULTS.presence_penalty
    frequency_penalty: Penalty = DEFAULTS.frequency_penalty
    bad_words: BadWords | None = None
    """Texts that must not be generated."""
    min_tokens: LeastTokens = DEFAULTS.min_tokens
    """Minimum tokens of the answer."""
    ignore_eos: Flag = DEFAULTS.ignore_eos
    """The model's end token does not end the answer."""
    stop_token_ids: StopTokens | None = None
    """Tokens that end the answer."""
    include_stop_str_in_output: Flag = DEFAULTS.include_stop
    """The stop string or token is part of the text."""
    skip_special_tokens: Flag = True
    """False: special tokens are part of the text."""
    stream: Flag = False
    domain: Tag | None = None
    client: Tag | None = None
    store: Flag = True
    """False: nothing of this request is recorded."""
    return_tokens: Flag = False
    num_draft_tokens: DraftTokens | None = None
    """Maximum draft length; 0: no drafting."""
    prediction: Text | None = None
    """The expected answer, which speeds up generation where it is right."""


class CompletionTokensDetails(ResponseModel):
    """For answers with a prediction: numbers of predicted tokens that the answer contains and does not contain."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int

    @classmethod
    def of(cls, spent: Timings) -> CompletionTokensDetails | None:
        """In the form shown to clients; None without a prediction."""
        if not spent.predicted_matched and not spent.predicted_unmatched:
            return None
        return cls(
            accepted_prediction_tokens=spent.predicted_matched, rejected_prediction_tokens=spent.predicted_unmatched
        )


class Usage(ResponseModel):
    """Tokens, by OpenAI's names."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None


class TimingsAnswer(ResponseModel):
    """Where the time went, in llama.cpp's names; milliseconds of wall time. adapters: versions that drafted for this
    answer, in order of first use. prompt_n: prefilled prompt tokens, without the cache_n found in the prefix cache.
    rounds: speculative rounds. Draft statistics are null or absent if this caller may not see them."""

    prompt_n: int
    cache_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int | None = None
    draft_n_accepted: int | None = None
    rounds: int | None = None
    adapters: list[int]

    @classmethod
    def of(cls, spent: Timings, *, draft_counts: bool) -> TimingsAnswer:
        """In the form shown to clients. draft_counts: include the draft statistics."""
        counts = {"draft_n": spent.draft_n, "draft_n_accepted": spent.draft_n_accepted, "rounds": spent.rounds}
        return cls(
            **(counts if draft_counts else {}),
            prompt_n=spent.prompt_n - spent.cache_n,
            cache_n=spent.cache_n,
            prompt_ms=spent.prompt_seconds * 1000,
            prompt_per_second=spent.prompt_per_second,
            predicted_n=spent.predicted_n,
            predicted_ms=spent.predicted_seconds * 1000,
            predicted_per_second=spent.predicted_per_second,
            adapters=list(spent.adapters),
        )


class Summary(ResponseModel):
    """How a request ended: the last event of a stream, and the JSON answer except its text."""

    id: str
    model: str
    finish_reason: FinishReason
    usage: Usage
    timings: TimingsAnswer
    tokens: list[int] | None = None
    """Ids of the output tokens, if requested."""


class GenerateAnswer(Summary):
    """The JSON answer."""

    text: str


class DeltaAnswer(ResponseModel):
    """One event of a stream. drafted[i]: the draft proposed tokens[i]; absent if this caller may not see it. Both only
    with `return_tokens`."""

    text: str
    tokens: list[int] | None = None
    drafted: list[bool] | None = None


class ProgressAnswer(ResponseModel):
    """Progress of a training run. seconds_left: estimated."""

    step: int
    steps: int
    loss: Finite
    grad_norm: Finite
    tokens_per_second: Finite
    seconds_left: Finite
    paused: str | None = None
    """Why it is paused, if it is."""
    writing: bool = False
    """Whether the target is writing practice text, which step counts and rate then refer to."""


class VerdictAnswer(ResponseModel):
    """The gate's decision and its evidence. gain: relative change of predicted tokens per second over the active
    version, with its 90 % interval; domains: (gain, low, high) of each."""

    promoted: bool
    reason: str
    prompts: int
    tokens: int
    gain: Finite
    low90: Finite
    high90: Finite
    domains: dict[str, Interval]
    measured_on: list[str]
    """Kinds of machines whose measured costs were used."""
    p_value: Finite | None
    """For the hypothesis that the candidate is no better; null if nothing was tested."""
    level: Finite | None
    """Significance level of the test, after what earlier gates have used of the budget."""
    loss_bounded: bool | None
    """Whether the loss against the base draft was proven to be within the tolerance on the golden set and on larger
    domains; null if there is neither."""


class RunAnswer(ResponseModel):
    """A training run."""

    id: int
    state: RunState
    trigger: Trigger
    parent: int
    cases: int
    generations: int
    progress: ProgressAnswer
    adapter: int | None
    verdict: VerdictAnswer | None
    error: str | None
    texts_given_back: bool
    """It ended without a verdict: its texts count as untrained, and the next run may learn from them."""
    created_at: datetime
    finished_at: datetime | None


class RunsAnswer(ResponseModel):
    """Training runs, newest first."""

    runs: list[RunAnswer]


class PracticeRequest(RequestModel):
    """The body of PUT /practice."""

    on: Flag


class MeasuredGainAnswer(ResponseModel):
    """The gain of the serving adapter over the base draft, on answers given since its promotion."""

    answers: int
    """Number of answers scored with both drafts; the adapter learnt from none of them."""
    tokens: int
    """Their output tokens."""
    before: Finite
    """Acceptance length with the base draft: tokens per target call, the target's own token included."""
    after: Finite
    """The same with the adapter."""
    gain: Finite
    """The relative change."""
    low90: Finite
    """Lower end of its two-sided 90 % interval."""
    high90: Finite
    """Upper end of the interval."""
    speed_before: Finite | None
    """Tokens per second of one request with the base draft while drafting; null if round costs are not measured."""
    speed_after: Finite | None
    """The same with the adapter."""
    speed_gain: Interval | None
    """The relative change of speed and its 90 % interval."""
    realised: Finite | None
    """Acceptance length of the rounds that the adapter drafted in these answers; null: too few can be compared."""
    predicted: Finite | None
    """Acceptance length that the scores predict for the same rounds."""
    overstated: bool
    """Whether the engine accepts less than the scores predict, with confidence."""
    summary: str
    """The figures in one line."""


class GainsAnswer(ResponseModel):
    """The gain of the serving adapter, or why there is none yet."""

    adapter: int
    """The serving adapter; 0: the base draft."""
    measured: MeasuredGainAnswer | None
    """Its newest measurement; null: none."""
    measured_at: datetime | None
    """Time of the measurement."""
    reason: str | None
    """Why there is no measurement; null if there is one."""


class LearningAnswer(ResponseModel):
    """Whether a run on logged texts starts automatically, and what its gate would require."""

    waits: str | None
    """Why none started at the last check; null: nothing prevented it, or a run is in progress."""
    refused: int
    """Runs refused by the gate since the last promotion; each doubles the wait, up to 32 times."""
    level: Finite
    """Significance level of the next gate's test; it falls with refusals."""
    level_after_promotion: Finite
    """The level after a promotion."""
    held_out: int
    """Prompts that the next gate could measure on now."""
    held_out_needed: int
    """Prompts required at this level; no run starts before."""
    minutes: Finite
    """Minutes of runs in the last 24 hours."""
    minutes_per_day: Finite
    """The maximum (`training.minutes_per_day`)."""
    expected_gain: Finite
    """Expected relative gain in speed of the next run, from the last verdicts."""
    against_base: dict[str, Interval]
    """Gains of the active adapter over the base draft at its gate, by domain and on the golden set: gain and its 90 %
    interval."""


class PracticeAnswer(ResponseModel):
    """Whether practice starts automatically."""

    on: bool
    fixed: str | None
    """Why this cannot be changed while the server runs; null: it can."""
    waits: str | None
    """Why none started at the last check; null: nothing prevented it, a run is in progress, or practice is off."""


class RequestAnswer(ResponseModel):
    """A current request. waiting_seconds: from its arrival until it joined the batch, or until now. running_seconds:
    since it joined the batch; null: not yet. adapter: the version that served its last round (0: the base draft); null:
    no round yet."""

    id: str
    state: RequestState
    route: str
    prompt_tokens: int
    tokens: int
    """Output tokens so far."""
    waiting_seconds: float
    running_seconds: float | None
    adapter: int | None


class RequestsAnswer(ResponseModel):
    """Current requests, in order of arrival."""

    requests: list[RequestAnswer]


class AdapterAnswer(ResponseModel):
    """An adapter version."""

    id: int
    state: AdapterState
    parent: int
    run: int | None
    rank: int
    scale: float
    keys: list[str]
    draft: str
    sha256: str
    created_at: datetime
    erased_texts: int | None
    """Number of texts erased since that it, or a version it was trained on, learnt from; null: none."""
    learnt_from: int
    """Number of logged texts its run learnt from: new, from the window before them, and replayed."""
    measured_on: list[str]
    """Kinds of machines whose measured costs were used in the gate's verdict."""
    target: str | None
    """Fingerprint of the target it serves with; null: its run is unknown."""


class AdaptersAnswer(ResponseModel):
    """`active`: the version that drafts now; 0 is the base draft."""

    active: int
    adapters: list[AdapterAnswer]


class SwitchAnswer(ResponseModel):
    """The active adapter after a switch; null for the base draft."""

    active: int
    adapter: AdapterAnswer | None


_SELECTING = {"ids": "array", "api_key": "string", "client": "string", "domain": "string", "before": "string"}
_EVERYTHING: dict[str, Any] = {
    "properties": {"everything": {"const": True}, **{name: {"type": "null"} for name in _SELECTING}},
    "required": ["everything"],
}
_SELECTED: list[dict[str, Any]] = [
    {"properties": {"everything": {"const": False}, name: {"type": kind}}, "required": [name]}
    for name, kind in _SELECTING.items()
]


class EraseRequest(RequestModel):
    """The body of DELETE /generations: one or more of `ids`, `api_key`, `client`, `domain` and `before`, all of which
    must match, or `everything`."""

    model_config = ConfigDict(json_schema_extra=cast("dict[str, Any]", {"anyOf": [_EVERYTHING, *_SELECTED]}))

    ids: (
        Annotated[list[Annotated[Text, Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=MAX_IDS)]
        | None
    ) = None
    """Ids of answers, from any route; unknown ones are ignored."""
    api_key: Tag | None = None
    """Name of the API key they were requested with."""
    client: Client | None = None
    domain: Tag | None = None
    before: Moment | None = None
    """Recorded before this moment: ISO 8601, with its offset from UTC."""
    everything: Flag = False
    retire_adapters: Flag = False
    """Adapters that learnt a text erased now or earlier become `revoked`: they never serve again."""


class ErasedAnswer(ResponseModel):
    """Number of deleted generations. adapters: the versions that learnt one of them, or were trained on one that did;
    revoked: those that this call revoked."""

    generations: int
    adapters: list[int]
    revoked: list[int]


class LoginRequest(RequestModel):
    """The body of POST /session."""

    key: Annotated[Text, Field(min_length=1, max_length=512)]


class SessionAnswer(ResponseModel):
    """The caller. role: public, client, local (no key is required) or operator. key: name of the key used, or of the
    key that opened the session; null without. asks_for_key: whether the routes require one."""

    role: str
    key: str | None
    asks_for_key: bool


class LiveAnswer(ResponseModel):
    """The process responds."""

    status: Literal["alive"] = "alive"


class ReadyAnswer(ResponseModel):
    """The engine serves. rows, waiting: running and waiting requests. idle_seconds: since the engine's last progress
    while it has work. adapter: the active version. loaded: the models are in memory; if not, the next request loads
    them."""

    status: Literal["ready"] = "ready"
    rows: int
    waiting: int
    idle_seconds: float
    adapter: int
    draft_failures: int
    loaded: bool
