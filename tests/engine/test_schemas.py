"""Generated JSON schemas: every answer is valid unless it was cut, and is the masked target's own, whoever proposes."""

from __future__ import annotations

import pytest
from mlx_lm.models.llama import Model
from mlx_lm.utils import load_tokenizer

from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from service.models.text import TextEncoder
from tests.support.eagle_models import tiny_head
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.schemas import complete_answers
from tests.support.tiny_server import write_pair

LONGEST = 160


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return TextEncoder(load_tokenizer(write_pair(tmp_path_factory.mktemp("pair"))[0]))


@pytest.fixture(scope="module")
def target(encoder: TextEncoder) -> Model:
    return tiny_llama(0, vocabulary=encoder.vocabulary)


def drafts_of(target: Model, vocabulary: int) -> dict[str, Draft | None]:
    return {
        "none": None,
        "model": bare(noisy_copy(target, 1, 0.3)),
        "other": bare(tiny_llama(5, vocabulary=vocabulary)),
        "head": bare(tiny_head(target, 1)),
    }


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(CPU, id="CPU"),
        pytest.param(METAL, id="Metal", marks=pytest.mark.nightly),
        pytest.param(CUDA, id="CUDA"),
    ],
)
@pytest.mark.parametrize("count", [5, pytest.param(1000, marks=pytest.mark.nightly)])
def test_every_answer_is_valid_and_the_masked_target_s_own(
    encoder: TextEncoder, target: Model, strategy: Strategy, count: int
) -> None:
    eos = frozenset(encoder.encode_text("</s>"))
    with using(strategy):
        decoders = [
            Decoder(target, draft, vocabulary=encoder.vocabulary, k=4, adaptive=adaptive, lookup=8 if adaptive else 0)
            for draft in drafts_of(target, encoder.vocabulary).values()
            for adaptive in (False, True)
        ]
        found = [
            complete_answers(number, decoders[number % len(decoders)], target, encoder, eos, LONGEST)
            for number in range(count)
        ]
    compiled = [complete for complete in found if complete is not None]
    assert len(compiled) > 0.9 * count and sum(compiled) > 2 * len(compiled)
