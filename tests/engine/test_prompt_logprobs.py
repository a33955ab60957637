"""Log-probabilities of prompts: those of the target alone on mlx-lm's own cache, whatever is batched, cached or drafted."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from service.core import LEAST_LOGPROB, Prompt, PromptLogprobs, Sampling
from service.engine import prompt_logprobs
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.kv.prefix import PrefixCache
from service.engine.prompt_logprobs import PromptScores, score_chunk, tokens_at_once
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, using
from tests.support.batches import admit
from tests.support.cuda import IN_PAGES
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.families import IDENTICAL, RECURRENT, V, build, noisy_draft
from tests.support.oracle import forced, noisy_copy, read, tiny_llama

CHUNK, TOP, EOS = 32, 5, frozenset({3})
LENGTHS = (1, 2, 21, 22, 70, 20, 131)


@pytest.fixture(params=[CPU, METAL, CUDA, IN_PAGES], ids=["CPU", "Metal", "CUDA", "pages"])
def way(request: pytest.FixtureRequest) -> Generator[None]:
    with using(request.param):
        yield


def texts_of(lengths: Sequence[int], shared: int = 0) -> list[tuple[int, ...]]:
    """Random texts, the first `shared` tokens of which are the same."""
    rng = random.Random(7)
    begin = [rng.randrange(4, V) for _ in range(shared)]
    return [tuple((begin + [rng.randrange(4, V) for _ in range(length)])[:length]) for length in lengths]


def naive_logprobs(target: nn.Module, text: Sequence[int]) -> np.ndarray:
    """(n - 1, V) of what follows each token but the last."""
    logits = read(target, text, make_prompt_cache(target))[:-1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)) if len(text) > 1 else np.zeros((0, V))


def assert_scored(target: nn.Module, text: Sequence[int], found: PromptLogprobs | None, count: int = TOP) -> None:
    assert found is not None
    expected, (first, *rest) = naive_logprobs(target, text), list(found)
    assert first == (0, None) and found.tokens == tuple(text) and len(rest) == len(text) - 1
    for row, token, (rank, each) in zip(expected, text[1:], rest, strict=True):
        assert each is not None and each.token == token and each.logprob == pytest.approx(row[token], abs=1e-4)
        assert abs(rank - 1 - int((row > row[token]).sum())) <= int((abs(row - row[token]) < 1e-4).sum()) - 1
        assert [value for _, value in each.top] == pytest.approx(np.sort(row)[::-1][:count].tolist(), abs=1e-4)
        assert [row[top] for top, _ in each.top] == pytest.approx([value for _, value in each.top], abs=1e-4)


def rows_of(texts: Sequence[Sequence[int]], tokens: int = 1, **asked: Any) -> list[Request]:
    return [
        Request(str(i), Prompt(tuple(text), Sampling(max_tokens=tokens), prompt_logprobs=TOP, **asked), EOS, None)
        for i, text in enumerate(texts)
    ]


def decoder_of(target: nn.Module, draft: Any, **more: Any) -> Decoder:
    start = None if draft is None else bare(draft)
    return Decoder(target, start, vocabulary=V, k=3 if start else 0, prefill_chunk=CHUNK, collect=True, **more)


def finish(decoder: Decoder, rows: Sequence[Request]) -> None:
    while decoder.rows:
        decoder.round()
    target = decoder.batch.target.model
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling, EOS)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("drafted", [False, True])
def test_they_are_the_targets_own(drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches, over several chunks, and with few logits at a time."""
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 4 * V * 48)
    assert tokens_at_once(V) == CHUNK
    target = tiny_llama(0)
    decoder = decoder_of(target, noisy_copy(target, 1, 0.2) if drafted else None)
    texts = texts_of(LENGTHS)
    rows = rows_of(texts, tokens=4)
    calls = [len(prefill.rows) for prefill in admit(decoder, rows, room=4 * CHUNK)]
    assert sum(calls) == len(texts)
    finish(decoder, rows)
    for row, text in zip(rows, texts, strict=True):
        assert_scored(target, text, row.take_prompt_logprobs())
        assert row.take_prompt_logprobs() is None


