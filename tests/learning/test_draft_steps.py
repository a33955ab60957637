"""EAGLE heads: scoring a whole text in one pass equals drafting step by step."""

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from service.core import Generation, Round, Sampling
from service.engine.folding import as_served
from service.engine.sampling import gumbel, noise_key
from service.learning.draft_steps import UNROLLED, step_count
from service.learning.scoring.acceptance import acceptance, overlap
from service.learning.scoring.score import score
from service.learning.scoring.simulate import simulate_rounds
from service.learning.teacher_forcing import response_logits
from service.models.eagle import Model as Head
from tests.support.eagle_models import plain_llama, proposal, tiny_head
from tests.support.logged_texts import VOCABULARY, served
from tests.support.oracle import filtered_logprobs, noisy_copy, tiny_llama
from tests.support.typed import as_float, as_int

GREEDY = [Sampling(max_tokens=n) for n in (1, 2, 7, 24)] * 4
SEEDED = [Sampling(temperature=0.7, top_p=0.9, top_k=30, seed=i + 1, max_tokens=16) for i in range(10)]


@pytest.fixture(scope="module")
def head() -> Head:
    return tiny_head(plain_llama(1), 2)


Decode = Callable[[list[Sampling]], list[Generation]]


@pytest.fixture(scope="module")
def decode(head: Head) -> Decode:
    """decode(samplings) -> undrafted generations of the head's target, decoded once."""

    @cache
    def decoded(samplings: tuple[Sampling, ...]) -> list[Generation]:
        assert head._capture is not None
        return served(head._capture.model, tiny_llama(5), samplings, k=0)

    return lambda samplings: decoded(tuple(samplings))


def test_every_draft_step_equals_serving_with_a_cache(head: Head) -> None:
    tokens = mx.random.randint(0, VOCABULARY, (2, 12), key=mx.random.key(0))
    features = head.features(tokens)
    found = head.model.unrolled(tokens, features, UNROLLED)
    assert mx.allclose(head.model(tokens, None, features), found[0], atol=1e-5).item()
    for start in range(12):
        cache = [KVCache()]
        hidden = head.model(tokens[:, : start + 1], cache, features[:, : start + 1])[:, -1:]
        for step in range(min(UNROLLED, 12 - start)):
            assert mx.allclose(hidden, found[step][:, start + step, None], atol=1e-5).item(), (start, step)
            if start + step + 1 < 12:
                hidden = head.model(tokens[:, start + step + 1, None], cache, hidden)


def chooser(g: Generation, start: int) -> Callable[[int, mx.array], int]:
    """The draft's choice of tokens in a round that starts at output position `start`."""

    def choose(place: int, logits: mx.array) -> int:
        sampling = g.prompt.sampling
        if sampling.greedy:
            return as_int(mx.argmax(logits))
        assert sampling.seed is not None
        noise = gumbel([noise_key(sampling.seed, start + place)], logits.shape[-1])
        return as_int(mx.argmax(filtered_logprobs(logits[None], sampling) + noise))

    return choose


def brute(head: Head, g: Generation, k: int) -> tuple[tuple[Round, ...], list[tuple[int, int, int, float]]]:
    """Rounds and (position, drafted, target, q) of their failure cases, by drafting step by step."""
    rounds, cases, start = list[Round](), list[tuple[int, int, int, float]](), 0
    while start < len(g.output):
        chosen, logits = proposal(head, [*g.prompt.tokens, *g.output[:start]], k, chooser(g, start))
        ahead = g.output[start : start + k]
        accepted = next((i for i, target_id in enumerate(ahead) if chosen[i] != target_id), len(ahead))
        if accepted < len(ahead):
            q = as_float(mx.softmax(logits[accepted], axis=-1)[chosen[accepted]])
            cases.append((start + accepted, chosen[accepted], g.output[start + accepted], q))
        emitted = min(accepted + 1, len(g.output) - start)
        # Proposals past the end of the text were not verified.
        drafted = min(k, emitted) if start + emitted == len(g.output) else k
        rounds.append(Round(0, start, drafted, accepted, emitted))
        start += emitted
    return tuple(rounds), cases


