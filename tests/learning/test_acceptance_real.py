"""Off-policy estimates for another draft, adapter or draft length equal what decoding with it gives."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.llama import Model

from service.core import AdapterRef, AdapterState, Generation, Prompt, Sampling
from service.engine.adapters import Draft, bare, load
from service.engine.decoder import Decoder
from service.engine.sampling import gumbel, noise_key
from service.learning import lora
from service.learning.scoring.acceptance import acceptance, overlap
from service.learning.scoring.score import score
from service.models.fingerprint import folder_sha256
from service.models.heads import cut
from tests.support.batches import decode
from tests.support.logged_texts import VOCABULARY, WHO
from tests.support.oracle import filtered_logprobs, noisy_copy, tiny_llama
from tests.support.typed import as_float, leaves

FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 12},
    {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95},
]
EOS = frozenset({3, 50})
LOGGED_K = 3


@dataclass(frozen=True)
class DraftVersion:
    """One draft version twice: as the engine serves it (adapter folded in) and as a training job scores it (as LoRA layers)."""

    served: Draft
    scored: nn.Module


@dataclass(frozen=True)
class LoggedDrafts:
    """A target, the draft of the log, and the versions whose acceptance is estimated."""

    target: Model
    logger: Model
    versions: dict[str, DraftVersion]


def adapter(base: Model, noise: float, folder: Path) -> AdapterRef:
    """A saved adapter with random weights for `base`."""
    shape = lora.wrap(base, rank=4, scale=2.0, seed=0)
    weights = [
        (name, noise * mx.random.normal(array.shape, key=mx.random.key(i)))
        for i, (name, array) in enumerate(leaves(base.trainable_parameters()))
    ]
    base.load_weights(weights, strict=False)
    lora.save(base, shape, folder, draft=WHO.draft, target=WHO.target)
    return AdapterRef(
        id=1,
        folder=folder,
        sha256=folder_sha256(folder),
        rank=shape.rank,
        scale=shape.scale,
        keys=shape.keys,
        draft=WHO.draft,
        parent=0,
        run=None,
        state=AdapterState.CANDIDATE,
        created_at=datetime.now(UTC),
    )


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> LoggedDrafts:
    target = tiny_llama(1)

    def logger() -> Model:
        return noisy_copy(target, 2, 0.35)

    ref = adapter(logger(), 0.1, tmp_path_factory.mktemp("made") / "adapter")
    apart, other, short = logger(), noisy_copy(target, 9, 0.2), noisy_copy(target, 4, 0.2)
    # A reduced vocabulary, which the extra ids of the row often complete.
    cut(short, range(0, VOCABULARY, 3))
    lora.attach(apart, ref.folder, WHO.draft)
    versions = {
        "adapter": DraftVersion(load(logger(), ref, WHO.draft), apart),
        "another draft": DraftVersion(bare(other), other),
        "a cut head": DraftVersion(bare(short), short),
    }
    return LoggedDrafts(target, logger(), versions)


def asked(samplings: Sequence[Sampling], seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [Prompt(tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 20))), s) for s in samplings]


def keyed(seed: int) -> Callable[[Decoder], None]:
    """What is drawn without a seed, made repeatable: the decoder's own key, set before its first round."""
    first = iter([mx.random.key(seed)])

    def between(decoder: Decoder) -> None:
        decoder.runner.key = next(first, decoder.runner.key)

    return between


def generations(
    target: nn.Module,
    draft: Draft | nn.Module,
    prompts: Sequence[Prompt],
    *,
    k: int,
    seed: int = 0,
    eos: frozenset[int] = frozenset(),
    vocabulary: int = VOCABULARY,
    max_rows: int = 64,
) -> list[Generation]:
    rows = decode(
        target,
        draft,
        prompts,
        k=k,
        vocabulary=vocabulary,
        collect=True,
        eos=eos,
        max_rows=max_rows,
        seed=seed,
        between=keyed(seed),
    )
    made = [row.generation(WHO) for row in rows]
    return [g for g in made if g is not None]


