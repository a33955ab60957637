"""The target's distribution is computed afterwards, once."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from service.core import Sampling
from service.learning.examples import unpack
from service.learning.targets import TargetCache, compute_targets, remove_files, with_targets
from tests.support.logged_texts import VOCABULARY, random_texts, served
from tests.support.oracle import noisy_copy, tiny_llama


def test_it_equals_the_models_distribution() -> None:
    model = tiny_llama(1)
    texts = random_texts(9, seed=3)
    for g, targets in zip(texts, compute_targets(model, texts, vocabulary=VOCABULARY), strict=True):
        logits = np.array(model(mx.array([[*g.prompt.tokens, *g.output]])))[0, len(g.prompt.tokens) - 1 : -1]
        logp = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        ids, top, tail = unpack(targets)
        assert targets.positions == len(g.output)
        order = np.argsort(-logp, axis=-1)[:, :32]
        expected = np.take_along_axis(logp, order, -1)
        assert np.allclose(top, expected, atol=5e-3)
        assert np.allclose(np.take_along_axis(logp, ids, -1), expected, atol=1e-5)
        assert np.allclose(np.exp(tail), 1 - np.exp(expected).sum(-1), atol=1e-3)


def test_it_equals_what_the_engine_logs() -> None:
    target = tiny_llama(1)
    samplings = [Sampling(max_tokens=20), Sampling(temperature=1.0, max_tokens=20, seed=4)] * 3
    logged = served(target, noisy_copy(target, 2, 0.3), samplings, k=3)
    for g, targets in zip(logged, compute_targets(target, logged, vocabulary=VOCABULARY), strict=True):
        assert g.targets is not None
        ours, theirs = unpack(targets), unpack(g.targets)
        assert np.allclose(ours[1], theirs[1], atol=2e-2)
        assert np.allclose(np.exp(ours[2]), np.exp(theirs[2]), atol=2e-3)
        assert (ours[0] == theirs[0]).mean() > 0.99


class Loader:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.loads = 0

    def __call__(self) -> tuple[nn.Module, int]:
        self.loads += 1
        return self.model, VOCABULARY


@pytest.fixture
def loader() -> Loader:
    return Loader(tiny_llama(1))


def test_the_second_run_reads_the_cache(tmp_path: Path, loader: Loader) -> None:
    texts = random_texts(6, seed=3)
    cache = TargetCache(tmp_path, "t" * 64)
    first = with_targets(texts, cache=cache, load_target=loader)
    assert loader.loads == 1
    # The same texts in another order and with other ids.
    again = with_targets([replace(g, id="other") for g in reversed(texts)], cache=cache, load_target=loader)
    assert loader.loads == 1
    assert [g.targets for g in reversed(again)] == [g.targets for g in first]
    assert all(g.targets is not None for g in first)
    with_targets([*texts, *random_texts(1, seed=99)], cache=cache, load_target=loader)
    assert loader.loads == 2


def test_targets_that_were_logged_are_used_as_they_are(tmp_path: Path, loader: Loader) -> None:
    texts = random_texts(2, seed=3)
    logged = replace(texts[0], targets=compute_targets(tiny_llama(5), texts[:1], vocabulary=VOCABULARY)[0])
    cache = TargetCache(tmp_path, "t" * 64)
    assert with_targets([logged], cache=cache, load_target=loader) == [logged]
    assert loader.loads == 0


def test_another_target_has_other_files(tmp_path: Path, loader: Loader) -> None:
    texts = random_texts(2, seed=3)
    other = Loader(tiny_llama(5))
    ours = with_targets(texts, cache=TargetCache(tmp_path, "a" * 64), load_target=loader)
    theirs = with_targets(texts, cache=TargetCache(tmp_path, "b" * 64), load_target=other)
    assert other.loads == 1
    assert ours[0].targets != theirs[0].targets


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"\0" * len(b)])
def test_a_damaged_file_is_computed_again(tmp_path: Path, loader: Loader, damage: Callable[[bytes], bytes]) -> None:
    texts = random_texts(3, seed=3)
    cache = TargetCache(tmp_path, "t" * 64)
    first = with_targets(texts, cache=cache, load_target=loader)
    files = sorted(cache.folder.iterdir())
    assert len(files) == 3
    files[1].write_bytes(damage(files[1].read_bytes()))
    again = with_targets(texts, cache=cache, load_target=loader)
    assert loader.loads == 2
    changed = [(one.targets, other.targets) for one, other in zip(first, again, strict=True) if one != other]
    assert len(changed) <= 1, "those whose files are whole are read"
    # By itself a text is computed in a call of another shape.
    for one, other in changed:
        assert one is not None and other is not None and one.ids == other.ids
        mine, theirs = (np.frombuffer(each.logprobs, dtype="<f2").astype(np.float32) for each in (one, other))
        assert np.abs(mine - theirs).max() < 0.02
    assert with_targets(texts, cache=cache, load_target=loader) == again
    assert loader.loads == 2


def test_files_are_removed_under_a_child_that_writes_them(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = random_texts(3, seed=3)
    caches = [TargetCache(tmp_path, name * 64) for name in "ab"]
    for cache in caches:
        with_targets(texts, cache=cache, load_target=loader)
    (caches[0].folder / "of a child that was killed.part").write_bytes(b"x")
    write = np.savez

    def write_and_remove(file: BinaryIO, **arrays: np.ndarray) -> None:
        write(file, **arrays)  # pyright: ignore[reportArgumentType]
        remove_files(tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", write_and_remove)
        (made,) = with_targets(random_texts(1, seed=99), cache=caches[0], load_target=loader)
    assert made.targets is not None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    loads = loader.loads
    with_targets(texts, cache=caches[0], load_target=loader)
    assert loader.loads == loads + 1
    assert len(list(caches[0].folder.iterdir())) == 3


def test_a_text_without_prompt_or_output_stays_without(tmp_path: Path, loader: Loader) -> None:
    text = random_texts(1, seed=3)[0]
    odd = [replace(text, output=()), replace(text, prompt=replace(text.prompt, tokens=()))]
    assert with_targets(odd, cache=TargetCache(tmp_path, "t"), load_target=loader) == odd
    assert loader.loads == 0
