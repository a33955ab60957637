"""`eval score` on a real store, and the evaluation commands as typed."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from service.cli.root import app
from service.core import AdapterRef, BadRequest, Generation, RedraftError, RunState, Trigger
from service.evaluation.score import ALL, run_score
from service.evaluation.target_outputs import target_generations
from service.learning import lora
from service.learning.scoring.acceptance import acceptance
from service.learning.scoring.expected import expected_calls
from service.learning.scoring.simulate import simulate_rounds
from service.models.pair import Pair, load_model, load_pair
from service.settings import Settings
from service.store.artifacts import publish
from service.store.stores import Stores, open_stores
from tests.support.tiny_server import prompts
from tests.support.typed import leaves


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> Pair:
    return load_pair(*models)


@pytest.fixture(scope="module")
def logged_home(settings: Settings, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A home whose log holds greedy and sampled answers."""
    home = tmp_path_factory.mktemp("scored")
    chosen = settings.model_copy(update={"home": home})
    asked = list(prompts(60, 5))
    greedy = target_generations(pair, asked, home, temperature=0.0, max_tokens=12)
    hot = target_generations(pair, asked, home, temperature=1.0, max_tokens=12)
    assert pair.draft is not None
    cold = [
        one.generation for one in simulate_rounds(pair.draft.model, greedy, k=2, adapter=0, vocabulary=pair.vocabulary)
    ]
    stores = open_stores(chosen, create=True)
    try:
        logged_answers = [
            replace(g, id=f"{name}{i}") for name, each in (("g", cold), ("h", hot)) for i, g in enumerate(each)
        ]
        # Each prompt is scored once, with its newest answer.
        logged_answers = [g for i, g in enumerate(logged_answers) if (i % 60) % 2 == (i >= 60)]
        stores.generations.add(logged_answers).result()
    finally:
        stores.close()
    return chosen


@pytest.fixture
def stores(logged_home: Settings) -> Iterator[Stores]:
    opened = open_stores(logged_home)
    yield opened
    opened.close()


def adapter(stores: Stores, pair: Pair, draft: Path, folder: Path) -> AdapterRef:
    model, who = load_model(draft).model, pair.provenance
    shape = lora.wrap(model, rank=4, scale=2.0, seed=1)
    noisy = [
        (name, 0.1 * mx.random.normal(array.shape, key=mx.random.key(i)))
        for i, (name, array) in enumerate(leaves(model.trainable_parameters()))
    ]
    model.load_weights(noisy, strict=False)
    lora.save(model, shape, folder / "made.part", draft=who.draft, target=who.target)
    run = stores.runs.claim(trigger=Trigger.MANUAL, who=who, parent=0, limit=1)
    assert run is not None
    ref = stores.adapters.add(
        run_id=run.id,
        fencing=run.fencing,
        folder=stores.adapters.root / "made",
        sha256=publish(folder / "made.part", stores.adapters.root / "made"),
        rank=shape.rank,
        scale=shape.scale,
        keys=shape.keys,
        draft=who.draft,
        parent=0,
    )
    stores.runs.move(run.id, run.fencing, RunState.FAILED, error="a test's")
    return ref


def held_out(stores: Stores, pair: Pair) -> list[Generation]:
    return stores.generations.held_out(pair.provenance, 100)


