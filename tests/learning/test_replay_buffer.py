"""The replay buffer and the general set that it starts from."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.core import Generation, TrainingFailed
from service.learning.buffer import GENERAL, GeneralSet, replay, replay_count
from tests.support.logged_texts import WHO, generation

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
        with pytest.raises(TrainingFailed, match="add up"):
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


@pytest.mark.parametrize("share", [0.0, 0.2, 0.25, 0.5, 0.9])
def test_the_share_is_of_all_examples(share: float) -> None:
    count = replay_count(300, share)
    assert count / (300 + count) == pytest.approx(share, abs=2e-3)


def test_a_share_of_one_replays_as_much_as_there_is_new() -> None:
    assert replay_count(300, 1.0) == 300


def stored(domain: str | None, count: int) -> list[Generation]:
    return [generation([1], [2], id=f"{domain}-{i}", domain=domain) for i in range(count)]


def general_texts(count: int) -> list[Generation]:
    made = [generation([1], [2], id=f"{GENERAL}-{i}") for i in range(count)]
    return [replace(one, prompt=replace(one.prompt, kind=GENERAL)) for one in made]


def drawn(
    fresh: list[Generation], reservoir: list[Generation], general: int, share: float = 0.5
) -> dict[str | None, int]:
    def sample(count: int) -> list[Generation]:
        # The store returns them in the order of the log, not of the sample.
        chosen = {g.id for g in random.Random(0).sample(reservoir, min(count, len(reservoir)))}
        return [g for g in reservoir if g.id in chosen]

    found = replay(fresh, share=share, general=general_texts(general), reservoir=sample, seed=1)
    assert len({g.id for g in found}) == len(found)
    domains = [g.prompt.domain for g in found]
    assert all((g.prompt.kind == GENERAL) == (g.prompt.domain is None) for g in found)
    return {domain: domains.count(domain) for domain in set(domains)}


def test_replay_fills_up_in_equal_parts() -> None:
    fresh = stored("sql", 60)
    past = [*stored("maths", 200), *stored("chat", 200), *stored("sql", 300)]
    parts = drawn(fresh, past, general=500)
    assert sum(parts.values()) == 60
    assert parts == {None: 20, "chat": 20, "maths": 20}


def test_a_service_that_saw_one_topic_replays_the_general_set() -> None:
    assert drawn(stored("sql", 60), stored("sql", 300), general=500) == {None: 60}


def test_a_client_may_call_its_domain_like_a_kind() -> None:
    past = [*stored(GENERAL, 200), *stored("cluster:00000000000000aa", 200), *stored("untagged", 200)]
    kinds = [generation([1], [2], id=f"kind-{i}") for i in range(200)]
    past += [replace(one, prompt=replace(one.prompt, kind="cluster:00000000000000aa")) for one in kinds]
    found = replay(stored("sql", 100), share=0.5, general=general_texts(500), reservoir=lambda count: past, seed=1)
    parts = Counter((g.prompt.domain, g.prompt.kind) for g in found)
    assert set(parts.values()) == {20} and len(parts) == 5


def test_one_part_makes_up_for_the_other() -> None:
    assert drawn(stored("sql", 60), stored("maths", 300), general=4) == {None: 4, "maths": 56}
    assert drawn(stored("sql", 60), stored("maths", 5), general=500) == {None: 55, "maths": 5}
    assert drawn(stored("sql", 60), [], general=7) == {None: 7}
    assert drawn(stored("sql", 60), [], general=0) == {}


def test_without_a_general_set_the_log_alone_is_replayed() -> None:
    fresh = stored("sql", 20)
    assert drawn(fresh, stored("sql", 70)[20:], general=0) == {"sql": 20}
    # New texts of this run are not also replayed.
    assert drawn(fresh, fresh, general=0) == {}


def test_without_replay_nothing_is_sampled() -> None:
    def reservoir(count: int) -> list[Generation]:
        raise AssertionError(count)

    assert replay(stored("sql", 9), share=0.0, general=general_texts(3), reservoir=reservoir, seed=0) == []
