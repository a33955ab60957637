"""What clients send and get: every field bounded, unknown ones refused."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from service.core import AdapterState, FinishReason, RunState, Sampling, Trigger

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_TAG_CHARS = 128
MAX_MESSAGES = 1024
DEFAULTS = Sampling()

Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Tag = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_TAG_CHARS, pattern=r"^[^\x00-\x1f\x7f]+$")]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
StopString = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARS)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Stops = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed, json_schema_input_type=StopString | list[StopString]),
]
Finite = Annotated[float | None, BeforeValidator(_finite)]
"""JSON has no NaN: a figure that is not finite is sent as null."""


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Answered(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class ChatMessage(Asked):
    role: Literal["system", "user", "assistant"]
    content: Text


class GenerateRequest(Asked):
    """Exactly one of `prompt` and `messages`. A prompt is one user turn, or plain text to go on from when
    `chat_template` is false."""

    prompt: Annotated[Text, Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    chat_template: Flag = True
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    """None: as many as the server gives when not told, or as fit."""
    temperature: Annotated[Number, Field(ge=0, le=10)] = DEFAULTS.temperature
    top_p: Annotated[Number, Field(gt=0, le=1)] = DEFAULTS.top_p
    top_k: Annotated[Whole, Field(ge=0, lt=2**31)] = DEFAULTS.top_k
    min_p: Annotated[Number, Field(ge=0, le=1)] = DEFAULTS.min_p
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] | None = None
    stop: Stops | None = None
    """One string or several."""
    stream: Flag = False
    domain: Tag | None = None
    client: Tag | None = None
    store: Flag = True
    """False: nothing of this request is remembered."""
    return_tokens: Flag = False


class Usage(Answered):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TimingsAnswer(Answered):
    """llama.cpp's names; milliseconds of wall time. `adapters` drafted for this answer, in order of first use. `cache_n`: how
    many of the prompt's tokens were not read anew."""

    prompt_n: int
    cache_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int
    rounds: int
    adapters: list[int]


class Summary(Answered):
    """How a request ended: the last event of a stream, and all of a JSON answer but its text."""

    id: str
    model: str
    finish_reason: FinishReason
    usage: Usage
    timings: TimingsAnswer
    tokens: list[int] | None = None
    """Ids of the output tokens, when asked for."""


class GenerateAnswer(Summary):
    text: str


class DeltaAnswer(Answered):
    """One event of a stream. drafted[i]: the draft proposed tokens[i]. Both only when asked for."""

    text: str
    tokens: list[int] | None = None
    drafted: list[bool] | None = None


class ProgressAnswer(Answered):
    step: int
    steps: int
    loss: Finite
    grad_norm: Finite
    tokens_per_second: Finite
    seconds_left: Finite
    paused: str | None = None
    """Why it waits, if it does."""


class VerdictAnswer(Answered):
    promoted: bool
    reason: str
    prompts: int
    tokens: int
    gain: Finite
    low90: Finite
    high90: Finite
    domains: dict[str, tuple[Finite, Finite, Finite]]


class RunAnswer(Answered):
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
    created_at: datetime
    finished_at: datetime | None


class AdapterAnswer(Answered):
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


class AdaptersAnswer(Answered):
    """`active`: the version that drafts now; 0 is the bare draft."""

    active: int
    adapters: list[AdapterAnswer]


class SwitchAnswer(Answered):
    """What serves after a switch; adapter is null for the bare draft."""

    active: int
    adapter: AdapterAnswer | None


class LiveAnswer(Answered):
    status: Literal["alive"] = "alive"


class ReadyAnswer(Answered):
    status: Literal["ready"] = "ready"
    rows: int
    waiting: int
    idle_seconds: float
    adapter: int
    draft_failures: int
