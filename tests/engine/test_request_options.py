"""What one request may ask of the engine: log-probabilities, and how much is proposed for it, whatever others ask."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling, Source, TokenLogprobs
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from tests.support.oracle import forced, naive, read

VOCABULARY, K = 97, 4
EOS = frozenset({3})
STRATEGIES = pytest.mark.parametrize("strategy", [CPU, METAL, CUDA], ids=["CPU", "Metal", "CUDA"])
SAMPLINGS = [
    Sampling(max_tokens=40),
    Sampling(max_tokens=40, temperature=0.9, seed=5, top_k=20),
    Sampling(max_tokens=40, temperature=0.9, top_p=0.9),
]


def tokens_of(number: int, count: int = 24) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(count + 5 * number))


def finish(decoder: Decoder, prompts: Sequence[Prompt]) -> tuple[list[Request], list[list[TokenLogprobs]]]:
    """The finished rows, and what was sent of each row's log-probabilities."""
    rows = [Request(str(i), prompt, EOS, None) for i, prompt in enumerate(prompts)]
    sent: dict[str, list[TokenLogprobs]] = {row.id: [] for row in rows}
    decoder.admit(*rows)
    while decoder.unfinished:
        report = decoder.round()
        for row, delta in zip(report.rows, report.deltas, strict=True):
            sent[row.id] += delta.logprobs
    return rows, [sent[row.id] for row in rows]


@pytest.mark.parametrize(
    ("collect", "strategy"),
    [
        pytest.param(False, CPU, id="unrecorded-CPU", marks=pytest.mark.nightly),
        pytest.param(False, METAL, id="unrecorded-Metal"),
        pytest.param(False, CUDA, id="unrecorded-CUDA", marks=pytest.mark.nightly),
        pytest.param(True, CPU, id="recorded-CPU"),
        pytest.param(True, METAL, id="recorded-Metal", marks=pytest.mark.nightly),
        pytest.param(True, CUDA, id="recorded-CUDA"),
    ],
)
def test_log_probabilities_are_the_target_s_at_temperature_one(
    target: Model, draft: nn.Module, strategy: Strategy, collect: bool
) -> None:
    prompts = [
        Prompt(tokens_of(i), sampling, logprobs=3 if i else 0, store=i != 1) for i, sampling in enumerate(SAMPLINGS)
    ]
    prompts.append(Prompt(tokens_of(4), SAMPLINGS[0]))
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=collect, key=mx.random.key(0))
        rows, sent = finish(decoder, prompts)
    assert sent[3] == []
    assert [bool(row.evidence) for row in rows] == [collect and row.prompt.store for row in rows]
    for row, logprobs in zip(rows[:3], sent[:3], strict=True):
        output = [token for token in row.output if token not in EOS]
        assert [each.token for each in logprobs] == output
        logits = read(target, row.tokens[:-1], make_prompt_cache(target))[len(row.prompt.tokens) - 1 :]
        wanted = np.array(nn.log_softmax(logits.astype(mx.float32), axis=-1))
        for each, right in zip(logprobs, wanted, strict=False):
            assert each.logprob == pytest.approx(right[each.token], abs=1e-4)
            best = np.sort(right)[::-1][: row.prompt.logprobs]
            assert [value for _, value in each.top] == pytest.approx(best.tolist(), abs=1e-4)
            assert [right[token] for token, _ in each.top] == pytest.approx(best.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("adaptive", "strategy"),
    [
        pytest.param(False, CPU, id="fixed-CPU", marks=pytest.mark.nightly),
        pytest.param(False, METAL, id="fixed-Metal", marks=pytest.mark.nightly),
        pytest.param(False, CUDA, id="fixed-CUDA", marks=pytest.mark.nightly),
        pytest.param(True, CPU, id="adaptive-CPU", marks=pytest.mark.nightly),
        pytest.param(True, METAL, id="adaptive-Metal", marks=pytest.mark.nightly),
        pytest.param(True, CUDA, id="adaptive-CUDA"),
    ],
)
def test_nothing_is_proposed_for_a_request_that_wants_nothing(
    target: Model, draft: nn.Module, strategy: Strategy, adaptive: bool
) -> None:
    prompts = [Prompt(tokens_of(i), sampling, num_draft_tokens=0) for i, sampling in enumerate(SAMPLINGS[:2])]
    with using(strategy):
        decoder = Decoder(
            target,
            bare(draft),
            vocabulary=VOCABULARY,
            k=K,
            adaptive=adaptive,
            lookup=8 if adaptive else 0,
            key=mx.random.key(0),
        )
        decoder.profile(8)
        alone, _ = finish(decoder, prompts)
        others = [Prompt(tokens_of(i), sampling) for i, sampling in enumerate(SAMPLINGS)]
        mixed, _ = finish(decoder, [*others, *prompts])
    for row in (*alone, *mixed):
        if row.prompt.num_draft_tokens == 0:
            assert {round.drafted for round in row.rounds} == {0}
        if row.prompt.sampling.greedy or row.prompt.sampling.seed is not None:
            assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling, EOS)
    if not adaptive:
        # The third samples without a seed: it may end in its first round.
        assert all(max(round.drafted for round in row.rounds) == K for row in mixed[:2])


