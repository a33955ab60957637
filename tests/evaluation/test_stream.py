"""`eval stream` at toy size, and its report."""

import json
from pathlib import Path

import pytest

from service.core import BadRequest
from service.evaluation.charts import draw_lines
from service.evaluation.local_loop import History
from service.evaluation.prompts import PromptLine
from service.evaluation.stream import read_parts, run_stream
from service.evaluation.stream_result import NO_REPLAY, ONLINE, STATIC, UNGUARDED, Best, Part, StreamResult
from service.settings import GateSettings, Settings, TrainingSettings
from tests.support.tiny_server import prompts


def lines(count: int, seed: int, domain: str) -> list[PromptLine]:
    return [PromptLine(f"{domain}{line.id}", domain, line.prompt + domain) for line in prompts(count, seed)]


def write(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"id": i, "domain": "d", "prompt": f"say {i}"}) + "\n" for i in range(count)))
    return path


def test_a_file_continues_where_it_stopped(tmp_path: Path) -> None:
    a, b = write(tmp_path / "math.train.jsonl", 7), write(tmp_path / "sql.jsonl", 3)
    parts = read_parts([f"{a}:3", str(b), f"{a}:2", str(a)])
    assert [part.topic for part in parts] == ["math", "sql", "math", "math"]
    assert [[line.id for line in part.lines] for part in parts] == [
        ["0", "1", "2"], ["0", "1", "2"], ["3", "4"], ["5", "6"]
    ]  # fmt: skip
    with pytest.raises(BadRequest, match="no more"):
        read_parts([str(a), f"{a}:1"])


def arm(agreed: list[int]) -> History:
    return History(agreed=agreed, tokens=[10] * len(agreed), calls=[5] * len(agreed), serving=[0, 0, 0])


def test_the_report_of_a_stream() -> None:
    parts = tuple(Part(topic, [PromptLine("", topic, "x")] * 10) for topic in ("a", "b", "a"))
    static, online = [5] * 30, [5] * 4 + [7] * 6 + [5] * 10 + [7] * 10
    found = StreamResult(
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


@pytest.mark.nightly
@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.promise(11)
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
    static, online = found.histories[STATIC], found.histories[ONLINE]
    assert static.tokens == online.tokens == found.histories[NO_REPLAY].tokens
    assert len(online.tokens) == 3 * count and static.runs == []
    assert any(run.promoted for run in online.runs)
    first = next(run.at for run in online.runs if run.promoted)
    assert online.agreed[:first] == static.agreed[:first], "until the first promotion the bare draft serves"
    assert sum(online.agreed[2 * count :]) > sum(static.agreed[2 * count :])
    assert sum(online.calls[2 * count :]) < sum(static.calls[2 * count :])
    assert online.seconds > 0
    draw_lines(
        tmp_path / "s.png",
        {name: found.moving(name) for name in found.histories},
        [(part.topic, len(part.lines), best.agreement) for part, best in zip(parts, found.best, strict=True)],
        "Stream",
        "agreement",
    )
    assert (tmp_path / "s.png").stat().st_size > 5000
    assert found.best[0].agreement > found.best[0].static and found.best[0].gain
    assert all(run.promoted for run in found.histories[UNGUARDED].runs), "no gate is asked there"
