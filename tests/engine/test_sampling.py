"""The transform is mlx-lm's, row by row, and the shared noise depends on seed and position alone."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from service.core import Sampling
from service.engine.sampling import SamplingBatch, SharedNoise, gumbel, noise_key, shared_noise, transform
from service.engine.targets import tail_mass, top_and_mass, top_logits
from tests.support.oracle import tempered


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.2, 0.7, 1.0, 2.0]),
            top_p=st.sampled_from([1.0, 0.95, 0.5, 0.05]),
            top_k=st.sampled_from([0, 1, 5, 40, 500]),
            min_p=st.sampled_from([0.0, 0.02, 0.3]),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_a_mixed_batch_equals_mlx_lm_row_by_row(rows: list[Sampling], seed: int) -> None:
    vocabulary = 61
    logits = mx.random.normal((len(rows), 2, vocabulary), key=mx.random.key(seed)) * 3
    ours = transform(logits, SamplingBatch.of(rows, vocabulary))
    for i, sampling in enumerate(rows):
        if sampling.top_k >= vocabulary:  # mlx-lm refuses what we treat as no filter
            sampling = Sampling(temperature=sampling.temperature, top_p=sampling.top_p, min_p=sampling.min_p)
        theirs = tempered(logits[i], sampling)
        assert np.allclose(np.exp(np.array(ours[i])), np.exp(np.array(theirs)), atol=1e-5)


def test_greedy_rows_are_untouched_by_their_neighbours_filters() -> None:
    logits = mx.random.normal((2, 1, 50), key=mx.random.key(0))
    batch = SamplingBatch.of([Sampling(), Sampling(temperature=0.5, top_k=3)], 50)
    out = np.array(transform(logits, batch))
    assert np.isfinite(out[0]).all() and out[0].argmax() == np.array(logits)[0].argmax()
    assert np.isfinite(out[1]).sum() == 3


def test_noise_is_a_function_of_seed_and_position() -> None:
    rows = [Sampling(temperature=1.0, seed=5), Sampling(), Sampling(temperature=1.0, seed=5)]
    noise = shared_noise(SamplingBatch.of(rows, 33), [4, 0, 6], 3, 33)
    assert noise is not None
    held = np.array(noise)
    assert (held[0, 2] == held[2, 0]).all(), "position 6 of seed 5, in two rows"
    assert (held[1] == 0).all()
    assert (held[0, 0] != held[0, 1]).any()
    assert shared_noise(SamplingBatch.of([Sampling()], 33), [0], 3, 33) is None
    # Made as far as it is asked for, it is the same.
    made = SharedNoise(SamplingBatch.of(rows, 33), [4, 0, 6], 33)
    later = made.at(1)
    assert later is not None and mx.array_equal(later, noise[:, 1:2])
    whole = made.first(3)
    assert whole is not None and mx.array_equal(whole, noise)
    assert SharedNoise(SamplingBatch.of([Sampling()], 33), [0], 33).first(3) is None


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_noise_is_standard_gumbel(seed: int) -> None:
    sample = np.array(gumbel([noise_key(seed, position) for position in range(20)], 2_000)).ravel()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("vocabulary", [20, 32, 33, 2048, 2049, 5000])
def test_top_is_exact_and_the_tail_is_the_rest(vocabulary: int) -> None:
    logits = mx.random.normal((3, 2, vocabulary), key=mx.random.key(vocabulary))
    logp = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    ids, values = top_logits(mx.array(logp), 32)
    best = -np.sort(-logp, axis=-1)[..., :32]
    assert np.array_equal(np.array(values), best)
    assert np.array_equal(np.take_along_axis(logp, np.array(ids).astype(int), -1), best)
    rest = 1 - np.exp(best.astype(np.float64)).sum(-1)
    assert np.allclose(np.exp(np.array(tail_mass(values))), np.maximum(rest, 0), atol=2e-6)
    # Row by row in the host's memory it is the same, whatever the logits are shifted by.
    flat = logp.reshape(-1, vocabulary)
    there, largest, mass = top_and_mass(list(flat + np.float32(40.0)), 32)
    assert np.array_equal(there, np.array(ids).reshape(-1, there.shape[-1]))
    assert np.allclose(largest - 40.0, best.reshape(largest.shape), atol=1e-5)
    assert np.allclose(mass, 40.0, atol=1e-5)
    flat[:, 1:] = -np.inf
    assert np.allclose(top_and_mass(list(flat), 32)[2], flat[:, 0])
