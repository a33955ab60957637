"""The general set: its file, and the fifth of it that is only measured on."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.core import Generation, TrainingFailed
from service.learning.general_set import GENERAL, GeneralSet
from tests.support.logged_texts import WHO

Text = tuple[list[int], list[int]]


def texts(count: int, seed: int = 0, vocabulary: int = 97) -> list[Text]:
    rng = random.Random(seed)

    def tokens() -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(rng.randint(1, 12))]

    return [(tokens(), tokens()) for _ in range(count)]


def pairs(generations: list[Generation]) -> list[Text]:
    return [(list(g.prompt.tokens), list(g.output)) for g in generations]


@pytest.mark.parametrize("vocabulary", [97, 200_000])
def test_a_general_set_comes_back_from_its_file(tmp_path: Path, vocabulary: int) -> None:
    written = texts(50, vocabulary=vocabulary)
    GeneralSet.of(written).save(tmp_path / "general.npz")
    loaded = GeneralSet.load(tmp_path / "general.npz")
    both = [*loaded.generations(WHO, golden=True), *loaded.generations(WHO, golden=False)]
    assert sorted(pairs(both)) == sorted(written)
    assert all(
        g.provenance == WHO and g.targets is None and (g.prompt.domain, g.prompt.kind) == (None, GENERAL) for g in both
    )
    assert all(g.prompt.sampling.greedy for g in both)
    assert len({g.id for g in both}) == len(both)
    with np.load(tmp_path / "general.npz") as stored:
        assert set(stored) == {"tokens", "prompt_lengths", "lengths"}
        assert stored["tokens"].dtype == (np.uint16 if vocabulary < 2**16 else np.uint32)


def test_a_general_set_that_does_not_add_up_is_refused(tmp_path: Path) -> None:
    good = GeneralSet.of(texts(5))
    file = tmp_path / "g.npz"
    with pytest.raises(TrainingFailed, match="cannot be read"):
        GeneralSet.load(file)
    file.write_bytes(b"not an archive")
    with pytest.raises(TrainingFailed, match="cannot be read"):
        GeneralSet.load(file)
    np.savez(file, tokens=good.tokens)
    with pytest.raises(TrainingFailed, match="cannot be read"):
        GeneralSet.load(file)
    for wrong in (
        replace(good, tokens=good.tokens[:-1]),
        replace(good, prompt_lengths=good.lengths + 1),
        replace(good, prompt_lengths=good.prompt_lengths[:-1]),
        replace(good, prompt_lengths=-good.prompt_lengths),
    ):
        wrong.save(file)
        with pytest.raises(TrainingFailed, match="inconsistent"):
            GeneralSet.load(file)


def test_a_fixed_fifth_is_never_trained_on() -> None:
    written = texts(400)
    # The same prompts answered twice: each prompt belongs to one split only.
    general = GeneralSet.of([*written, *[(prompt, [1, *output]) for prompt, output in written]])
    golden, rest = general.generations(WHO, golden=True), general.generations(WHO, golden=False)
    assert not {g.prompt.tokens for g in golden} & {g.prompt.tokens for g in rest}
    assert 0.13 < len(golden) / (len(golden) + len(rest)) < 0.27
    shuffled = GeneralSet.of(random.Random(1).sample(written, len(written)))
    assert {g.id for g in shuffled.generations(WHO, golden=True)} <= {g.id for g in golden}


def test_any_first_n_are_the_same_texts_every_time() -> None:
    written = texts(60)
    one = GeneralSet.of(written).generations(WHO, golden=False)
    other = GeneralSet.of(reversed(written)).generations(WHO, golden=False)
    assert pairs(one) == pairs(other)
