"""Generations as rows: token ids as little-endian uint32, log-probabilities as float32, the rest as columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from sqlalchemy import Row

from service.core import (
    BARE_DRAFT,
    AnswerGrammar,
    FailureCase,
    FinishReason,
    Generation,
    Prompt,
    Provenance,
    Round,
    Sampling,
    Source,
    Targets,
)
from service.store.times import utc

UNSTORED = {"logit_bias", "presence_penalty", "frequency_penalty", "bad_words", "min_tokens", "ignore_eos"}
"""Of sampling: answers that these have bent are not recorded (`Sampling.bends`)."""
NEWER = {"repetition_penalty", "stop_token_ids", "include_stop"}
"""Of sampling: stored where they say something, since older versions that use the same database know nothing of them."""
_DEFAULTS = asdict(Sampling())


def id_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as they are stored: little-endian uint32."""
    return np.array(tokens, dtype="<u4").tobytes()


def logprob_bytes(logprobs: Sequence[float]) -> bytes:
    """Log-probabilities as they are stored: little-endian float32."""
    return np.array(logprobs, dtype="<f4").tobytes()


def target_bytes(targets: Targets) -> bytes:
    """The target's probabilities as one blob: ids, logprobs and tail in that order, in the formats of core.Targets."""
    return targets.ids + targets.logprobs + targets.tail


def text_key(made: Generation) -> str:
    """Equal (hex sha256) for the same prompt with the same output, made by the same pair while the same adapter served: such
    copies say nothing new. After a promotion a text is a new row, for the new adapter fails elsewhere."""
    prompt, who = id_bytes(made.prompt.tokens), made.provenance
    adapter = made.rounds[-1].adapter if made.rounds else BARE_DRAFT
    digest = hashlib.sha256(f"{who.target} {who.tokenizer} {who.draft} {adapter} {len(prompt)} ".encode())
    digest.update(prompt)
    digest.update(id_bytes(made.output))
    if (grammar := grammar_hash(made)) is not None:
        digest.update(grammar.encode())
    return digest.hexdigest()


def grammar_hash(made: Generation) -> str | None:
    """Hex sha256 of the grammar that the answer had to follow: of its text and, where there are any, of the tokens around the
    reasoning before it."""
    if (grammar := made.grammar) is None:
        return None
    digest = hashlib.sha256(grammar.text.encode())
    if grammar.closing:
        digest.update(f"\0{grammar.opening} {grammar.closing}".encode())
    return digest.hexdigest()


def grammar_values(grammar: AnswerGrammar) -> dict[str, Any]:
    """Columns of a row of grammars, but for its hash."""
    closing = id_bytes(grammar.closing) if grammar.closing else None
    return {"text": grammar.text, "opening": grammar.opening, "closing": closing}


def values_of(made: Generation) -> dict[str, Any]:
    """Columns of a row of generations, but for its split."""
    prompt = id_bytes(made.prompt.tokens)
    return {
        "id": made.id,
        "text_key": text_key(made),
        "grammar": grammar_hash(made),
        "copies": 1,
        "cases": sum(not case.tie for case in made.cases),
        "prompt": prompt,
        "output": id_bytes(made.output),
        "output_tokens": len(made.output),
        "sampling": json.dumps(
            {
                name: value
                for name, value in asdict(made.prompt.sampling).items()
                if name not in UNSTORED and (name not in NEWER or value != _DEFAULTS[name])
            }
        ),
        "domain": made.prompt.domain,
        "client": made.prompt.client,
        "api_key": made.prompt.api_key,
        "first_user": made.prompt.first_user,
        "finish": made.finish.value,
        "rounds": json.dumps([[r.adapter, r.start, r.drafted, r.accepted, r.emitted, r.source] for r in made.rounds]),
        "logprobs": logprob_bytes(made.logprobs),
        "sampled_logprobs": logprob_bytes(made.sampled_logprobs),
        "target": made.provenance.target,
        "tokenizer": made.provenance.tokenizer,
        "draft": made.provenance.draft,
        "prompt_hash": hashlib.sha256(prompt).hexdigest(),
        "created_at": made.created_at,
    }


def generation_of(row: Row[Any], cases: Sequence[FailureCase]) -> Generation:
    """From a row of generations joined with generation_targets and (as `grammar_text`, `opening`, `closing`) grammars."""
    sampling: dict[str, Any] = json.loads(row.sampling)
    for name in ("stop", "stop_token_ids"):
        sampling[name] = tuple(sampling.get(name, ()))
    prompt = Prompt(
        tokens=ids_of(row.prompt),
        sampling=Sampling(**sampling),
        domain=row.domain,
        client=row.client,
        api_key=row.api_key,
        first_user=row.first_user,
    )
    return Generation(
        id=row.id,
        prompt=prompt,
        output=ids_of(row.output),
        finish=FinishReason(row.finish),
        rounds=rounds_of(row.rounds),
        cases=tuple(cases),
        logprobs=_logprobs(row.logprobs),
        sampled_logprobs=_logprobs(row.sampled_logprobs),
        targets=None if row.blob is None else _targets(row.top, row.blob),
        provenance=Provenance(row.target, row.tokenizer, row.draft),
        created_at=utc(row.created_at),
        grammar=_grammar(row),
    )


def _grammar(row: Row[Any]) -> AnswerGrammar | None:
    if row.grammar_text is None:
        return None
    return AnswerGrammar(row.grammar_text, row.opening, ids_of(row.closing) if row.closing else ())


def rounds_of(stored: str) -> tuple[Round, ...]:
    """Rounds from their JSON column. Rows without a source count as the draft's."""
    return tuple(_round(*values) for values in json.loads(stored))


def _round(adapter: int, start: int, drafted: int, accepted: int, emitted: int, source: str = Source.DRAFT) -> Round:
    """Rows written before look-ups name no source."""
    return Round(adapter, start, drafted, accepted, emitted, Source(source))


def case_of(row: Row[Any]) -> FailureCase:
    """A failure case from a row of failure_cases."""
    return FailureCase(row.position, row.drafted, row.target, row.p, row.q, row.margin, row.tie)


def ids_of(blob: bytes) -> tuple[int, ...]:
    """Token ids from a column that holds them."""
    return tuple(np.frombuffer(blob, dtype="<u4").tolist())


def _logprobs(blob: bytes) -> tuple[float, ...]:
    return tuple(np.frombuffer(blob, dtype="<f4").tolist())


def _targets(top: int, blob: bytes) -> Targets:
    positions = len(blob) // (6 * top + 2)
    first, second = 4 * top * positions, 6 * top * positions
    return Targets(top, blob[:first], blob[first:second], blob[second:])
