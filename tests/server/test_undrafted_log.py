"""A real server whose log holds only undrafted generations: its run learns from them."""

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from service.core import Prompt, Sampling
from service.models.pair import load_pair
from service.settings import load_settings
from service.store.stores import open_stores
from tests.support.batches import decode
from tests.support.tiny_server import tiny_server, write_pair

SAMPLINGS = [Sampling(max_tokens=24), Sampling(temperature=0.8, seed=5, max_tokens=24), Sampling(temperature=0.8)]


@pytest.mark.nightly
def test_undrafted_generations_are_learnt_from(tmp_path: Path) -> None:
    folders = write_pair(tmp_path)
    pair = load_pair(*folders)
    assert pair.draft is not None
    draft = pair.draft
    rng = random.Random(1)
    prompts = [
        Prompt(
            tuple(rng.randrange(2, pair.vocabulary) for _ in range(rng.randint(2, 20))),
            replace(SAMPLINGS[i % 3], max_tokens=24),
            first_user=f"question {i}",
        )
        for i in range(60)
    ]
    rows = decode(pair.target.model, draft.model, prompts, k=0, vocabulary=pair.vocabulary, collect=True)
    made = [row.generation(pair.provenance) for row in rows]
    generations = [replace(g, id=f"g{i}") for i, g in enumerate(made) if g is not None]
    assert not [case for g in generations for case in g.cases]

    rules = {"enabled": True, "min_cases": 100, "min_tokens": 400, "idle_seconds": 0.0}
    server = tiny_server(tmp_path, folders, training=rules)
    stores = open_stores(load_settings(server.config), create=True)
    stores.generations.add(generations).result()
    undrafted_tokens = stores.training_texts.untrained(pair.provenance).undrafted
    assert undrafted_tokens > 35 * 24 - 100, "the training split"

    server.start()
    try:
        end = time.monotonic() + 60
        while not stores.runs.latest(1) or not stores.runs.latest(1)[0].state.over:
            assert time.monotonic() < end, server.tail()
            time.sleep(0.1)
    finally:
        assert server.stop() == 0

    (run,) = stores.runs.latest(9)
    assert run.error is None, run.error
    waiting = {g.id for g in stores.training_texts.claimed(run.id)}
    assert sum(len(g.output) for g in generations if g.id in waiting) == undrafted_tokens
    assert run.state.judged and run.cases == 0
    assert stores.training_texts.untrained(pair.provenance).undrafted == 0
    found = {g.id: g for g in stores.generations.by_ids([g.id for g in generations])}
    assert all((found[g.id].rounds, found[g.id].cases) == (g.rounds, ()) for g in generations)
    stores.close()
