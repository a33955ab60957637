"""Generated JSON schemas: every answer is valid unless it was cut, and is the masked target's own, whoever proposes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import fastjsonschema
import pytest
from mlx_lm.models.llama import Model
from mlx_lm.utils import load_tokenizer

from service.core import BadRequest, FinishReason, Grammar, GrammarKind, Prompt, Sampling
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from service.models.text import TextEncoder
from tests.support.automaton import masked_alone
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.tiny_server import write_pair

LONGEST = 160
SAMPLINGS = [
    Sampling(max_tokens=LONGEST),
    Sampling(max_tokens=LONGEST, temperature=1.0, seed=11),
    Sampling(max_tokens=LONGEST, temperature=1.0, top_p=0.95),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return TextEncoder(load_tokenizer(write_pair(tmp_path_factory.mktemp("pair"))[0]))


@pytest.fixture(scope="module")
def target(encoder: TextEncoder) -> Model:
    return tiny_llama(0, vocabulary=encoder.vocabulary)


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


def drafts_of(target: Model, vocabulary: int) -> dict[str, Draft | None]:
    return {
        "none": None,
        "model": bare(noisy_copy(target, 1, 0.3)),
        "other": bare(tiny_llama(5, vocabulary=vocabulary)),
    }


@pytest.mark.parametrize("strategy", [CPU, METAL, CUDA], ids=["CPU", "Metal", "CUDA"])
@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.nightly)])
def test_every_answer_is_valid_and_the_masked_target_s_own(
    encoder: TextEncoder, target: Model, strategy: Strategy, count: int
) -> None:
    eos = frozenset(encoder.encode_text("</s>"))
    drafts, complete, compiled = drafts_of(target, encoder.vocabulary), 0, 0
    with using(strategy):
        decoders = [
            Decoder(target, draft, vocabulary=encoder.vocabulary, k=4, adaptive=adaptive, lookup=8 if adaptive else 0)
            for draft in drafts.values()
            for adaptive in (False, True)
        ]
        for number in range(count):
            rng = random.Random(number)
            wanted = schema(rng)
            prompt = encoder.encode_text(f"question {number}: ")
            try:
                constraint = encoder.constraint(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted), "f"), None)
            except BadRequest:
                continue
            compiled += 1
            validate = fastjsonschema.compile(wanted)
            oracle = [masked_alone(target, prompt, sampling, constraint, eos) for sampling in SAMPLINGS[:2]]
            decoder = decoders[number % len(decoders)]
            rows = serve(decoder, [Prompt(prompt, each, constraint=constraint.copy()) for each in SAMPLINGS], eos)
            assert [row.output for row in rows[:2]] == oracle
            for row in rows:
                if row.finish is FinishReason.STOP:
                    complete += 1
                    text = b"".join(map(encoder.token_bytes, row.output[:-1])).decode()
                    validate(json.loads(text))
    assert compiled > 0.9 * count and complete > 2 * compiled


def serve(decoder: Decoder, prompts: Sequence[Prompt], eos: frozenset[int]) -> list[Request]:
    rows = [Request(str(i), prompt, eos, None) for i, prompt in enumerate(prompts)]
    for row in rows:
        decoder.admit(row)
    while decoder.unfinished:
        decoder.round()
    return rows