@pytest.mark.usefixtures("way")
def test_what_is_cached_of_a_prompt_is_computed_anew() -> None:
    target, prefix = tiny_llama(0), PrefixCache(2**24)
    decoder = decoder_of(target, None, prefix=prefix)
    texts = texts_of((90, 95, 90), shared=64)
    plain = [Request(str(i), Prompt(text, Sampling(max_tokens=2)), EOS, None) for i, text in enumerate(texts)]
    for row in plain[:2]:
        decoder.admit(row)
    assert plain[1].cached_tokens == 64
    # One prompt of each kind, together: only what is not asked about is read from the cache.
    (scored,) = rows_of(texts[:1], tokens=2)
    admit(decoder, [scored, plain[2]])
    assert (scored.cached_tokens, plain[2].cached_tokens) == (0, 64)
    finish(decoder, [*plain, scored])
    assert_scored(target, texts[0], scored.take_prompt_logprobs())


def test_no_more_logits_are_computed_at_a_time_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 4 * V * 8)
    shapes: list[tuple[int, ...]] = []

    def seen(logits: mx.array, *others: Any) -> None:
        shapes.append(logits.shape)
        score_chunk(logits, *others)

    monkeypatch.setattr("service.engine.prefill.score_chunk", seen)
    target = tiny_llama(0)
    decoder = decoder_of(target, None)
    rows = rows_of(texts_of((9, 9, 5, 5, 40)))
    admit(decoder, rows, room=4 * CHUNK)
    assert shapes and max(rows * tokens for rows, tokens, _ in shapes) <= 8
    assert any(rows > 1 for rows, _, _ in shapes)
    for row in rows:
        assert_scored(target, row.prompt.tokens, row.take_prompt_logprobs())


@pytest.mark.parametrize("width", [1, 97, 49_152, 152_000, 262_144, 2**40])
def test_calls_have_a_power_of_two_of_tokens(width: int) -> None:
    count = tokens_at_once(width)
    assert count & (count - 1) == 0 and (count == 1 or 4 * width * count <= prompt_logprobs.LOGITS_BYTES)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "lfm2", "jamba"])
def test_families_with_windows_and_states(name: str) -> None:
    needs = (IDENTICAL | RECURRENT)[name]
    target = build(name, needs)
    decoder = decoder_of(target, noisy_draft(name, needs, target))
    rows = rows_of(texts_of((40, 18, 19)), tokens=3)
    admit(decoder, rows)
    for row in rows:
        assert_scored(target, row.prompt.tokens, row.take_prompt_logprobs())


def test_a_head_that_reads_the_targets_hidden_states() -> None:
    target = plain_llama(0)
    decoder = decoder_of(target, tiny_head(target, 1))
    rows = rows_of(texts_of((40, 18)), tokens=6)
    admit(decoder, rows)
    finish(decoder, rows)
    for row in rows:
        assert_scored(target, row.prompt.tokens, row.take_prompt_logprobs())


def test_a_prompt_without_an_answer_never_joins_the_batch() -> None:
    target = tiny_llama(0)
    decoder = decoder_of(target, noisy_copy(target, 1, 0.2), prefix=PrefixCache(2**24))
    (running,) = rows_of(texts_of((12,)), tokens=9)
    decoder.admit(running)
    silent = rows_of(texts_of((20, 21, 1)), tokens=0)
    decoder.admit(*silent)
    assert decoder.rows == [running] and all(row.finish == "length" for row in silent)
    finish(decoder, [running])
    for row in silent:
        assert_scored(target, row.prompt.tokens, row.take_prompt_logprobs())
        timings = row.finished().timings
        assert timings.predicted_n == timings.rounds == timings.predicted_seconds == 0 < timings.prompt_seconds


def test_ids_without_a_logit_and_masked_ones_have_the_least_log_probability() -> None:
    logits = mx.array(np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32))
    logits[0, 1, 5] = -float("inf")
    scores = [PromptScores((0, 1, 5, 9, 2), 3), None]
    score_chunk(logits, scores, [0, 0], [4, 4])
    assert scores[0] is not None and scores[0].complete and scores[0].failed is None
    found = [each for _, each in scores[0].logprobs()]
    assert [each is not None and each.logprob == LEAST_LOGPROB for each in found] == [False, False, True, True, False]
    assert [rank for rank, _ in scores[0].logprobs()][2:4] == [8, 9]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_prompt_whose_logits_are_not_finite_fails_alone(value: float) -> None:
    scores = [PromptScores(range(4), 1), PromptScores(range(4), 1)]
    logits = mx.zeros((2, 3, 8))
    logits[1, 1, 2] = value
    score_chunk(logits, scores, [0, 0], [3, 3])
    assert [each.failed for each in scores] == [None, 2]
    row = rows_of([range(4)])[0]
    row.scores = scores[1]
    row.prompt_ended()
    assert "prompt token 3" in str(row.error) and row.take_prompt_logprobs() is None