def rounds_of(rates: Sequence[float], k: int) -> list[tuple[int, int, int]]:
    """start, accepted and emitted of every round, for tokens that are accepted (1) or not (0)."""
    rounds, start = [], 0
    while start < len(rates):
        accepted = 0
        while accepted < k and start + accepted < len(rates) and rates[start + accepted] == 1.0:
            accepted += 1
        emitted = min(accepted + 1, len(rates) - start)
        rounds.append((start, accepted, emitted))
        start += emitted
    return rounds


def clear(model: nn.Module, g: Generation) -> bool:
    """Whether no position is a near-tie of the model, where rounding may decide."""
    sampling = g.prompt.sampling
    logits = model(mx.array([[*g.prompt.tokens, *g.output[:-1]]]))[0, len(g.prompt.tokens) - 1 :].astype(mx.float32)
    if sampling.seed is not None:
        keys = [noise_key(sampling.seed, i) for i in range(len(g.output))]
        logits = filtered_logprobs(logits, sampling) + gumbel(keys, logits.shape[-1])
    best = mx.sort(logits, axis=-1)[:, -2:]
    return as_float((best[:, 1] - best[:, 0]).min()) > 1e-4


ROWS = pytest.mark.parametrize("rows", [18, pytest.param(36, marks=pytest.mark.nightly)])
SAMPLINGS = {
    "greedy": [Sampling(max_tokens=n) for n in (1, 2, 5, 12, 24, 40)] * 6,
    "seeded": [Sampling(**f, seed=7 * i, max_tokens=24) for i in range(9) for f in FILTERS],  # pyright: ignore[reportArgumentType]
}
Logs = Callable[[str, int], list[Generation]]


@pytest.fixture(scope="module")
def logs(drafts: LoggedDrafts) -> Logs:
    """logs(kind, rows) -> the logged generations of that many prompts, decoded once."""

    @cache
    def decoded(kind: str, rows: int) -> list[Generation]:
        return generations(drafts.target, drafts.logger, asked(SAMPLINGS[kind][:rows], seed=1), k=LOGGED_K, eos=EOS)

    return decoded


