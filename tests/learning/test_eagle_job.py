"""Training jobs of an EAGLE head: every kind of job loads the target too."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from service.core import AdapterRef, AdapterState, TrainingFailed
from service.learning import lora
from service.learning.export import export_adapter, export_fused
from service.learning.loading import load_draft, training_shape
from service.learning.scoring.score import score
from service.learning.scoring.simulate import simulate_rounds
from service.learning.spec import parse
from service.models.fingerprint import folder_sha256
from service.models.pair import load_pair, mlx_lm_runs
from service.models.training_memory import TrainingBytes, training_bytes
from service.models.weights import bytes_in_memory
from service.store.log.generations import Generations
from tests.support.eagle_models import plain_llama
from tests.support.logged_texts import VOCABULARY
from tests.support.model_folders import save_model
from tests.support.training_child import Home, LoggedPair, make_logged_head, of_type, perform


@pytest.fixture(scope="module")
def logged_pair(tmp_path_factory: pytest.TempPathFactory) -> LoggedPair:
    return make_logged_head(tmp_path_factory.mktemp("logged_pair"))


def test_a_run_of_a_head_and_jobs_with_its_adapter(home: Home, logged_pair: LoggedPair) -> None:
    spec = home.spec(training={"epochs": 4}, gate={"min_prompts": 1, "min_tokens": 1})
    messages = perform(spec)
    assert messages[-1]["type"] == "done", messages[-1]
    (candidate,), (scores,) = of_type(messages, "candidate"), of_type(messages, "scores")
    assert "fuse" in candidate["keys"]
    folder = Path(candidate["folder"])
    pair = load_pair(logged_pair.target, logged_pair.draft)
    assert pair.draft is not None
    model = pair.draft.model
    held_out = Generations(home.database).held_out(logged_pair.who, 100)

    def calls(scored: list[dict[str, list[float]]]) -> np.ndarray:
        return np.array([s["calls"] for s in scored])

    def expected() -> np.ndarray:
        return np.array([s.calls for s in score(model, held_out, k=3, vocabulary=VOCABULARY)])

    assert np.allclose(calls(scores["scores"]["0"]), expected(), rtol=1e-4)
    lora.attach(model, folder, logged_pair.who.draft)
    assert np.allclose(calls(scores["scores"]["candidate"]), expected(), rtol=1e-4)
    assert (calls(scores["scores"]["candidate"]).sum(axis=0) < calls(scores["scores"]["0"]).sum(axis=0)).all()

    job = {key: spec[key] for key in ("url", "draft", "target", "training", "k", "provenance")}
    ids = [g.id for g in held_out]
    asked = {"kind": "score", "adapters": {"0": None, "1": str(folder)}, "generations": ids}
    (again,) = of_type(perform({**job, **asked}), "scores")
    order = [[s["generation"] for s in again["scores"]["1"]].index(id) for id in ids]
    assert np.allclose(calls(again["scores"]["1"])[order], expected(), rtol=1e-4)


def test_every_kind_of_job_loads_the_target(home: Home, logged_pair: LoggedPair, tmp_path: Path) -> None:
    spec = home.spec()
    other = save_model(plain_llama(7), tmp_path / "other")
    for kind, extra in (
        ("train", {}),
        ("score", {"adapters": {"0": None}, "generations": ["g0"]}),
    ):
        draft = load_draft(parse(json.dumps(spec | extra | {"kind": kind})))
        usable = [g for g in logged_pair.logged[:3] if g.targets is not None]
        assert simulate_rounds(draft.model, usable, k=3, adapter=0, vocabulary=VOCABULARY)
        with pytest.raises(TrainingFailed, match="the target in other is not the served one"):
            load_draft(parse(json.dumps(spec | extra | {"kind": kind, "target": str(other)})))


def test_memory_counts_the_target_and_every_step(home: Home, logged_pair: LoggedPair) -> None:
    job = parse(json.dumps(home.spec()))
    target, draft = (bytes_in_memory(folder, widen=True) for folder in (logged_pair.target, logged_pair.draft))

    def planned(folder: Path, steps: int = 3) -> TrainingBytes:
        shape = training_shape(job.target, folder, rank=8, steps=steps)
        return training_bytes(shape, rows=4, length=64, recompute=False, chunk=512)

    assert planned(logged_pair.draft).weights == target + draft
    one, two, three = (planned(logged_pair.draft, steps).stored for steps in (1, 2, 3))
    assert one < two < three and abs((three - two) - (two - one)) <= 2
    alone = planned(logged_pair.target)
    assert alone.weights == target and alone == planned(logged_pair.target, 1), "no head: one step"


def test_an_adapter_is_exported_and_folded_in(logged_pair: LoggedPair, tmp_path: Path) -> None:
    pair = load_pair(logged_pair.target, logged_pair.draft)
    assert pair.draft is not None
    shape = lora.wrap(pair.draft.model, rank=2, scale=2.0, seed=0)
    lora.save(pair.draft.model, shape, tmp_path / "made", draft=logged_pair.who.draft, target=logged_pair.who.target)
    ref = AdapterRef(
        id=1,
        folder=tmp_path / "made",
        sha256=folder_sha256(tmp_path / "made"),
        rank=2,
        scale=2.0,
        keys=shape.keys,
        draft=logged_pair.who.draft,
        parent=0,
        run=None,
        state=AdapterState.CANDIDATE,
        created_at=datetime.now(UTC),
    )
    export_adapter(ref, tmp_path / "copy")
    assert folder_sha256(tmp_path / "copy") == ref.sha256
    export_fused(ref, logged_pair.draft, tmp_path / "fused")
    assert not mlx_lm_runs(tmp_path / "fused")
    assert load_pair(logged_pair.target, tmp_path / "fused").draft is not None
