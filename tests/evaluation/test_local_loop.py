"""The lifecycle without a server, at toy size."""

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from service.core import AdapterState
from service.evaluation.local_loop import History, LocalLoop
from service.evaluation.progress import silent
from service.evaluation.prompts import PromptLine
from service.evaluation.target_outputs import greedy_answers
from service.evaluation.training_run import DRAFT_LENGTH
from service.learning.scoring.simulate import simulate_rounds
from service.models import vocabulary
from service.models.heads import full_head
from service.models.pair import load_pair
from service.settings import GateSettings, Settings, StoreSettings, TrainingSettings, sqlite_url
from tests.support.tiny_server import prompts


def prompts_of(domain: str, count: int) -> list[PromptLine]:
    return [PromptLine(f"{domain}{line.id}", domain, line.prompt + domain) for line in prompts(count, 0)]


def test_a_service_s_database_and_adapters_are_left_alone(
    settings: Settings, models: tuple[Path, Path], tmp_path: Path
) -> None:
    served = tmp_path / "adapters" / "run-1-1"
    served.mkdir(parents=True)
    (served / "adapters.safetensors").write_bytes(b"of another database")
    store = StoreSettings(url=sqlite_url(tmp_path / "service.db"), adapters=served.parent)
    chosen = settings.model_copy(update={"store": store})
    loop = LocalLoop(chosen, load_pair(*models), models, None, tmp_path / "loop")
    loop.close()
    assert (served / "adapters.safetensors").is_file()
    assert not (tmp_path / "service.db").exists() and (tmp_path / "loop" / "redraft.db").is_file()
    LocalLoop(
        chosen, load_pair(*models), models, None, tmp_path / "loop"
    ).close()  # it has left: nobody waits for its lease


def test_a_loop_that_nobody_asks_anything_does_not_practise(
    settings: Settings, models: tuple[Path, Path], tmp_path: Path
) -> None:
    practising = settings.model_copy(update={"training": TrainingSettings(practice=True)})
    loop = LocalLoop(practising, load_pair(*models), models, None, tmp_path / "loop")
    try:
        assert not loop.supervisor.practice().on
    finally:
        loop.close()


@pytest.mark.nightly
def test_the_loop_learns_from_what_it_is_given(
    settings: Settings, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.evaluation.local_loop.RENEW_SECONDS", 0.2)
    monkeypatch.setattr("service.store.processes.members.LEASE_SECONDS", 1.0)
    training = TrainingSettings(
        run_here=False, enabled=False, min_cases=60, min_tokens=300, epochs=8, rank=8, learning_rate=2e-2
    )
    chosen = settings.model_copy(
        update={"training": training, "gate": GateSettings(min_prompts=9, min_tokens=100, bootstrap=200)}
    )
    reduced = Path(shutil.copytree(models[1], tmp_path / "draft"))
    vocabulary.write(range(40, 240), reduced)
    models = models[0], reduced
    pair = load_pair(*models)
    asked = prompts_of("a", 60)
    requests = greedy_answers(pair, asked, settings.home, "", max_tokens=16, rows=16, on_progress=silent)
    loop, history = LocalLoop(chosen, pair, models, None, tmp_path / "loop"), History()
    try:
        time.sleep(1.5)  # a stream takes longer than a lease
        loop.serve(requests, history)
        (run,) = history.runs
        assert run.promoted and history.serving == [loop.drafts.active] == [1]
        plain = simulate_rounds(loop.model(0), requests, k=DRAFT_LENGTH, adapter=0, vocabulary=pair.vocabulary)
        adapted = simulate_rounds(loop.model(1), requests, k=DRAFT_LENGTH, adapter=1, vocabulary=pair.vocabulary)
        assert history.agreed == [one.agreed for one in (*plain[: run.at], *adapted[run.at :])], (
            "each request is drafted by what served then"
        )
        assert sum(one.agreed for one in adapted) > sum(one.agreed for one in plain)
        assert [g.rounds[0].adapter for g in loop.stores.generations.by_ids([r.id for r in requests])][::-1] == [
            int(i >= run.at) for i in range(len(requests))
        ]
        (ref,) = loop.supervisor.adapters()
        assert ref.state is AdapterState.ACTIVE
        own = vocabulary.read(ref.folder)
        assert own is not None and own != list(range(40, 240))
        for model, ids in ((loop.model(0), range(40, 240)), (loop.drafts.model, own)):
            with full_head(model) as keeps:
                assert keeps is not None and set(np.flatnonzero(keeps).tolist()) == set(ids), "as it would serve"
    finally:
        loop.close()
