"""Requests, generations, and the events of a request.

Token ids are the target tokenizer's. Times are UTC. Log-probabilities are natural logarithms.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from itertools import zip_longest
from typing import Protocol, TypeAlias

from service.core.errors import RedraftError

TOP_TARGETS = 32
"""Number of most likely tokens whose target probabilities are logged at every output position."""
LEAST_LOGPROB = -9999.0
"""Log-probability of a prompt token that the model rules out, as in vLLM, because JSON has no infinity."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: log-probabilities divided by them overflow float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled. Filters apply to the distribution at T = 1 in mlx-lm's order (top-p, min-p, top-k), then the
    temperature is applied.

    A temperature below GREEDY_BELOW is greedy, and so is top_p 0. top_p 1.0, min_p 0.0 and top_k 0 disable a filter.
    logit_bias: pairs of a token and a value that is added to its logit first. With a seed, the output is a function of (target,
    prompt, sampling, seed) only, whatever the draft proposes.

    The penalties change the logits before the filters, by vLLM's definitions. repetition_penalty divides the positive logits of
    tokens that occur in the prompt or the output, and multiplies the others. frequency_penalty is subtracted once per
    occurrence of a token in the output, presence_penalty once if it occurs at all. bad_words: token sequences that are never
    completed in the output.

    min_tokens: minimum number of tokens before one that ends the answer. ignore_eos: the model's end tokens do not end the
    answer. stop_token_ids: other tokens that end the answer. include_stop: the stop string or stop token that ended the answer
    is part of its text.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, without sampling."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0.0

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on how often it occurs in the text."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def bends(self, usual: Sampling) -> bool:
        """Whether answers misrepresent the target: their logits are changed in a way that is not `usual` for the model, or they
        continue past their end."""
        return bool(
            self.logit_bias
            or self.repetition_penalty not in (1.0, usual.repetition_penalty)
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.min_tokens
            or self.ignore_eos
        )

    @property
    def filtered(self) -> bool:
        """Whether top-p, min-p or top-k removes tokens."""
        return self.top_p < 1.0 or self.min_p > 0.0 or self.top_k > 0

    @property
    def rule(self) -> AcceptRule:
        """Greedy and seeded rows compare tokens; unseeded sampling uses rejection sampling."""
        return AcceptRule.MATCH if self.greedy or self.seed is not None else AcceptRule.REJECTION


class AcceptRule(StrEnum):
    """The accept rule of a row. MATCH: shared-Gumbel coupling, of which greedy is the noiseless case. REJECTION: rejection
    sampling (Leviathan et al., arXiv 2211.17192)."""

    MATCH = "match"
    REJECTION = "rejection"


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A requirement on an answer. source: a JSON schema or a list of texts as JSON, a regular expression, or llguidance's
    dialect of Lark. field: its name in the request, for errors."""

    kind: GrammarKind
    source: str
    field: str


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of an answer, as it is stored. text: in llguidance's form. closing: tokens that end the preceding reasoning,
    which is unconstrained; empty: there is none. opening: the token that begins the reasoning, if the model may skip it."""

    text: str
    opening: int | None = None
    closing: tuple[int, ...] = ()


class Constraint(Protocol):
    """Which tokens an answer may have as it grows. Not thread-safe."""

    @property
    def grammar(self) -> AnswerGrammar:
        """The grammar of the answer."""
        ...

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords of its JSON schemas that answers may violate."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the grammar has hit a limit: only an end-of-sequence token is allowed from then on."""
        ...

    def copy(self) -> Constraint:
        """The same constraint for another answer, from its beginning."""
        ...

    def masks(self, proposed: Sequence[int]) -> list[bytes]:
        """The tokens allowed next, and after each proposed token up to the first that is not allowed or ends the answer: bit i
        of byte b for token 8 b + i, in whole words of 4 bytes."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the answer."""
        ...

    def forced(self, most: int) -> list[int]:
        """Up to `most` tokens of the text that must come next; empty if there is a choice."""
        ...


@dataclass(frozen=True, slots=True)
class HiddenTokens:
    """Tokens that an answer's text omits. start, end: texts around a part of the answer in which they are kept, because tool
    call parsers need them. Without a start none are kept; without an end that part extends to the answer's end."""

    ids: frozenset[int] = frozenset()
    start: str = ""
    end: str = ""

    def hides(self, token: int, text: str) -> bool:
        """Whether a token after this text of the answer is omitted."""
        if token not in self.ids:
            return False
        opened = text.rfind(self.start) if self.start else -1
        return opened < 0 or (bool(self.end) and self.end in text[opened:])