def test_scores_are_separate_by_adapter_length_and_setting(
    stores: Stores, pair: Pair, models: tuple[Path, Path], tmp_path: Path
) -> None:
    ref = adapter(stores, pair, models[1], tmp_path)
    found = run_score(stores, models, [0, ref.id], [0, 1, 3])
    assert [(one.adapter, one.sampling) for one in found] == [
        (version, name) for version in (0, ref.id) for name in (ALL, "greedy", "unseeded")
    ]
    by_name = {(one.adapter, one.sampling): one for one in found}
    whole = by_name[0, ALL]
    assert whole.generations == by_name[0, "greedy"].generations + by_name[0, "unseeded"].generations > 5
    assert [f.k for f in whole.forecasts] == [0, 1, 3]
    assert whole.forecasts[0].tokens_per_call == 1.0
    logged_answers = held_out(stores, pair)
    assert pair.draft is not None
    rates = acceptance(pair.draft.model, logged_answers, vocabulary=pair.vocabulary)
    calls = sum(expected_calls(one.rates, 3) for one in rates)
    assert whole.forecasts[2].tokens_per_call == pytest.approx(whole.tokens / calls, rel=1e-6)
    assert by_name[ref.id, ALL].forecasts[2] != whole.forecasts[2]
    # The same costs for all, so speed follows tokens per call.
    for at in (1, 2):
        speeds = [by_name[v, ALL].forecasts[at] for v in (0, ref.id)]
        ratio = (speeds[0].tokens_per_second or 0) / (speeds[1].tokens_per_second or 1)
        assert ratio == pytest.approx(speeds[0].tokens_per_call / speeds[1].tokens_per_call)


def test_a_reduced_vocabulary_limits_the_proposals(stores: Stores, pair: Pair, models: tuple[Path, Path]) -> None:
    def greedy(reduced: int | None) -> tuple[float, ...]:
        found = run_score(stores, models, [0], [2], proposable=reduced, rows=None)
        return next(one.forecasts[0].rates for one in found if one.sampling == "greedy")

    whole = greedy(0)
    assert whole == greedy(None), "this draft ships without a list"
    assert whole == pytest.approx(greedy(pair.vocabulary))
    assert greedy(4) != pytest.approx(whole)
    assert greedy(4)[0] > 0, "a row's own tokens can still be proposed"


def test_unscorable_requests_are_refused_with_the_reason(
    stores: Stores, settings: Settings, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match="draft lengths"):
        run_score(stores, models, [0], [17])
    empty = open_stores(settings.model_copy(update={"home": tmp_path}), create=True)
    try:
        with pytest.raises(RedraftError, match="serve some requests"):
            run_score(empty, models, [0], [1])
    finally:
        empty.close()


def typed(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def config(settings: Settings, folder: Path) -> Path:
    path = folder / "c.toml"
    path.write_text(
        f'home = "{settings.home}"\n[models]\ntarget = "{settings.models.target}"\ndraft = "{settings.models.draft}"\n'
        "[training]\nmin_cases = 60\nmin_tokens = 150\nepochs = 1\nrank = 4\nreplay = 0.0\n"
        "[gate]\nmin_prompts = 2\nmin_tokens = 20\n"
    )
    return path


def written(folder: Path, name: str, count: int, seed: int) -> Path:
    path = folder / f"{name}.jsonl"
    lines = ({"id": line.id, "domain": name, "prompt": line.prompt} for line in prompts(count, seed))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.nightly
def test_commands(logged_home: Settings, tmp_path: Path) -> None:
    toml, a, b = config(logged_home, tmp_path), written(tmp_path, "a", 30, 7), written(tmp_path, "b", 20, 8)
    files = [tmp_path / name for name in ("o.json", "o.md", "o.png")]
    typed("eval", "score", "--config", toml, "--k", "1,2", "--adapter", "bare", "--no-speed", "--json", files[0])
    assert json.loads(files[0].read_text())["scores"][0]["adapter"] == 0

    options = ["--max-tokens", 6, "--config", toml, "--json", files[0], "--markdown", files[1]]
    typed("eval", "stream", f"{a}:20", b, a, "--window", 5, "--png", files[2], *options)
    found = json.loads(files[0].read_text())
    assert found["command"].startswith("redraft eval stream a.jsonl:20 b.jsonl a.jsonl --window 5")
    assert [part["requests"] for part in found["parts"]] == [20, 20, 10]
    assert found["machine"]["cores"] >= 1
    assert files[2].stat().st_size > 5000
    document = files[1].read_text()
    assert document.count("## ") == 1
    assert not re.search(r"/\w+/", document.replace("tokens/s", ""))
