"""A stream at toy size: the loop itself on given texts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from service.core import AdapterState, BadRequest
from service.evaluation.charts import draw_lines
from service.evaluation.local_loop import Course, Loop, answered
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import DRAFTED
from service.evaluation.stream_result import NO_REPLAY, ONLINE, STATIC, UNGUARDED, Best, Part, Stream, parts_of
from service.evaluation.stream import run_stream
from service.learning.rounds import logged
from service.models import vocabulary
from service.models.heads import full_head
from service.models.pair import load_pair
from service.settings import GateSettings, Settings, TrainingSettings
from tests.support.tiny_server import prompts


def lines(count: int, seed: int, domain: str) -> list[PromptLine]:
    return [PromptLine(f"{domain}{line.id}", domain, line.prompt + domain) for line in prompts(count, seed)]


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": i, "domain": "d", "prompt": f"say {i}"}) + "\n" for i in range(count)))
    return path


def test_a_file_continues_where_it_stopped(tmp_path: Path) -> None:
    a, b = write(tmp_path / "math.train.jsonl", 7), write(tmp_path / "sql.jsonl", 3)
    parts = parts_of([f"{a}:3", str(b), f"{a}:2", str(a)])
    assert [part.topic for part in parts] == ["math", "sql", "math", "math"]
    assert [[line.id for line in part.lines] for part in parts] == [
        ["0", "1", "2"], ["0", "1", "2"], ["3", "4"], ["5", "6"]
    ]  # fmt: skip
    with pytest.raises(BadRequest, match="no more"):
        parts_of([str(a), f"{a}:1"])


def arm(agreed: list[int]) -> Course:
    return Course(agreed=agreed, tokens=[10] * len(agreed), calls=[5] * len(agreed), serving=[0, 0, 0])


def test_the_report_of_a_stream() -> None:
    parts = tuple(Part(topic, [PromptLine("", topic, "x")] * 10) for topic in ("a", "b", "a"))
    static, online = [5] * 30, [5] * 4 + [7] * 6 + [5] * 10 + [7] * 10
    found = Stream(
        parts,
        2,
        {STATIC: arm(static), ONLINE: arm(online), NO_REPLAY: arm(static), UNGUARDED: arm(static)},
        [Best(0.7, 0.5, 0.1), Best(0.51, 0.5, -0.01), Best(0.7, 0.5, 0.1)],
        {
            STATIC: [{"a": 0.5, "b": 0.5}] * 3,
            ONLINE: [{"a": 0.7, "b": 0.5}, {"a": 0.6, "b": 0.55}, {"a": 0.7, "b": 0.5}],
            NO_REPLAY: [{"a": 0.5, "b": 0.5}] * 3,
            UNGUARDED: [{"a": 0.5, "b": 0.5}] * 3,
        },
    )
    assert found.moving(ONLINE)[:6] == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.6, 0.7])
    assert found.part_means(ONLINE)[0] == pytest.approx((0.62, 0.7))
    # The best gain of b is not significant; the second a is reported as soon as its window is complete.
    assert found.recovered(ONLINE) == [6, None, 2]
    assert found.recovered(NO_REPLAY) == [None, None, None]
    assert found.gained(ONLINE) == [pytest.approx(1.0), None, pytest.approx(1.0)]
    assert found.gained(NO_REPLAY) == [0.0, None, 0.0]
    # a lost 0.1 until it came back, b lost 0.05 until the end; nothing followed the last part.
    assert found.backward(ONLINE) == pytest.approx(-0.075)
    assert all(len(cells) == len(found.columns) for cells in found.cells())
    json.dumps(found.plain())


def test_the_loop_learns_from_what_it_is_given(settings: Settings, models: tuple[Path, Path], tmp_path: Path) -> None:
    training = TrainingSettings(min_cases=60, min_tokens=300, epochs=4, rank=8, learning_rate=2e-2)
    chosen = settings.model_copy(
        update={"training": training, "gate": GateSettings(min_prompts=3, min_tokens=40, bootstrap=200)}
    )
    reduced = Path(shutil.copytree(models[1], tmp_path / "draft"))
    vocabulary.write(range(40, 240), reduced)
    models = models[0], reduced
    pair = load_pair(*models)
    requests = answered(settings, pair, "", lines(36, 0, "a"), 16, 16, lambda stage, done, of: None)
    loop, course = Loop(chosen, pair, models, None, tmp_path / "loop"), Course()
    try:
        loop.take(requests, course)
        (run,) = course.runs
        assert run.promoted and course.serving == [loop.drafts.active] == [1]
        plain = logged(loop.model(0), requests, k=DRAFTED, adapter=0, vocabulary=pair.vocabulary)
        adapted = logged(loop.model(1), requests, k=DRAFTED, adapter=1, vocabulary=pair.vocabulary)
        assert course.agreed == [one.agreed for one in (*plain[: run.at], *adapted[run.at :])], (
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


@pytest.mark.nightly
@pytest.mark.parametrize("tagged", [True, False])
def test_a_stream_learns_what_it_sees(
    settings: Settings, models: tuple[Path, Path], tmp_path: Path, tagged: bool
) -> None:
    count = 36
    training = TrainingSettings(min_cases=20, min_tokens=300, epochs=4, rank=8, learning_rate=2e-2)
    chosen = settings.model_copy(
        update={"training": training, "gate": GateSettings(min_prompts=3, min_tokens=40, bootstrap=200)}
    )
    parts = [Part(topic, lines(count, seed, topic)) for seed, topic in enumerate("aba")]
    found = run_stream(chosen, models, None, parts, window=10, max_tokens=16, tagged=tagged)
    static, online = found.courses[STATIC], found.courses[ONLINE]
    assert static.tokens == online.tokens == found.courses[NO_REPLAY].tokens
    assert len(online.tokens) == 3 * count and static.runs == []
    assert any(run.promoted for run in online.runs)
    first = next(run.at for run in online.runs if run.promoted)
    assert online.agreed[:first] == static.agreed[:first], "until the first promotion the bare draft serves"
    assert sum(online.agreed[2 * count :]) > sum(static.agreed[2 * count :])
    assert sum(online.calls[2 * count :]) < sum(static.calls[2 * count :])
    assert online.seconds > 0
    draw_lines(
        tmp_path / "s.png",
        {name: found.moving(name) for name in found.courses},
        [(part.topic, len(part.lines), best.agreement) for part, best in zip(parts, found.best, strict=True)],
        "Stream",
        "agreement",
    )
    assert (tmp_path / "s.png").stat().st_size > 5000
    assert found.best[0].agreement > found.best[0].static and found.best[0].gain
    assert all(run.promoted for run in found.courses[UNGUARDED].runs), "no gate is asked there"