@ROWS
@pytest.mark.parametrize(
    ("kind", "version", "k"),
    [
        pytest.param(kind, version, k, marks=pytest.mark.nightly if (h + i + j) % 3 or k == 6 else ())
        for h, kind in enumerate(SAMPLINGS)
        for i, version in enumerate(["adapter", "another draft"])
        for j, k in enumerate([1, 2, 6])
    ],
)
def test_rounds_of_another_draft_are_predicted_exactly(
    drafts: LoggedDrafts, logs: Logs, kind: str, version: str, k: int, rows: int
) -> None:
    chosen, logged = drafts.versions[version], logs(kind, rows)
    prompts = [g.prompt for g in logged]
    # Batches and admission order differ, which must not matter.
    real = generations(drafts.target, chosen.served, prompts, k=k, seed=1, eos=EOS)
    found = acceptance(chosen.scored, logged, vocabulary=VOCABULARY)
    scores = score(chosen.scored, logged, k=k, vocabulary=VOCABULARY)
    compared = 0
    for g, then, rates, predicted in zip(logged, real, found, scores, strict=True):
        if not (clear(drafts.target, g) and clear(chosen.scored, g)):
            continue
        compared += 1
        assert then.output == g.output, "decoding is lossless"
        assert predicted.calls[-1] == len(then.rounds)
        assert predicted.tokens == len(then.output)
        assert rounds_of(rates.rates[0].tolist(), k) == [(r.start, r.accepted, r.emitted) for r in then.rounds]
    assert compared >= 0.9 * len(prompts)
    assert {g.finish for g in logged} == {"stop", "length"}, "both kinds of end are among them"
    # The estimate is not trivial: the rounds differ from those of the logged draft, also at the same draft length.
    mean = np.concatenate([f.rates[0] for f in found]).mean()
    assert 0.1 < mean < 0.95
    ours = score(drafts.logger, logged, k=k, vocabulary=VOCABULARY)
    assert [s.calls for s in scores] != [s.calls for s in ours]


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        pytest.param(version, kind, marks=pytest.mark.nightly if (i + j) % 2 else ())
        for i, version in enumerate(["adapter", "a cut head"])
        for j, kind in enumerate(SAMPLINGS)
    ],
)
def test_logged_rounds_accept_what_the_scores_of_their_draft_predict(
    drafts: LoggedDrafts, kind: str, version: str
) -> None:
    chosen, adapter = drafts.versions[version], drafts.versions[version].served.adapter
    prompts = [replace(p, num_draft_tokens=i % 7) for i, p in enumerate(asked(SAMPLINGS[kind][:18], seed=11))]
    logged = generations(drafts.target, chosen.served, prompts, k=6, eos=EOS)
    assert {r.drafted for g in logged for r in g.rounds} == set(range(7))
    ours = score(chosen.scored, logged, k=6, vocabulary=VOCABULARY, adapter=adapter)
    same = [s for g, s in zip(logged, ours, strict=True) if clear(drafts.target, g) and clear(chosen.scored, g)]
    assert len(same) >= 0.9 * len(prompts)
    assert [s.accepted for s in same] == [s.predicted for s in same]
    assert sum(s.rounds for s in same) > 50 and sum(s.accepted for s in same) > 10
    # Another draft's scores do not fit, and of another adapter there are no rounds.
    others = score(drafts.logger, logged, k=6, vocabulary=VOCABULARY, adapter=adapter)
    assert sum(s.predicted for s in others) != sum(s.accepted for s in others)
    assert not any(s.rounds for s in score(chosen.scored, logged, k=6, vocabulary=VOCABULARY, adapter=adapter + 1))
    assert not any(s.rounds for s in score(chosen.scored, logged, k=6, vocabulary=VOCABULARY))


@ROWS
def test_a_log_written_without_any_draft_predicts_one(drafts: LoggedDrafts, rows: int) -> None:
    prompts = asked([*SAMPLINGS["greedy"][:rows], *SAMPLINGS["seeded"][:rows]], seed=5)
    logged = generations(drafts.target, drafts.logger, prompts, k=0, eos=EOS)
    assert all(r.drafted == 0 for g in logged for r in g.rounds)
    chosen = drafts.versions["adapter"]
    real = generations(drafts.target, chosen.served, prompts, k=4, eos=EOS)
    scores = score(chosen.scored, logged, k=4, vocabulary=VOCABULARY)
    calls = [
        (s.calls[-1], len(then.rounds))
        for g, then, s in zip(logged, real, scores, strict=True)
        if clear(drafts.target, g) and clear(chosen.scored, g)
    ]
    assert len(calls) >= 0.9 * len(prompts)
    assert all(predicted == done for predicted, done in calls)


def test_a_prompt_of_one_token_has_its_first_round_undrafted(drafts: LoggedDrafts) -> None:
    prompts = [Prompt((token,), Sampling(max_tokens=16)) for token in range(4, 14)]
    logged = generations(drafts.target, drafts.logger, prompts, k=LOGGED_K)
    chosen = drafts.versions["adapter"]
    real = generations(drafts.target, chosen.served, prompts, k=2, max_rows=1)
    assert all(g.rounds[0].drafted == 0 and g.rounds[1].drafted == 2 for g in real)
    scores = score(chosen.scored, logged, k=2, vocabulary=VOCABULARY)
    calls = [
        (s.calls[-1], len(then.rounds))
        for g, then, s in zip(logged, real, scores, strict=True)
        if clear(drafts.target, g) and clear(chosen.scored, g)
    ]
    assert len(calls) >= 0.9 * len(prompts)
    assert all(predicted == done for predicted, done in calls)


