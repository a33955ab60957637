"""Training examples: every output token once, nothing else, in few shapes."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core import Generation, Targets
from service.learning.batches import batches, collate
from service.learning.examples import Dataset, build, set_aside, unpack, windows
from service.models.padding import LENGTHS
from tests.support.logged_texts import VOCABULARY, generation, random_texts, with_targets
from tests.support.oracle import tiny_llama


@pytest.fixture(scope="module")
def texts() -> list[Generation]:
    return with_targets(tiny_llama(1), random_texts(23, seed=5))


def made(generations: list[Generation], max_length: int = 512) -> Dataset:
    return build(generations, max_length=max_length, vocabulary=VOCABULARY)


def test_targets_are_shifted_by_one_and_the_prompt_is_masked(texts: list[Generation]) -> None:
    batch = collate(made(texts).examples)
    tokens, at, weight = np.array(batch.tokens), np.array(batch.at), np.array(batch.weight)
    rows, columns = np.divmod(at[weight > 0], tokens.shape[1])
    for row, text in enumerate(texts):
        learnt = columns[rows == row].tolist()
        whole = [*text.prompt.tokens, *text.output]
        first = len(text.prompt.tokens) - 1
        # The state at `first` has read exactly the prompt; each later one has read one more output token.
        assert learnt == list(range(first, first + len(text.output)))
        assert tokens[row, : learnt[-1] + 1].tolist() == whole[:-1]


def test_a_position_has_the_distribution_of_its_output_token(texts: list[Generation]) -> None:
    target = tiny_llama(1)
    batch = collate(made(texts).examples)
    states = target(batch.tokens).reshape(-1, VOCABULARY)[batch.at]
    logp = states - mx.logsumexp(states, axis=-1, keepdims=True)
    used = np.array(batch.weight) > 0
    expected = np.array(mx.take_along_axis(logp, batch.ids, axis=-1))[used]
    assert np.abs(np.array(batch.logprobs)[used] - expected).max() < 5e-3  # float16


def test_stored_distributions_sum_to_one(texts: list[Generation]) -> None:
    targets = texts[0].targets
    assert targets is not None
    _, logprobs, tail = unpack(targets)
    assert np.allclose(np.exp(logprobs).sum(axis=-1) + np.exp(tail), 1.0, atol=1e-6)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(8, 64))
def test_windows_cover_every_output_token_once_with_the_most_context(prompt: int, output: int, size: int) -> None:
    length = prompt + output
    found = windows(prompt, length, size)
    assert [at for _, first, end in found for at in range(first, end)] == list(range(prompt, length))
    for start, first, end in found:
        assert 0 <= start < first < end <= length and end - start <= size
        assert first - start >= min(first, size // 2), "half a window before it, or the whole text"
    assert (len(found) == 1) == (length <= size or found[0][2] == length)
    assert len(found) <= 1 + -(-output // (size - size // 2)), "no more of them than half windows of output"


@pytest.mark.parametrize(("prompt", "output", "cut"), [
    (10, 6, [(0, 10, 16)]),
    (11, 6, [(1, 11, 17)]),
    (40, 6, [(30, 40, 46)]),
    (40, 12, [(32, 40, 48), (36, 48, 52)]),
    (2, 30, [(0, 2, 16), (8, 16, 24), (16, 24, 32)]),
    (99, 1, [(84, 99, 100)]),
])  # fmt: skip
def test_a_long_text_is_learnt_in_windows(prompt: int, output: int, cut: list[tuple[int, int, int]]) -> None:
    text = generation([i % VOCABULARY for i in range(prompt)], [(i * 7) % VOCABULARY for i in range(output)])
    text = with_targets(tiny_llama(1), [text])[0]
    short = with_targets(tiny_llama(1), [generation([1, 2], [3])])
    found = made([text, *short * len(cut)], max_length=16).examples[: len(cut)]
    whole = np.array([*text.prompt.tokens, *text.output])
    assert text.targets is not None
    ids, logprobs, _ = unpack(text.targets)
    assert windows(prompt, prompt + output, 16) == cut
    for example, (start, first, end) in zip(found, cut, strict=True):
        assert example.tokens.tolist() == whole[start : end - 1].tolist()
        assert example.before.tolist() == whole[:start].tolist()
        assert (example.start, example.positions) == (first - start - 1, end - first)
        # The target's distribution is that over the whole text.
        assert np.array_equal(example.ids, ids[first - prompt : end - prompt])
        assert np.array_equal(example.logprobs, logprobs[first - prompt : end - prompt])


def test_long_texts_cost_a_run_no_more_than_two_windows_each(texts: list[Generation]) -> None:
    target = tiny_llama(1)
    long = with_targets(target, [generation([1, 2, 3], [i % 90 for i in range(n)]) for n in (200, 150)])
    short = [text for text in texts if len(text.prompt.tokens) + len(text.output) <= 16]
    whole = made([*short, *long] * 20, max_length=16)
    assert len(whole.examples) == 2 * 20 * (len(short) + 2) and whole.left_out > 0
    firsts = [example for example in whole.examples if not len(example.before)]
    assert len(firsts) == 20 * (len(short) + 2), "every text keeps its first window"

    def learnt(seed: int) -> list[tuple[int, ...]]:
        data = build(long, max_length=16, vocabulary=VOCABULARY, seed=seed)
        return [tuple(example.tokens.tolist()) for example in data.examples]

    assert learnt(1) == learnt(1)
    assert len({window for seed in range(60) for window in learnt(seed)}) > 20, "another run learns others"


def test_unusable_generations_are_skipped_and_counted(texts: list[Generation]) -> None:
    good = texts[0]
    targets = good.targets
    assert targets is not None
    poisoned = np.frombuffer(targets.logprobs, dtype="<f2").copy()
    poisoned[3] = np.nan
    strange = np.frombuffer(targets.ids, dtype="<u4").copy()
    strange[0] = VOCABULARY
    bad = [
        generation([1, 2], []),
        replace(good, prompt=replace(good.prompt, tokens=())),
        replace(good, targets=None),
        replace(good, output=(*good.output, 1)),
        replace(good, prompt=replace(good.prompt, tokens=(VOCABULARY,))),
        replace(good, targets=Targets(targets.top, targets.ids, poisoned.tobytes(), targets.tail)),
        replace(good, targets=Targets(targets.top, strange.tobytes(), targets.logprobs, targets.tail)),
        replace(good, targets=Targets(targets.top, targets.ids[4:], targets.logprobs, targets.tail)),
        replace(good, targets=Targets(targets.top // 2, targets.ids, targets.logprobs, targets.tail)),
    ]
    found = made([good, *bad, good])
    assert len(found.examples) == 2
    assert sum(found.skipped.values()) == len(bad)
    assert found.skipped["no response token"] == 2
    assert found.skipped["no targets"] == 1


def test_no_text_is_learnt_and_validated_on() -> None:
    """Texts of several windows each."""
    long = with_targets(tiny_llama(1), random_texts(60, seed=4))
    examples = made([replace(one, id=f"t{i}") for i, one in enumerate(long)], max_length=12).examples
    assert len(examples) > 90
    learnt, validation = set_aside(examples)
    assert 3 <= len(validation) <= 16 and {one.text for one in learnt}.isdisjoint(one.text for one in validation)
    few = [one for one in examples if one.text in {"t0", "t1"}]
    assert set_aside(few) == (few, few[:16]), "too few to spare any"


def test_an_epoch_has_every_example_once_in_few_shapes(texts: list[Generation]) -> None:
    examples = made(texts).examples
    found: list[np.ndarray] = []
    lengths: set[int] = set()
    fed = 0
    for batch in batches(examples, 4, seed=3):
        assert batch.tokens.shape[0] <= 4
        assert batch.tokens.shape[1] % LENGTHS == batch.at.shape[0] % LENGTHS == 0
        lengths.add(batch.tokens.shape[1])
        fed += batch.count
        rows = np.concatenate([np.array(batch.ids), np.array(batch.logprobs)], axis=1)
        found.append(rows[np.array(batch.weight) > 0])
    expected = np.concatenate([np.concatenate([e.ids, e.logprobs], axis=1) for e in examples])
    got = np.concatenate(found)
    assert np.array_equal(got[np.lexsort(got.T)], expected[np.lexsort(expected.T)])
    assert fed == sum(len(example.tokens) for example in examples)
    assert lengths <= {32, 64, 96}


def test_the_order_is_a_function_of_the_seed(texts: list[Generation]) -> None:
    examples = made(texts).examples

    def order(seed: int) -> list[object]:
        return [np.array(batch.tokens).tolist() for batch in batches(examples, 4, seed)]

    assert order(1) == order(1)
    assert order(1) != order(2)
