"""What is asked, what happened, and the events of one request.

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
"""Most likely tokens of which the log keeps the target's probabilities, at every output position."""
LEAST_LOGPROB = -9999.0
"""What a prompt token's log-probability is where the model rules it out, as in vLLM: JSON has no infinity."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: log-probabilities divided by so little overflow float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Filters act on the distribution at T = 1 in mlx-lm's order (top-p, min-p, top-k), then the
    temperature is applied.

    A temperature below GREEDY_BELOW is greedy, and so is top_p 0. top_p 1.0, min_p 0.0 and top_k 0 switch a filter off.
    logit_bias: pairs of a token and what is added to its logit before all else. A seed makes the output a function of (target,
    prompt, sampling, seed) alone, whatever the draft does.

    The penalties change the logits before the filters, by vLLM's definitions: repetition_penalty divides the positive logits of
    tokens that are in the prompt or the output, and multiplies the others; frequency_penalty is subtracted once for each time
    that the output has a token, presence_penalty once if it has it. bad_words: token sequences that are never completed in the
    output.

    min_tokens: no token that ends the answer comes before so many others. ignore_eos: the model's own end tokens end nothing.
    stop_token_ids: other tokens that end the answer. include_stop: the stop string, or the token of stop_token_ids, that ended
    the answer is part of its text.
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
        """Whether the most likely token is taken, without any draw."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0.0

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on how often the text has it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def bends(self, usual: Sampling) -> bool:
        """Whether answers say little of what the target says by itself: their logits are changed in a way that is not `usual`
        for the model, or they go on behind their end."""
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
        """Greedy and seeded rows compare tokens; unseeded sampling uses rejection."""
        return AcceptRule.MATCH if self.greedy or self.seed is not None else AcceptRule.REJECTION


class AcceptRule(StrEnum):
    """MATCH: shared-Gumbel coupling, of which greedy is the noiseless case. REJECTION: Leviathan et al. 2211.17192."""

    MATCH = "match"
    REJECTION = "rejection"


class GrammarKind(StrEnum):
    """What a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be. source: a JSON schema or a list of texts as JSON, a regular expression, or llguidance's dialect
    of Lark. field: its name in the request, for errors."""

    kind: GrammarKind
    source: str
    field: str


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """What an answer had to follow, as it is stored. text: as llguidance takes it. closing: tokens that end the reasoning
    before it, which is free; empty: there is none. opening: the token that begins the reasoning, where the model may do
    without."""

    text: str
    opening: int | None = None
    closing: tuple[int, ...] = ()


class Constraint(Protocol):
    """Which tokens an answer may have, as it grows. Not thread-safe."""

    @property
    def grammar(self) -> AnswerGrammar:
        """What the answer has to follow."""
        ...

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords of its JSON schemas that answers may violate."""
        ...

    @property
    def failed(self) -> bool:
        """The grammar has met a limit on the way: only an end-of-sequence token is allowed any more."""
        ...

    def copy(self) -> Constraint:
        """The same for another answer, from its beginning."""
        ...

    def masks(self, proposed: Sequence[int]) -> list[bytes]:
        """The tokens allowed next, and after each proposed token up to the first that is not allowed or ends the answer: bit i
        of byte b for token 8 b + i, in whole words of 4 bytes."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """The answer has these tokens more."""
        ...

    def forced(self, most: int) -> list[int]:
        """Tokens of the text that must come next, up to so many; none where there is a choice."""
        ...


@dataclass(frozen=True, slots=True)
class HiddenTokens:
    """Tokens that an answer's text leaves out. start, end: texts around a part of the answer in which they are kept, because
    what reads a tool call needs them. Without a start none is kept; without an end that part goes on to the answer's end."""

    ids: frozenset[int] = frozenset()
    start: str = ""
    end: str = ""

    def hides(self, token: int, text: str) -> bool:
        """Whether a token behind this text of the answer is left out."""
        if token not in self.ids:
            return False
        opened = text.rfind(self.start) if self.start else -1
        return opened < 0 or (bool(self.end) and self.end in text[opened:])