@pytest.mark.parametrize(
    ("version", "k", "pairs", "texts"),
    [
        pytest.param("adapter", 5, 1, 80, marks=pytest.mark.nightly),
        pytest.param("adapter", 5, 8, 240, marks=pytest.mark.nightly),
        pytest.param("another draft", 2, 8, 240, marks=pytest.mark.nightly),
    ],
)
def test_tokens_per_call_of_unseeded_traffic_are_predicted_on_average(
    drafts: LoggedDrafts, version: str, k: int, pairs: int, texts: int
) -> None:
    """Both runs sample their own texts, so only means agree: within 3 standard errors over several pairs of keys."""
    samplings = [Sampling(**FILTERS[i % 4], max_tokens=24) for i in range(texts)]  # pyright: ignore[reportArgumentType]
    chosen, prompts = drafts.versions[version], asked(samplings, seed=3)
    actual, expected, other = list[int](), list[float](), list[float]()
    for pair in range(pairs):
        logged = generations(drafts.target, drafts.logger, prompts, k=LOGGED_K, seed=2 * pair + 1)
        real = generations(drafts.target, chosen.served, prompts, k=k, seed=2 * pair + 2)
        assert sum(a.output == b.output for a, b in zip(logged, real, strict=True)) < texts / 20, "the texts are others"
        # Every text has 24 tokens, so tokens per call agree exactly when calls do.
        actual += [len(g.rounds) for g in real]
        expected += [s.calls[-1] for s in score(chosen.scored, logged, k=k, vocabulary=VOCABULARY)]
        other += [s.calls[-1] for s in score(drafts.logger, logged, k=k, vocabulary=VOCABULARY)]
    measured, difference = float(np.mean(actual)), np.array(expected) - np.array(actual)
    error = difference.std() / math.sqrt(len(difference))
    assert abs(difference.mean()) < 3 * error, (
        f"predicted {24 / np.mean(expected):.3f}, measured {24 / measured:.3f} tokens per call"
    )
    assert error < 0.02 * measured, "the bar is a narrow one"
    # The score of the logged draft instead would fail.
    assert abs(np.mean(other) - measured) > 5 * error


@pytest.mark.parametrize("texts", [180, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("vocabulary", [30, pytest.param(VOCABULARY, marks=pytest.mark.nightly)])
def test_overlap_is_the_acceptance_rate_of_the_first_token(vocabulary: int, texts: int) -> None:
    """Unfiltered sampling at T = 1. Up to 32 tokens the stored targets are complete; beyond, the tail bounds the error."""
    target = tiny_llama(1, vocabulary=vocabulary, sharpness=1.5)
    draft = noisy_copy(target, 2, 0.8)
    rng = random.Random(0)
    prompts = [
        Prompt(tuple(rng.randrange(vocabulary) for _ in range(9)), Sampling(temperature=1.0, max_tokens=24))
        for _ in range(texts)
    ]
    real = generations(target, draft, prompts, k=1, seed=4, vocabulary=vocabulary)
    expected = overlap(draft, real, vocabulary=vocabulary)
    accepted = np.array([r.accepted for g in real for r in g.rounds])
    shared = np.array([o[r.start] for g, o in zip(real, expected, strict=True) for r in g.rounds])
    error = math.sqrt((shared * (1 - shared)).sum()) / len(shared)
    assert error < 0.01
    assert 0.1 < accepted.mean() < 0.9
    assert accepted.mean() < shared.mean() + 2 * error
    if vocabulary <= 32:
        assert accepted.mean() > shared.mean() - 2 * error
    else:
        tails = [np.frombuffer(g.targets.tail, "<f2").astype(float) for g in real if g.targets is not None]
        rest = np.array([np.exp(t[r.start]) for g, t in zip(real, tails, strict=True) for r in g.rounds])
        assert rest.mean() > 3 * error, "the tail is large enough to matter"
        assert accepted.mean() > shared.mean() - rest.mean() - 2 * error
