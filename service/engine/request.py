"""One request inside the batch: its tokens, its text, when it ends, and what it leaves behind for the recorder."""

from __future__ import annotations

import time
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
    Prompt,
    Provenance,
    Round,
    Source,
    Timings,
)
from service.engine.acceptance import Acceptance
from service.engine.drafters.lookup import NGramIndex
from service.engine.evidence import Evidence
from service.engine.top_logprobs import pack


class Detokenizer(Protocol):
    """mlx-lm's streaming detokenizer."""

    @property
    def text(self) -> str:
        """All text so far that is complete in UTF-8."""
        ...

    def add_token(self, token: int) -> None:
        """Append a token."""
        ...

    def finalize(self) -> None:
        """Add to `text` what was held back; no token follows."""
        ...


class TextStream:
    """Tokens in, complete text out; holds back what may turn out to be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str]) -> None:
        self.detokenizer = detokenizer
        self.stop = stop
        self.sent = 0
        self.end: int | None = None

    def add(self, token: int) -> bool:
        """True when a stop string is complete; what follows it, and it, never become text."""
        self.detokenizer.add_token(token)
        if self.stop:
            text = self.detokenizer.text
            # A new stop string ends in the new text, so it begins no earlier than its own length before what was sent.
            hits = [at for stop in self.stop if (at := text.find(stop, max(0, self.sent - len(stop)))) >= 0]
            self.end = min(hits, default=None)
        return self.end is not None

    def delta(self, final: bool = False) -> str:
        """Text that is certain and was not handed out yet."""
        if final and self.end is None:
            self.detokenizer.finalize()
        text = self.detokenizer.text[: self.end]
        safe = len(text)
        if not final and self.end is None:
            safe -= max((self._overlap(text, stop) for stop in self.stop), default=0)
        out = text[self.sent : safe]
        self.sent = max(self.sent, safe)
        return out

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(slots=True)
class Request:
    """`tokens` is prompt plus output; the last one has not been fed to the target yet."""

    id: str
    prompt: Prompt
    eos: frozenset[int]
    text: TextStream | None
    tokens: list[int] = field(init=False)
    finish: FinishReason | None = None
    reused: int = 0
    """Prompt tokens that did not have to be read."""
    rounds: list[Round] = field(default_factory=list[Round])
    cases: list[FailureCase] = field(default_factory=list[FailureCase])
    evidence: list[tuple[Evidence, int]] = field(default_factory=list[tuple[Evidence, int]])
    ngrams: NGramIndex = field(default_factory=NGramIndex)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0))
    """What the present draft was worth here."""
    draft_failures: int = 0
    """How often the present draft's logits for this row were not finite."""
    draft_again: int = 0
    """Rounds that the row must have had before the draft proposes tokens for it (again)."""
    asked_at: float = field(default_factory=time.perf_counter)
    joined_at: float = 0.0
    """When the prompt had been read and decoding began."""
    first_at: float = 0.0
    last_at: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt.tokens)

    @property
    def output(self) -> list[int]:
        """The tokens emitted so far, as a new list."""
        return self.tokens[len(self.prompt.tokens) :]

    @property
    def emitted(self) -> int:
        """How many tokens have been emitted."""
        return len(self.tokens) - len(self.prompt.tokens)

    def take(self, tokens: Sequence[int], drafted: Sequence[int], source: Source, adapter: int) -> Delta:
        """Append one round's tokens: the accepted ones and the target's own after them. Stops inside the round where the
        request ends; positions behind that count neither as drafted nor as accepted. drafted: the whole proposal. Returns
        what is new."""
        start, accepted, emitted = self.emitted, len(tokens) - 1, 0
        for token in tokens:
            self.tokens.append(token)
            emitted += 1
            # Only what precedes an end of sequence is text.
            stopped = token in self.eos or (self.text is not None and self.text.add(token))
            if stopped:
                self.finish = FinishReason.STOP
            elif start + emitted >= self.prompt.sampling.max_tokens:
                self.finish = FinishReason.LENGTH
            if self.finish:
                break
        tried = min(len(drafted), emitted) if self.finish else len(drafted)
        self.rounds.append(Round(adapter, start, tried, min(accepted, emitted), emitted, source))
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        text = self.text.delta(final=self.finish is not None) if self.text is not None else ""
        return Delta(text, tuple(tokens[:emitted]), tuple(i < accepted for i in range(emitted)))

    def log(self, evidence: Evidence, tokens: Sequence[int], drafted: Sequence[int], tie_margin: float) -> None:
        """Keep the evidence of the newest round, and its failure case where the draft was wrong. tokens, drafted: as in
        `take`."""
        newest, accepted = self.rounds[-1], len(tokens) - 1
        self.evidence.append((evidence, newest.emitted))
        if newest.source is Source.DRAFT and accepted < len(drafted) and newest.emitted == accepted + 1:
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

    def finished(self) -> Finished:
        """The closing event. Waiting and reading the prompt are the prompt's time, as in llama.cpp's timings."""
        used = dict.fromkeys(round.adapter for round in self.rounds if round.drafted and round.source is Source.DRAFT)
        begun = self.joined_at or self.asked_at
        timings = Timings(
            prompt_n=len(self.prompt.tokens),
            prompt_seconds=begun - self.asked_at,
            predicted_n=self.emitted,
            predicted_seconds=max(self.last_at - begun, 0.0),
            draft_n=sum(round.drafted for round in self.rounds),
            draft_n_accepted=sum(round.accepted for round in self.rounds),
            rounds=len(self.rounds),
            adapters=tuple(used),
            cache_n=self.reused,
        )
        return Finished(self.id, self.finish or FinishReason.CANCELLED, tuple(self.output), timings)

    def generation(self, who: Provenance) -> Generation | None:
        """What the log keeps; None when nothing was collected."""
        if not self.evidence:
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
            provenance=who,
            created_at=datetime.now(UTC),
        )


def prompted(rows: Sequence[Request]) -> float:
    """Tokens of prompts that had to be read, for each that may be said."""
    read = sum(len(row.prompt.tokens) - row.reused for row in rows)
    return read / max(sum(row.prompt.sampling.max_tokens for row in rows), 1)