NOTHING_HIDDEN = HiddenTokens()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks, after templating: token ids and the tags it came with."""

    tokens: tuple[int, ...]
    sampling: Sampling
    domain: str | None = None
    client: str | None = None
    api_key: str | None = None
    """Name of the key that it came with, to which its client belongs."""
    store: bool = True
    """False: nothing of this request may be written anywhere."""
    bent: bool = False
    """The answer says little of the target (`Sampling.bends`), so that it is not recorded."""
    first_user: str = ""
    """The first user message that is not part of a common opening (api.openings). It names the conversation and decides the
    train / held-out split by its hash (store.log.generations)."""
    kind: str | None = None
    """What this service calls prompts like this one; never from a request, so that no client's `domain` can be mistaken for
    it."""
    logprobs: int | None = None
    """Send the log-probability of every output token, and so many of the most likely tokens with it (TOP_TARGETS at most)."""
    logprob_of_end: bool = False
    """The token that ends the answer counts as one whose log-probability is sent, though it is not part of the text."""
    prompt_logprobs: int | None = None
    """Send the log-probabilities of the prompt's own tokens, and so many of the most likely tokens at each place (TOP_TARGETS
    at most). The prompt is then prefilled whole, whatever is cached of it."""
    constraint: Constraint | None = field(default=None, compare=False)
    """What keeps the answer within a grammar; of this answer alone."""
    num_draft_tokens: int | None = None
    """Tokens proposed for it in a round, at most; 0: none; None: as many as the planner chooses."""
    prediction: tuple[int, ...] = ()
    """What the answer is expected to be, as token ids (OpenAI's predicted outputs). It changes how fast the answer comes, never
    the answer."""
    cache_salt: str = ""
    """Cached prefixes and looked-up outputs are shared by requests of equal salts alone (vLLM's name)."""
    hidden: HiddenTokens = NOTHING_HIDDEN
    """Special tokens that the text of the answer leaves out."""


class Source(StrEnum):
    """Who proposed a round's tokens: the draft model, a look-up in what was said before, the request's own prediction, or a
    grammar that leaves no choice."""

    DRAFT = "draft"
    LOOKUP = "lookup"
    PREDICTION = "prediction"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Round:
    """One row's share of one round: `drafted` tokens proposed by `source` while `adapter` served, the first `accepted` of
    them kept, and one token of the target after them. `start` is the output position of the round's first token. The tokens
    emitted are accepted + 1, or fewer when the request ended inside the round (`emitted`)."""

    adapter: int
    start: int
    drafted: int
    accepted: int
    emitted: int
    source: Source = Source.DRAFT


@dataclass(frozen=True, slots=True)
class FailureCase:
    """The first rejection of one round of the draft: it proposed `drafted`, the target emitted `target`.

    position: index into the output tokens. p, q: probability of `drafted` under target and draft at T = 1. margin: gap
    between the target's two best log-probabilities at T = 1; below the tie threshold the case is numerical noise and `tie`
    is set (kept, not counted)."""

    position: int
    drafted: int
    target: int
    p: float
    q: float
    margin: float
    tie: bool


@dataclass(frozen=True, slots=True)
class Targets:
    """The target's distribution at T = 1 for every output position: the `top` most likely tokens and the rest's mass.

    Little-endian row-major bytes: `ids` uint32 (positions, top); `logprobs` float16 (positions, top), descending;
    `tail` float16 (positions,), log of the mass outside the top (-inf where there is none).
    """

    top: int
    ids: bytes
    logprobs: bytes
    tail: bytes

    @property
    def positions(self) -> int:
        """Output positions that the target's probabilities are stored for."""
        return len(self.tail) // 2


class FinishReason(StrEnum):
    """Why a request ended: STOP: an end-of-sequence token, a stop token or a stop string; LENGTH: max_tokens; CANCELLED:
    given up before its end."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Fingerprints (hex sha256) of what produced a generation. Rows of another target or tokenizer never mix."""

    target: str
    tokenizer: str
    draft: str
    """The bare draft's fingerprint, which an adapter is bound to."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request, as the recorder gets it.

    logprobs: target log-probability of each output token at T = 1. sampled_logprobs: the same after the sampling transform
    (0.0 when greedy). Both have one entry per output token. targets: None when not collected. grammar: what the answer had to
    follow; all probabilities are over the tokens that it allowed. A repetition penalty is in sampled_logprobs alone: logprobs
    and targets are the target's own.
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
    """An output token's log-probability under the target at T = 1, and the most likely tokens (id, log-probability) there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What the target says of a prompt's own tokens at T = 1, but of the first, which nothing comes before. Every other token
    has an entry of `logprobs` (LEAST_LOGPROB at least) and `ranks` (1: it is the most likely one there), and `count` entries of
    `top_ids` and `top_logprobs`, the most likely tokens at its place."""

    tokens: tuple[int, ...]
    logprobs: array[float]
    ranks: array[int]
    top_ids: array[int]
    top_logprobs: array[float]
    count: int

    def __iter__(self) -> Iterator[tuple[int, TokenLogprobs | None]]:
        """Each token, with its rank (0: it has none) and what there is of it; None of the first."""
        yield 0, None
        for i, token in enumerate(self.tokens[1:]):
            mine = slice(i * self.count, (i + 1) * self.count)
            top = tuple(zip(self.top_ids[mine], self.top_logprobs[mine], strict=True))
            yield self.ranks[i], TokenLogprobs(token, self.logprobs[i], top)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, complete in UTF-8, and how it came about: `tokens` emitted, `drafted[i]` true where the draft proposed it.
    logprobs: of the tokens but an end-of-sequence token, where the prompt asked for them. prompt_logprobs: where it asked for
    those, in one event without text before all others."""

    text: str
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """llama.cpp's names. prompt_n: tokens of the prompt, cache_n of them from another request's prefill. draft_n: tokens
    proposed; draft_n_accepted: of those accepted (never more than were emitted). rounds: all of them; draft_rounds: those in
    which something was proposed; accepted_rounds: by j, those of which j tokens were accepted. adapters: the versions that
    drafted for this answer, in order of first use. seconds: wall time; queue_seconds: from its arrival until it was admitted,
    first_token_seconds: until its first token (0: there was none), both part of what is above. predicted_matched,
    predicted_unmatched: tokens of the request's prediction that the answer has and does not have."""

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
        """From admission to the first token, as vLLM has it: one round more than llama.cpp's time of the prompt. 0 without a
        token."""
        return max(self.first_token_seconds - self.queue_seconds, 0.0)

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last, as vLLM has it. 0 without a token."""
        if not self.first_token_seconds:
            return 0.0
        return max(self.prompt_seconds + self.predicted_seconds - self.first_token_seconds, 0.0)

    @property
    def prompt_per_second(self) -> float:
        """Prefilled prompt tokens per second; 0 where no time was measured."""
        return (self.prompt_n - self.cache_n) / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Output tokens per second of decoding; 0 where no time was measured."""
        return self.predicted_n / self.predicted_seconds if self.predicted_seconds > 0 else 0.0

    @classmethod
    def combined(cls, several: Sequence[Timings], per_prompt: int) -> Timings:
        """Those of several answers, so many to each prompt: tokens and rounds are summed, times are of the longest."""
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
    """The request ended with this answer, a cancelled one included. output: all its token ids. stopped_by: the stop string that
    ended it, if one did."""

    id: str
    finish: FinishReason
    output: tuple[int, ...]
    timings: Timings
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer. error: one of this module's error classes."""

    error: RedraftError


Event: TypeAlias = Delta | Finished | Failed
Sink: TypeAlias = Callable[[Event], None]
"""Called on the engine's thread; must return at once and never raise. The last event is always Finished or Failed. To wake
another thread, wait for GenerationService.on_delivered, which comes once for the sinks of all requests."""
