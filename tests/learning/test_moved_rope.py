"""A pair whose RoPE base is inside `rope_parameters` is trained as it is with the base outside: by the real child process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.core import Sampling
from service.models import catalog
from service.models.fingerprint import model_fingerprint
from service.models.pair import load_model
from tests.support.databases import Databases, lent
from tests.support.logged_texts import served
from tests.support.moved_rope import with_moved_rope
from tests.support.training_child import Home, LoggedPair, child, log_pair, make_logged_pair, of_type

FAR = 37.0
"""A base unlike mlx-lm's default, with which a tiny model's text is another one."""


@pytest.fixture
def databases(request: pytest.FixtureRequest) -> Iterator[Databases]:
    yield from lent(request)


def tiny(root: Path) -> LoggedPair:
    pair = make_logged_pair(root / "pair", range(60))
    for folder in (pair.target, pair.draft):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_theta": FAR}))
    who = replace(pair.who, target=model_fingerprint(pair.target), draft=model_fingerprint(pair.draft))
    return replace(pair, who=who, logged=[replace(each, provenance=who) for each in pair.logged])


def bundled(root: Path) -> LoggedPair:
    """The bundled pair, and 40 generations of a few tokens, most of which the child computes distributions for."""
    folders = [catalog.resolve(name, root / "home") for name in ("smollm2-135m", "smollm2-135m-draft")]
    target, draft = (load_model(folder).model for folder in folders)
    logged = served(target, draft, [Sampling(max_tokens=12)] * 40, k=3, vocabulary=49152)
    (root / "pair").mkdir()
    return log_pair(
        root / "pair", (folders[0], folders[1]), [replace(each, targets=None) for each in logged], logged[:20]
    )


@pytest.mark.parametrize(
    "make",
    [
        tiny,
        pytest.param(
            bundled,
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(not catalog.entries()[0].installed, reason="needs the bundled weights"),
            ],
        ),
    ],
)
def test_the_child_learns_the_same(make: Callable[[Path], LoggedPair], tmp_path: Path, databases: Databases) -> None:
    pair = make(tmp_path)
    folders = [with_moved_rope(folder, tmp_path / "moved" / folder.name) for folder in (pair.target, pair.draft)]
    moved = replace(pair, target=folders[0], draft=folders[1])
    results: list[tuple[list[float], list[np.ndarray]]] = []
    for name, each in (("old", pair), ("new", moved)):
        root = tmp_path / name
        root.mkdir()
        home = Home(each, root, databases.empty(root))
        try:
            spec = home.spec(training={"epochs": 1, "replay": 0.0, "learning_rate": 1e-3})
            with child(spec) as running:
                messages = running.read_to_end()
        finally:
            home.database.close()
        assert messages[-1]["type"] == "done", messages[-1]
        computed = sorted((home.cache / each.who.target).iterdir())
        assert computed, "the target was not asked"
        results.append(
            ([step["loss"] for step in of_type(messages, "progress")], [np.load(file)["logprobs"] for file in computed])
        )
    (losses, targets), (moved_losses, moved_targets) = results
    assert moved_losses == pytest.approx(losses, rel=1e-5)
    for old, new in zip(targets, moved_targets, strict=True):
        np.testing.assert_allclose(new.astype(np.float32), old.astype(np.float32), rtol=1e-3)