@pytest.mark.parametrize(
    ("k", "samplings"),
    [
        pytest.param(k, samplings, id=f"{k}-{name}", marks=pytest.mark.nightly if (i + j) % 2 else ())
        for i, k in enumerate([1, 2, 4])
        for j, (samplings, name) in enumerate([(SEEDED, "seeded"), (GREEDY, "greedy")])
    ],
)
def test_rounds_and_calls_equal_drafting_step_by_step(
    head: Head, decode: Decode, samplings: list[Sampling], k: int
) -> None:
    texts = decode(samplings)
    found = simulate_rounds(head, texts, k=k, adapter=0, vocabulary=VOCABULARY)
    scores = score(head, texts, k=k, vocabulary=VOCABULARY)
    compared, deep = 0, 0
    for g, mine, scored in zip(texts, found, scores, strict=True):
        rounds, cases = brute(head, g, k)
        if mine.generation.rounds != rounds:
            continue  # a near-tie, which rounding decides
        compared += 1
        deep += sum(r.accepted > 1 for r in rounds)
        assert scored.calls[k - 1] == len(rounds)
        assert scored.agreed == mine.agreed or not g.prompt.sampling.greedy
        assert [(c.position, c.drafted, c.target) for c in mine.generation.cases] == [case[:3] for case in cases]
        assert [c.q for c in mine.generation.cases] == pytest.approx([case[3] for case in cases], rel=1e-3)
    assert compared >= 0.9 * len(texts)
    assert deep > 5 or k == 1
    if k > 1:
        # First and later draft steps differ.
        rates = np.concatenate([a.rates for a in acceptance(head, texts, vocabulary=VOCABULARY, k=k)], axis=1)
        assert len(rates) == k
        assert (rates[0] != rates[1]).mean() > 0.05


def test_rejection_is_by_step_too_and_agreement_by_the_first(head: Head, decode: Decode) -> None:
    texts = decode([Sampling(temperature=0.8, max_tokens=12)] * 6)
    for g, a in zip(texts, acceptance(head, texts, vocabulary=VOCABULARY, k=9), strict=True):
        assert a.rates.shape == (UNROLLED, len(g.output))
        agreed = 0
        for start in range(len(g.output)):
            ahead = g.output[start : start + UNROLLED]
            # The rate is conditional on all earlier tokens being accepted.
            chosen, logits = proposal(head, [*g.prompt.tokens, *g.output[:start]], len(ahead), lambda i, _: ahead[i])  # noqa: B023
            assert tuple(chosen) == ahead
            agreed += as_int(mx.argmax(logits[0])) == ahead[0]
            for place, (token, row) in enumerate(zip(ahead, logits, strict=True)):
                q = as_float(mx.softmax(row / 0.8)[token])
                p = np.exp(g.sampled_logprobs[start + place])
                assert a.rates[place, start + place] == pytest.approx(min(1.0, q / p), rel=1e-3)
        assert a.agreed == agreed


def test_a_reduced_head_is_reduced_in_every_step(head: Head, decode: Decode) -> None:
    short = as_served(head, range(0, VOCABULARY, 3))
    texts = [(g.prompt.tokens, g.output) for g in decode(GREEDY)]
    spans = list(response_logits(short, texts, vocabulary=VOCABULARY, steps=2))
    whole = list(response_logits(head, texts, vocabulary=VOCABULARY, steps=2))
    assert [span.step for span in spans] == [span.step for span in whole] == [0, 1] * (len(spans) // 2)
    for some, every in zip(spans, whole, strict=True):
        barred = np.isinf(np.array(some.logits))
        for row, (text, at) in enumerate(zip(some.text, some.position, strict=True)):
            prompt, output = texts[text]
            allowed = {*range(0, VOCABULARY, 3), *prompt, *output[:at]}
            assert set(np.flatnonzero(~barred[row])) == allowed
        assert np.allclose(np.array(some.logits)[~barred], np.array(every.logits)[~barred], atol=1e-5)


def test_an_ordinary_draft_is_the_same_in_every_step(head: Head, decode: Decode) -> None:
    draft = noisy_copy(tiny_llama(1), 2, 0.35)
    assert [step_count(draft, k) for k in (0, 1, 9)] == [1, 1, 1]
    assert [step_count(head, k) for k in (0, 1, 3, 9)] == [1, 1, 3, UNROLLED]
    (g,) = decode([Sampling(max_tokens=9)])
    assert acceptance(draft, [g], vocabulary=VOCABULARY, k=5)[0].rates.shape == (1, 9)
    (span,) = response_logits(draft, [(g.prompt.tokens, g.output)], vocabulary=VOCABULARY, steps=3)
    assert span.step == 0


def test_overlap_is_of_the_first_step(head: Head, decode: Decode) -> None:
    (g,) = decode([Sampling(max_tokens=8)])
    tokens = mx.array([[*g.prompt.tokens, *g.output[:-1]]])
    q = mx.softmax(head(tokens, None, head.features(tokens))[0, len(g.prompt.tokens) - 1 :], axis=-1)
    assert head._capture is not None
    p = mx.softmax(head._capture.model(tokens)[0, len(g.prompt.tokens) - 1 :], axis=-1)
    (found,) = overlap(head, [g], vocabulary=VOCABULARY)
    exact = np.array(mx.minimum(p, q).sum(axis=-1))
    assert (found >= exact - 2e-3).all()
    assert found.mean() < exact.mean() + 0.1