@STRATEGIES
@pytest.mark.parametrize("limit", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_request_s_proposals_are_no_longer_than_it_wants(
    target: Model, draft: nn.Module, strategy: Strategy, limit: int
) -> None:
    prompts = [Prompt(tokens_of(i), sampling, num_draft_tokens=limit) for i, sampling in enumerate(SAMPLINGS)]
    prompts += [Prompt(tokens_of(i), sampling) for i, sampling in enumerate(SAMPLINGS)]
    with using(strategy):
        # What is sampled without a seed may not end before a whole proposal was verified.
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True, key=mx.random.key(0))
        rows, _ = finish(decoder, prompts)
    for row in rows:
        longest = max(round.drafted for round in row.rounds)
        assert longest == (limit if row.prompt.num_draft_tokens else K)
        if row.prompt.sampling.rule == "match":
            assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling, EOS)
        for case in row.cases:
            # A position behind the limit was not proposed, so that nothing was rejected there.
            of = next(each for each in row.rounds if each.start <= case.position < each.start + each.emitted)
            assert case.position - of.start < of.drafted
            assert case.drafted != case.target


def test_look_ups_are_no_longer_than_a_request_wants(target: Model) -> None:
    again = Prompt(tokens_of(0, 30) * 4, Sampling(max_tokens=60), num_draft_tokens=2)
    decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=8)
    free = Prompt(again.tokens, again.sampling)
    rows, _ = finish(decoder, [again, free])
    looked_up = [[round.drafted for round in row.rounds if round.source is Source.LOOKUP] for row in rows]
    assert max(looked_up[0], default=0) <= 2
    assert rows[0].output == rows[1].output


BIAS = ((7, 3.0), (11, -100.0), (13, 2.5))


@STRATEGIES
def test_biased_rows_are_the_biased_target_s_own(target: Model, draft: nn.Module, strategy: Strategy) -> None:
    """In one batch with a row that has no bias."""
    seeded = Sampling(max_tokens=30, temperature=0.9, seed=5, top_k=20)
    samplings = [
        Sampling(max_tokens=30),
        *(replace(each, logit_bias=BIAS) for each in (Sampling(max_tokens=30), seeded)),
    ]
    prompts = [Prompt(tokens_of(i), sampling) for i, sampling in enumerate(samplings)]
    with using(strategy):
        rows, _ = finish(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K), prompts)
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.output == naive(target, prompt.tokens, prompt.sampling, EOS)
    assert all(row.output != naive(target, row.prompt.tokens, Sampling(max_tokens=30), EOS) for row in rows[1:])


def test_a_biased_draft_proposes_what_the_bias_wants(target: Model, draft: nn.Module) -> None:
    prompt = Prompt(tokens_of(0), Sampling(max_tokens=21, logit_bias=((9, 100.0),)))
    (row,), _ = finish(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K), [prompt])
    assert row.output == [9] * 21
    assert sum(each.accepted for each in row.rounds) == sum(each.drafted for each in row.rounds) > 0


@pytest.mark.parametrize("k", [0, K])
def test_biased_unseeded_rows_have_the_biased_distribution(target: Model, draft: nn.Module, k: int) -> None:
    """Of two tokens that a bias leaves, the first output of 600 rows."""
    tokens, count = tokens_of(0), 600
    sampling = Sampling(max_tokens=2, temperature=0.8, logit_bias=((9, 90.0), (10, 90.5)))
    logits = np.array(read(target, list(tokens), make_prompt_cache(target))[-1].astype(mx.float32)).astype(np.float64)
    share = 1 / (1 + np.exp((logits[10] + 0.5 - logits[9]) / 0.8))
    decoder = Decoder(target, bare(draft) if k else None, vocabulary=VOCABULARY, k=k, key=mx.random.key(3))
    seen = Counter[int]()
    for _ in range(count // 20):
        rows, _ = finish(decoder, [Prompt(tokens, sampling)] * 20)
        seen += Counter(row.output[0] for row in rows)
    assert set(seen) <= {9, 10}
    assert abs(seen[9] - count * share) < 4 * np.sqrt(count * share * (1 - share))