NOTHING_HIDDEN = HiddenTokens()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request after templating: token ids and the tags it came with."""

    tokens: tuple[int, ...]
    sampling: Sampling
    domain: str | None = None
    client: str | None = None
    api_key: str | None = None
    """Name of the key that it came with, to which its client belongs."""
    store: bool = True
    """False: nothing of this request may be written anywhere."""
    bent: bool = False
    """The answer misrepresents the target (`Sampling.bends`), so it is not recorded."""
    first_user: str = ""
    """The first user message that is not part of a common opening (api.openings). It identifies the conversation, and its hash
    decides the train / held-out split (store.log.generations)."""
    kind: str | None = None
    """This service's category for prompts like this one. Never taken from a request, so that a client's `domain` cannot be
    mistaken for it."""
    logprobs: int | None = None
    """Send the log-probability of every output token, with this many of the most likely tokens (at most TOP_TARGETS)."""
    logprob_of_end: bool = False
    """Also send the log-probability of the token that ends the answer, although it is not part of the text."""
    prompt_logprobs: int | None = None
    """Send the log-probabilities of the prompt's tokens, with this many of the most likely tokens per position (at most
    TOP_TARGETS). The prompt is then prefilled completely, ignoring the prefix cache."""
    constraint: Constraint | None = field(default=None, compare=False)
    """Keeps the answer within a grammar. Belongs to this answer only."""
    num_draft_tokens: int | None = None
    """Maximum tokens proposed for it per round; 0: none; None: the planner chooses."""
    prediction: tuple[int, ...] = ()
    """The expected answer as token ids (OpenAI's predicted outputs). It changes the speed of the answer, never its content."""
    cache_salt: str = ""
    """Cached prefixes and looked-up outputs are shared only among requests with equal salts (vLLM's name)."""
    hidden: HiddenTokens = NOTHING_HIDDEN
    """Special tokens that the text of the answer omits."""


class Source(StrEnum):
    """The source of a round's proposal: the draft model, prompt lookup, the request's predicted output, or a grammar that
    forces tokens."""

    DRAFT = "draft"
    LOOKUP = "lookup"
    PREDICTION = "prediction"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Round:
    """One row's share of a round: `drafted` tokens proposed by `source` while `adapter` served, of which the first `accepted`
    were accepted, followed by one token of the target. `start` is the output position of the round's first token. `emitted` is
    accepted + 1, or less if the request ended within the round."""

    adapter: int
    start: int
    drafted: int
    accepted: int
    emitted: int
    source: Source = Source.DRAFT


@dataclass(frozen=True, slots=True)
class FailureCase:
    """The first rejection of one round of the draft: it proposed `drafted`, the target emitted `target`.

    position: index into the output tokens. p, q: probability of `drafted` under target and draft at T = 1. margin: gap between
    the target's two best log-probabilities at T = 1. Below the tie threshold the case is numerical noise and `tie` is set
    (kept, not counted).
    """

    position: int
    drafted: int
    target: int
    p: float
    q: float
    margin: float
    tie: bool


@dataclass(frozen=True, slots=True)
class Targets:
    """The target's distribution at T = 1 for every output position: the `top` most likely tokens and the mass of the rest.

    Little-endian row-major bytes: `ids` uint32 (positions, top); `logprobs` float16 (positions, top), descending; `tail`
    float16 (positions,), log of the mass outside the top (-inf if there is none).
    """

    top: int
    ids: bytes
    logprobs: bytes
    tail: bytes

    @property
    def positions(self) -> int:
        """Output positions for which the target's probabilities are stored."""
        return len(self.tail) // 2


class FinishReason(StrEnum):
    """Why a request ended. STOP: an end-of-sequence token, a stop token or a stop string; LENGTH: max_tokens; CANCELLED:
    cancelled before its end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Fingerprints (hex sha256) of the models behind a generation. Rows of different targets or tokenizers never mix."""

    target: str
    tokenizer: str
    draft: str
    """The base draft's fingerprint, to which an adapter is bound."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request, as the recorder receives it.

    logprobs: target log-probability of each output token at T = 1. sampled_logprobs: the same after the sampling transform (0.0
    when greedy). Both have one entry per output token. targets: None when not collected. grammar: the grammar of the answer;
    all probabilities are over the tokens that it allowed. A repetition penalty affects only sampled_logprobs: logprobs and
    targets are the target's unmodified probabilities.
    """

    id: str
    prompt: Prompt
    output: tuple[int, ...]
    finish: FinishReason
    rounds: tuple[Round, ...]
    cases: tuple[FailureCase, ...]
    logprobs: tuple[float, ...]
    sampled_logprobs: tuple[float, ...]
    targets: Targets | None
    provenance: Provenance
    created_at: datetime
    grammar: AnswerGrammar | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """An output token's log-probability under the target at T = 1, and the most likely tokens (id, log-probability) at its
    position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The target's log-probabilities of a prompt's tokens at T = 1, except the first, which has no predecessor. Every other
    token has an entry in `logprobs` (at least LEAST_LOGPROB) and `ranks` (1: the most likely token), and `count` entries in
    `top_ids` and `top_logprobs`, the most likely tokens at its position."""

    tokens: tuple[int, ...]
    logprobs: array[float]
    ranks: array[int]
    top_ids: array[int]
    top_logprobs: array[float]
    count: int

    def __iter__(self) -> Iterator[tuple[int, TokenLogprobs | None]]:
        """Each token's rank (0: none) and log-probabilities; None for the first token."""
        yield 0, None
        for i, token in enumerate(self.tokens[1:]):
            mine = slice(i * self.count, (i + 1) * self.count)
            top = tuple(zip(self.top_ids[mine], self.top_logprobs[mine], strict=True))
            yield self.ranks[i], TokenLogprobs(token, self.logprobs[i], top)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, complete in UTF-8, with its tokens. drafted[i]: whether tokens[i] was proposed. logprobs: of the tokens except
    an end-of-sequence token, if the prompt asked for them. prompt_logprobs: if requested, in one event without text before all
    others."""

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Token counts and times of a request, under llama.cpp's names.

    prompt_n: tokens of the prompt, cache_n of them from the prefix cache. draft_n: tokens proposed; draft_n_accepted: those
    accepted (never more than were emitted). rounds: all rounds; draft_rounds: those with a proposal; accepted_rounds: by j, the
    number of those that accepted j tokens. adapters: the versions that drafted for this answer, in order of first use. seconds:
    wall time; queue_seconds: from arrival to admission; first_token_seconds: from arrival to the first token (0: there was
    none). The times above include both. predicted_matched, predicted_unmatched: tokens of the request's prediction that the
    answer has and does not have.
    """

    prompt_n: int
    prompt_seconds: float
    predicted_n: int
    predicted_seconds: float
    draft_n: int
    draft_n_accepted: int
    rounds: int
    draft_rounds: int
    adapters: tuple[int, ...]
    cache_n: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    predicted_matched: int = 0
    predicted_unmatched: int = 0
    accepted_rounds: tuple[int, ...] = ()

    @property
    def prefill_seconds(self) -> float:
        """From admission to the first token, as in vLLM: one round more than llama.cpp's prompt time. 0 without a token."""
        return max(self.first_token_seconds - self.queue_seconds, 0.0)

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last, as in vLLM. 0 without a token."""
        if not self.first_token_seconds:
            return 0.0
        return max(self.prompt_seconds + self.predicted_seconds - self.first_token_seconds, 0.0)

    @property
    def prompt_per_second(self) -> float:
        """Prefilled prompt tokens per second; 0 if no time was measured."""
        return (self.prompt_n - self.cache_n) / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Output tokens per second of decoding; 0 if no time was measured."""
        return self.predicted_n / self.predicted_seconds if self.predicted_seconds > 0 else 0.0

    @classmethod
    def combined(cls, several: Sequence[Timings], per_prompt: int) -> Timings:
        """The timings of several answers, `per_prompt` for each prompt: tokens and rounds are summed, times are those of the
        longest."""
        prompts = several[::per_prompt]
        return cls(
            prompt_n=sum(each.prompt_n for each in prompts),
            prompt_seconds=max(each.prompt_seconds for each in several),
            predicted_n=sum(each.predicted_n for each in several),
            predicted_seconds=max(each.predicted_seconds for each in several),
            draft_n=sum(each.draft_n for each in several),
            draft_n_accepted=sum(each.draft_n_accepted for each in several),
            rounds=sum(each.rounds for each in several),
            draft_rounds=sum(each.draft_rounds for each in several),
            adapters=tuple(dict.fromkeys(version for each in several for version in each.adapters)),
            cache_n=sum(each.cache_n for each in prompts),
            queue_seconds=max(each.queue_seconds for each in several),
            first_token_seconds=max(each.first_token_seconds for each in several),
            predicted_matched=sum(each.predicted_matched for each in several),
            predicted_unmatched=sum(each.predicted_unmatched for each in several),
            accepted_rounds=tuple(map(sum, zip_longest(*(each.accepted_rounds for each in several), fillvalue=0))),
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended with this answer, including a cancelled one. output: all its token ids. stopped_by: the stop string
    that ended it, if any."""

    id: str
    finish: FinishReason
    output: tuple[int, ...]
    timings: Timings
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer. error: one of the classes in core.errors."""

    error: RedraftError


Event: TypeAlias = Delta | Finished | Failed
Sink: TypeAlias = Callable[[Event], None]
"""Called on the engine thread; must return at once and never raise. The last event is always Finished or Failed. To wake
another thread, use GenerationService.on_delivered, which is called once for the sinks of all requests."""
