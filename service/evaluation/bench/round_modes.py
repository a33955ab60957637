"""The kinds of rounds that `redraft bench round` measures, and the prompts of their rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from service.core import BadRequest, Grammar, GrammarKind, Prompt, Sampling

MODES, SAMPLINGS = ("plain", "drafted", "lookup"), ("greedy", "seeded", "sampled")
"""What a mode's `mode` and `sampling` may be."""
PROMPT_TOKENS = 128
"""Prompt tokens of a row; ragged rows have half to one and a half times as many."""
PHRASE_TOKENS = 16
"""Tokens that the prompt of a row repeats for prompt look-up."""
TEMPERATURE = 0.7
"""Of seeded and sampled rows."""
LONG_LIST = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "array",
            "minItems": 200,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 60}, "count": {"type": "integer"}},
                "required": ["name", "count"],
                "additionalProperties": False,
            },
        }
    ),
    "constrained",
)
"""A grammar whose text is too long for a row to reach its end."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of round over so many rows. mode: one of MODES. sampling: one of SAMPLINGS. recording: with evidence for the log.
    ragged: rows of different lengths. constrained: the first row follows a grammar."""

    rows: int
    mode: str
    sampling: str = "greedy"
    recording: bool = True
    ragged: bool = True
    constrained: bool = False

    def __str__(self) -> str:
        words = [self.mode, self.sampling]
        words += [] if self.recording else ["not recorded"]
        words += [] if self.ragged or self.rows == 1 else ["equal lengths"]
        words += ["one within a grammar"] if self.constrained else []
        return ", ".join(words)


KINDS = (
    Mode(1, "plain"),
    Mode(1, "drafted"),
    Mode(1, "lookup"),
    Mode(4, "drafted", recording=False, ragged=False),
    Mode(4, "drafted", "seeded"),
    Mode(4, "drafted", "sampled"),
)
"""What is measured by default."""


def modes(
    rows: Sequence[int] | None = None,
    proposing: Sequence[str] | None = None,
    drawing: Sequence[str] | None = None,
    *,
    recording: bool | None = None,
    ragged: bool | None = None,
    constrained: bool = False,
) -> list[Mode]:
    """KINDS without arguments; with `rows` alone each of KINDS over so many rows; else all combinations, with defaults of
    plain, drafted and lookup; greedy; recording; ragged; 1 row.

    proposing: of MODES. drawing: of SAMPLINGS. constrained: each of these also with a row that follows a grammar. Raises
    BadRequest for other names.
    """
    if constrained:
        free = modes(rows, proposing, drawing, recording=recording, ragged=ragged)
        return [each for mode in free for each in (mode, replace(mode, constrained=True))]
    if proposing is None and drawing is None and recording is None and ragged is None:
        return list(dict.fromkeys(replace(mode, rows=n) for n in rows for mode in KINDS)) if rows else list(KINDS)
    proposing, drawing = proposing or MODES, drawing or ["greedy"]
    for field, names, known in (("modes", proposing, MODES), ("sampling", drawing, SAMPLINGS)):
        for name in names:
            if name not in known:
                raise BadRequest(f"--{field} takes {', '.join(known)}, not {name!r}", field=field)
    return [
        Mode(n, way, draw, recording is not False, ragged is not False)
        for n, way, draw in product(rows or [1], proposing, drawing)
    ]


def prompts_of(mode: Mode, texts: Sequence[Sequence[int]]) -> list[Prompt]:
    """A prompt for each row: its text, repeated to the row's length. Rows of equal lengths have the same text, so that they
    accept equally many tokens."""
    made: list[Prompt] = []
    for i in range(mode.rows):
        text, length = texts[i if mode.ragged else 0], PROMPT_TOKENS
        if mode.mode == "lookup":
            text = text[-PHRASE_TOKENS:]
        if mode.ragged and mode.rows > 1:
            length = PROMPT_TOKENS // 2 + PROMPT_TOKENS * i // (mode.rows - 1)
        sampling = Sampling(
            temperature=0.0 if mode.sampling == "greedy" else TEMPERATURE,
            seed=(i if mode.ragged else 0) if mode.sampling == "seeded" else None,
            max_tokens=1 << 20,
        )
        made.append(Prompt((*text,) * (length // len(text)) + (*text[: length % len(text)],), sampling))
    return made
