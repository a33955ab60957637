"""Generated JSON schemas, and answers under them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import fastjsonschema
import mlx.nn as nn

from service.core import BadRequest, FinishReason, Grammar, GrammarKind, Prompt, Reasoning, Sampling
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.models.text import TextEncoder
from tests.support.automaton import masked_alone

SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=11), Sampling(temperature=1.0, top_p=0.95)]
"""The last without a seed: what it answers is nobody else's."""


def schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose shortest texts are short."""
    kinds = ["string", "enum", "integer", "boolean", "null", "const", "pattern"]
    match rng.choice([*kinds, "object", "array", "anyOf"] if depth else kinds):
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[0-9]{2}-[a-c]+$", "^(ab|cd){1,3}$", "^x?y$"])}
        case "enum":
            return {"enum": rng.sample(["red", "grün", 'a "b"', 5, None, True, "red dish", "\n"], rng.randint(1, 4))}
        case "integer":
            low = rng.randint(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "const":
            return {"const": rng.choice(["only this", 42, [1, 2], {"a": None}])}
        case "object":
            names = rng.sample(["name", "age", "ünï", "a b", "x", "list"], rng.randint(1, 4))
            required = [name for name in names if rng.random() < 0.7]
            properties = {name: schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": schema(rng, depth - 1), "maxItems": rng.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [schema(rng, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def complete_answers(
    number: int, decoder: Decoder, target: nn.Module, encoder: TextEncoder, eos: frozenset[int], longest: int
) -> int | None:
    """Have a batch of a row for each of SAMPLINGS answer under generated schema `number`: how many answers ended by themselves;
    None where the schema was refused. Fails where one is not valid, or not the masked target's own."""
    wanted, prompt = schema(random.Random(number)), encoder.encode_text(f"question {number}: ")
    try:
        constraint = encoder.constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted), "f"), Reasoning.CLOSED)
    except BadRequest:
        return None
    validate, samplings = fastjsonschema.compile(wanted), [replace(each, max_tokens=longest) for each in SAMPLINGS]
    alone = [masked_alone(target, prompt, sampling, constraint, eos) for sampling in samplings[:2]]
    rows = serve(decoder, [Prompt(prompt, each, constraint=constraint.copy()) for each in samplings], eos)
    assert [row.output for row in rows[:2]] == alone
    ended = [row for row in rows if row.finish is FinishReason.STOP]
    for row in ended:
        validate(json.loads(b"".join(map(encoder.token_bytes, row.output[:-1])).decode()))
    return len(ended)


def serve(decoder: Decoder, prompts: Sequence[Prompt], eos: frozenset[int]) -> list[Request]:
    """The finished rows of one batch."""
    rows = [Request(str(i), prompt, eos, None) for i, prompt in enumerate(prompts)]
    for row in rows:
        decoder.admit(row)
    while decoder.unfinished:
        decoder.round()
    return rows
