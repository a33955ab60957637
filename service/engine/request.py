"""A request in the batch: its tokens and text, its stopping conditions, and the generation that is recorded."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from service.core import (
    Delta,
    FailureCase,
    Finished,
    FinishReason,
    Generation,
    NonFiniteLogits,
    Prompt,
    PromptLogprobs,
    Provenance,
    Round,
    Sampling,
    Source,
    Timings,
    TokenLogprobs,
)
from service.engine.acceptance import Acceptance
from service.engine.drafters.lookup import NGramIndex
from service.engine.drafters.prediction import PredictedText
from service.engine.evidence import Evidence
from service.engine.history import TokenCounts
from service.engine.prompt_logprobs import PromptScores
from service.engine.top_logprobs import pack

log = logging.getLogger(__name__)

PADDING_LENGTH = 15
"""Positions that a padding row holds. Together with its newest token, at least as many as a draft step reads from any row."""
PADDING_TEXT = (0,) * (PADDING_LENGTH + 1)


class Detokenizer(Protocol):
    """A streaming detokenizer (models.tokens)."""

    @property
    def text(self) -> str:
        """The text so far, up to the last complete UTF-8 character."""
        ...

    def add_token(self, token: int) -> None:
        """Append a token."""
        ...

    def finalize(self) -> None:
        """Append the remaining incomplete text to `text`. No tokens may follow."""
        ...


class TextStream:
    """Streaming detokenization with stop strings. Text that may be the start of a stop string is held back. include_stop: the
    matched stop string is part of the text."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], *, include_stop: bool = False) -> None:
        self.detokenizer = detokenizer
        self.stop = stop
        self.include_stop = include_stop
        self.stopped_by: str | None = None
        """The stop string that was matched."""
        self.sent = 0
        self.end: int | None = None
        self.finished = False
        self._unchecked: int | None = 0
        """Number of leading characters in which a stop string may not end; None: it may not end anywhere in the text so far."""

    def add(self, token: int, *, checked: bool = True) -> bool:
        """Append a token. Returns True once a stop string is matched; neither the text after it nor, unless included, the
        string itself is part of the text. checked: a stop string may end with this token."""
        if checked and self._unchecked is None:
            self._unchecked = len(self.detokenizer.text)
        self.detokenizer.add_token(token)
        if not checked:
            self._unchecked = None
        return self._stopped()

    def finish(self) -> bool:
        """End the text; nothing is held back any more. Returns True if a stop string is matched, including in text that the
        detokenizer held back."""
        self.finished = True
        if self.end is None:
            self.detokenizer.finalize()
        return self._stopped()

    def _stopped(self) -> bool:
        if self.stop and self.end is None and self._unchecked is not None:
            text, unchecked = self.detokenizer.text, self._unchecked
            # A new match ends in unsent text, so it starts at most its length before the end of the sent text.
            starts = ((max(0, self.sent - len(stop), unchecked - len(stop) + 1), stop) for stop in self.stop)
            found = [(at, stop) for start, stop in starts if (at := text.find(stop, start)) >= 0]
            self.end, self.stopped_by = min(found, default=(None, None))
            if self.end is not None and self.stopped_by is not None and self.include_stop:
                self.end += len(self.stopped_by)
        return self.end is not None

    def delta(self) -> str:
        """The new text that can be sent."""
        text = self.detokenizer.text[: self.end]
        safe = len(text)
        if not self.finished and self.end is None:
            safe -= max((self._overlap(text, stop) for stop in self.stop), default=0)
        out = text[self.sent : safe]
        self.sent = max(self.sent, safe)
        return out

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(slots=True)
class Request:
    """A row of the batch. Times are from `time.perf_counter`, in seconds.

    tokens: prompt and output. The target has processed all but the last.
    """

    id: str
    prompt: Prompt
    eos: frozenset[int]
    text: TextStream | None
    tokens: list[int] = field(init=False)
    finish: FinishReason | None = None
    error: NonFiniteLogits | None = None
    """Why the request ended without an answer."""
    padding: bool = False
    """Whether this is a padding row, which has no output and belongs to no client."""
    cached_tokens: int = 0
    """Prompt tokens that were loaded from the prefix cache."""
    rounds: list[Round] = field(default_factory=list[Round])
    cases: list[FailureCase] = field(default_factory=list[FailureCase])
    evidence: list[tuple[Evidence, int]] = field(default_factory=list[tuple[Evidence, int]])
    """The logged evidence, each with the number of tokens that its round emitted."""
    newest_evidence: Evidence | None = None
    """The evidence of the last round."""
    newest_shown: list[bool] = field(default_factory=list[bool])
    """For each token of the last round: whether it is part of the text."""
    scores: PromptScores | None = None
    """The prompt's log-probabilities, if requested, until they are sent."""
    counts: TokenCounts = field(default_factory=TokenCounts)
    """Token counts of the row, computed as far as a penalty needed them."""
    ngrams: NGramIndex = field(default_factory=NGramIndex)
    predicted: PredictedText | None = field(init=False)
    """Tracks the position of the answer in the client's predicted output."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0))
    """Acceptance of the current draft's proposals in this row."""
    draft_failures: int = 0
    """Rounds in which the current draft's logits for this row were not finite."""
    draft_again: int = 0
    """The index of the row's round from which on the draft proposes tokens for it."""
    arrived_at: float = field(default_factory=time.perf_counter)
    admitted_at: float = field(default_factory=time.perf_counter)
    """When the request first left the queue. The row is created at that time."""
    decode_started_at: float = 0.0
    """When prefill ended and the row joined the batch."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt.tokens)
        self.predicted = PredictedText(self.prompt.prediction) if self.prompt.prediction else None
        if self.prompt.prompt_logprobs is not None:
            self.scores = PromptScores(self.prompt.tokens, self.prompt.prompt_logprobs)

    @property
    def output(self) -> list[int]:
        """The output tokens so far, as a new list."""
        return self.tokens[len(self.prompt.tokens) :]

    @property
    def emitted(self) -> int:
        """The number of output tokens so far."""
        return len(self.tokens) - len(self.prompt.tokens)

    def fail(self) -> None:
        """End the request because the target's logits for its next token are not finite. Nothing is recorded or cached."""
        self.error = NonFiniteLogits(
            f"the model computed logits that are not finite for output token {self.emitted + 1}, so no token can "
            "be chosen; this answer was not recorded"
        )
        self.finish = FinishReason.CANCELLED
        log.error("request %s: non-finite target logits at output token %d", self.id, self.emitted + 1)

    @property
    def unscored(self) -> bool:
        """Whether log-probabilities of the prompt are requested and not computed yet."""
        return self.scores is not None and not self.scores.complete

    def prompt_ended(self) -> None:
        """Called when the prompt has been prefilled. Ends the request if no output is requested, or if the target's logits in
        the prompt are not finite; nothing of it is recorded or cached in that case."""
        if self.scores is not None and self.scores.failed is not None:
            self.error = NonFiniteLogits(
                f"the model computed logits that are not finite for prompt token {self.scores.failed + 1}, so it has no "
                "log-probability"
            )
            self.finish = FinishReason.CANCELLED
            log.error("request %s: non-finite target logits at prompt token %d", self.id, self.scores.failed)
        elif self.prompt.sampling.max_tokens == 0:
            self.finish = FinishReason.LENGTH

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns the prompt's log-probabilities once and drops them. None if they were not requested."""
        scores, self.scores = self.scores, None
        return None if scores is None or self.error is not None else scores.logprobs()

    @property
    def by_history(self) -> bool:
        """Whether the next logits depend on the tokens so far (`history`)."""
        sampling = self.prompt.sampling
        return sampling.penalised or bool(sampling.bad_words) or self.emitted < sampling.min_tokens

    def needs_evidence(self, collect: bool) -> bool:
        """Whether the target's probabilities of the output are needed. collect: log them for rows that may be stored."""
        return self.prompt.logprobs is not None or self._logged(collect)

    def _logged(self, collect: bool) -> bool:
        return collect and self.prompt.store and not self.prompt.bent

    def _ends(self, token: int) -> bool:
        """Whether the answer ends with this token. A completed grammar ends it even with `ignore_eos`."""
        sampling = self.prompt.sampling
        if token in sampling.stop_token_ids:
            return True
        return token in self.eos and (not sampling.ignore_eos or self.prompt.constraint is not None)

    def _is_text(self, token: int) -> bool:
        """Whether an output token is part of the text."""
        if token in self.eos or (
            not self.prompt.sampling.include_stop and token in self.prompt.sampling.stop_token_ids
        ):
            return False
        return self.text is None or not self.prompt.hidden.hides(token, self.text.detokenizer.text)

    def append_round(self, tokens: Sequence[int], drafted: Sequence[int], source: Source, adapter: int) -> Delta:
        """Append the tokens of a round, up to where the request ends. Positions after the end count neither as drafted nor as
        accepted.

        tokens: the accepted tokens and the corrected or bonus token. drafted: the whole proposal. Returns the row's new tokens
        and text.
        """
        start, accepted, emitted = self.emitted, len(tokens) - 1, 0
        self.newest_shown = []
        for token in tokens:
            self.tokens.append(token)
            emitted += 1
            stopped = self._ends(token)
            self.newest_shown.append(self._is_text(token))
            if self.text is not None and self.newest_shown[-1]:
                stopped |= self.text.add(token, checked=start + emitted > self.prompt.sampling.min_tokens)
            if stopped:
                self.finish = FinishReason.STOP
            elif start + emitted >= self.prompt.sampling.max_tokens:
                self.finish = FinishReason.LENGTH
            if self.finish:
                break
        if (constraint := self.prompt.constraint) is not None:
            constraint.advance(tokens[:emitted])
            if constraint.failed:
                # Only the end was allowed: the answer is truncated, not complete.
                self.finish = FinishReason.LENGTH
        if self.finish and self.text is not None and self.text.finish():
            self.finish = FinishReason.STOP
        verified = min(len(drafted), emitted) if self.finish else len(drafted)
        self.rounds.append(Round(adapter, start, verified, min(accepted, emitted), emitted, source))
        self.last_token_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.last_token_at
        text = self.text.delta() if self.text is not None else ""
        return Delta(text, tuple(tokens[:emitted]), tuple(i < accepted for i in range(emitted)))

    def add_evidence(
        self, evidence: Evidence, tokens: Sequence[int], drafted: Sequence[int], tie_margin: float, *, collect: bool
    ) -> None:
        """Add the evidence of the last round. If the row is logged (`collect`), the evidence is stored, with a failure case if
        a draft token was rejected.

        tokens, drafted: as for `append_round`. tie_margin: a case is a tie if the target's two best log-probabilities differ by
        less.
        """
        self.newest_evidence = evidence
        if not self._logged(collect):
            return
        newest, accepted = self.rounds[-1], len(tokens) - 1
        self.evidence.append((evidence, newest.emitted))
        # No failure case where a grammar forbade the token, or where only a penalty kept the target from choosing it.
        forbidden = self.prompt.constraint is not None and evidence.p == 0.0
        if self.prompt.sampling.penalised and accepted < len(drafted):
            forbidden |= int(evidence.top_ids[accepted, 0]) == drafted[accepted]
        rejected = newest.source is Source.DRAFT and accepted < len(drafted) and newest.emitted == accepted + 1
        if rejected and not forbidden:
            top = evidence.top_logprobs[accepted]
            margin = float(top[0] - top[1]) if len(top) > 1 else float("inf")
            self.cases.append(
                FailureCase(
                    position=newest.start + accepted,
                    drafted=drafted[accepted],
                    target=tokens[accepted],
                    p=evidence.p,
                    q=evidence.q,
                    margin=margin,
                    tie=margin < tie_margin,
                )
            )

    def newest_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the last round's tokens that are part of the text, and of the end token if requested. Empty
        unless the prompt asks for them."""
        count, evidence = self.prompt.logprobs, self.newest_evidence
        if count is None or evidence is None:
            return ()
        emitted = self.rounds[-1].emitted
        new = self.tokens[len(self.tokens) - emitted :]
        return tuple(
            TokenLogprobs(
                token,
                float(evidence.logprobs[i]),
                _possible(evidence.top_ids[i, :count].tolist(), evidence.top_logprobs[i, :count].tolist()),
            )
            for i, token in enumerate(new)
            if self.prompt.logprob_of_end or self.newest_shown[i]
        )

    def finished(self) -> Finished:
        """The last event of the request. Its prompt time includes the time in the queue."""
        used = dict.fromkeys(round.adapter for round in self.rounds if round.drafted and round.source is Source.DRAFT)
        accepted = Counter(round.accepted for round in self.rounds if round.drafted)
        decode_started_at = self.decode_started_at or self.arrived_at
        if self.predicted is not None:
            self.predicted.read(self.tokens, len(self.prompt.tokens))
        timings = Timings(
            prompt_n=len(self.prompt.tokens),
            prompt_seconds=decode_started_at - self.arrived_at,
            predicted_n=self.emitted,
            predicted_seconds=max(self.last_token_at - decode_started_at, 0.0),
            draft_n=sum(round.drafted for round in self.rounds),
            draft_n_accepted=sum(round.accepted for round in self.rounds),
            rounds=len(self.rounds),
            draft_rounds=sum(round.drafted > 0 for round in self.rounds),
            adapters=tuple(used),
            cache_n=self.cached_tokens,
            queue_seconds=self.admitted_at - self.arrived_at,
            first_token_seconds=self.first_token_at - self.arrived_at if self.first_token_at else 0.0,
            predicted_matched=0 if self.predicted is None else self.predicted.matched,
            predicted_unmatched=0 if self.predicted is None else self.predicted.unmatched,
            accepted_rounds=tuple(accepted[j] for j in range(max(accepted, default=-1) + 1)),
        )
        stopped_by = self.text.stopped_by if self.text is not None else None
        return Finished(self.id, self.finish or FinishReason.CANCELLED, tuple(self.output), timings, stopped_by)

    def generation(self, provenance: Provenance) -> Generation | None:
        """The generation to record. None if there is no evidence or the request failed. provenance: of the models that produced
        it."""
        if not self.evidence or self.error is not None:
            return None
        return Generation(
            id=self.id,
            prompt=self.prompt,
            output=tuple(self.output),
            finish=self.finish or FinishReason.CANCELLED,
            rounds=tuple(self.rounds),
            cases=tuple(self.cases),
            logprobs=tuple(float(x) for e, n in self.evidence for x in e.logprobs[:n]),
            sampled_logprobs=tuple(float(x) for e, n in self.evidence for x in e.sampled[:n]),
            targets=pack(
                [e.top_ids[:n] for e, n in self.evidence],
                [e.top_logprobs[:n] for e, n in self.evidence],
                [e.tails[:n] for e, n in self.evidence],
            ),
            provenance=provenance,
            created_at=datetime.now(UTC),
            grammar=None if self.prompt.constraint is None else self.prompt.constraint.grammar,
        )


def _possible(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The most likely tokens, without those that a grammar forbids."""
    return tuple((token, value) for token, value in zip(ids, logprobs, strict=True) if value > -float("inf"))


def padding_row(draft_length: int) -> Request:
    """A row that fills unused slots of a batch. The same object may fill several. draft_length: see Batch."""
    prompt = Prompt(PADDING_TEXT, Sampling(), store=False)
    return Request(
        "", prompt, frozenset(), None, finish=FinishReason.LENGTH, padding=True, acceptance=Acceptance(draft_length)
    )


def prefill_ratio(rows: Sequence[Request]) -> float:
    """Prefilled prompt tokens per output token that may follow."""
    prefilled = sum(len(row.prompt.tokens) - row.cached_tokens for row in rows)
    return prefilled / max(sum(row.prompt.sampling.max_tokens for row in rows), 1)
