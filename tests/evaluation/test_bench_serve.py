"""`redraft bench serve` on a tiny pair: real servers, including mlx_lm.server, and real clients."""

import json
import tomllib
from pathlib import Path

import pytest

from service.core import BadRequest
from service.evaluation.bench.serve import Load, rate, run_serve
from service.evaluation.bench.servers import SERVERS, ServerPlan
from service.evaluation.clients import Answer
from service.evaluation.prompts import PromptLine
from service.evaluation.server_process import LocalServer
from service.settings import EngineSettings, Settings
from tests.support.tiny_server import InProcessServer, prompts, write_pair

TOKENS = 10


def line(number: int) -> PromptLine:
    return PromptLine(str(number), "letters", f"prompt {number}")


def test_every_cell_has_distinct_prompts_and_as_many_per_client() -> None:
    load = Load([line(i) for i in range(35)], clients=[1, 4], turns=3, max_tokens=8)
    cells = load.cells()
    assert [(clients, len(lines)) for clients, lines in cells] == [(1, 2), (4, 8)] * 3
    used = [one.id for _, lines in cells for one in lines]
    assert len(set(used)) == len(used) == 30
    assert used == [one.id for _, lines in load.cells() for one in lines], "the same prompts every time"
    with pytest.raises(BadRequest, match="14 prompts are too few: 3 turns of 1, 4 clients need 15"):
        Load([line(i) for i in range(14)], clients=[1, 4], turns=3, max_tokens=8).cells()


def test_the_rate_is_of_all_streams_together() -> None:
    first = Answer(line(0), started=10.0, ended=14.0, count=30)
    second = Answer(line(1), started=11.0, ended=15.0, count=20)
    assert rate([first, second]) == 10.0


@pytest.mark.parametrize(
    ("kind", "turns", "names"),
    [
        pytest.param(InProcessServer, 1, ["plain", "mlx_lm_server"], marks=pytest.mark.nightly),
        pytest.param(
            LocalServer, 2, ["plain", "static", "mlx_lm_server", "mlx_lm_server_draft"], marks=pytest.mark.nightly
        ),
    ],
)
def test_all_servers_say_the_same(
    kind: type[LocalServer], tmp_path: Path, turns: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.evaluation.bench.servers.LocalServer", kind)
    pair = write_pair(tmp_path)
    load = Load(list(prompts(3 * turns)), clients=[1, 2], turns=turns, max_tokens=TOKENS)
    # Always drafts, because whether drafting pays for so small a pair depends on timing noise.
    settings = Settings(home=tmp_path / "home", engine=EngineSettings(adaptive=False))
    report = run_serve(settings, pair, load, title="t", command="c", arms=names)
    found = report.plain
    assert list(found["arms"]) == names
    assert found["clients"].keys() == {"1", "2"}
    assert found["arms"] == found["clients"]["2"]["arms"], "at the top level those of the most clients"
    for number, result in found["clients"].items():
        ((requests, _),) = {(arm["requests"], arm["prompt_tokens"]) for arm in result["arms"].values()}
        (tokens,) = {arm["tokens"] for name, arm in result["arms"].items() if name != "mlx_lm_server_draft"}
        assert requests == turns * int(number)
        assert requests <= tokens <= requests * TOKENS
        for name, arm in result["arms"].items():
            # On this pair mlx_lm.server 0.32.2 with a draft gives other answers when it continues from a cached prefix.
            assert name == "mlx_lm_server_draft" or (arm["identical"], arm["same_text"]) == (True, 1.0), name
            assert len(arm["turns"]) == turns
            assert arm["low"] <= arm["tokens_per_second"] <= arm["high"]
            assert 0 < arm["first_ms"]["p50"] <= arm["first_ms"]["p95"]
            # mlx-lm sends only text, and random bytes rarely decode to any.
            assert name.startswith("mlx") or 0 < arm["gap_ms"]["p50"] <= arm["gap_ms"]["p95"]
        assert result["arms"]["plain"]["tokens_per_call"] == 1.0
        assert "static" not in names or result["arms"]["static"]["tokens_per_call"] > 1.0
        assert result["arms"]["mlx_lm_server"]["tokens_per_call"] is None
        assert {arm["estimated_speedup"] for arm in result["arms"].values()} == {None}, "costs are not measured"
        ours, theirs = (result["arms"][name]["turns"] for name in (names[-len(names) // 2 - 1], names[-1]))
        ratio = result["ratios"][f"{names[-len(names) // 2 - 1]}/{names[-1]}"]
        assert ratio["low"] == min(a / b for a, b in zip(ours, theirs, strict=True))
        assert ratio["high"] == max(a / b for a, b in zip(ours, theirs, strict=True))
    assert list(report.bars) == ["tokens/s, 1 client", "tokens/s, 2 clients"]
    assert len(report.rows) == 2 * {2: 2 + 1, 4: 4 + 5}[len(names)]
    json.dumps(found)


@pytest.mark.nightly
def test_a_server_that_drafts_says_what_it_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.evaluation.bench.servers.LocalServer", InProcessServer)
    load = Load(list(prompts(3)), clients=[3], turns=1, max_tokens=64)
    settings = Settings(home=tmp_path / "home")
    report = run_serve(settings, write_pair(tmp_path), load, title="t", command="c", arms=["plain", "static"])
    arms = report.plain["arms"]
    assert arms["plain"]["estimated_speedup"] is None
    assert 0.1 < arms["static"]["estimated_speedup"] < 10
    assert [row[-1] for row in report.rows] == ["", f"{arms['static']['estimated_speedup']:.2f} x", ""]


def test_each_server_has_its_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "tdam":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    plan = ServerPlan(Settings(home=tmp_path), Path("t"), Path("d"), Path("a"), Path("m"), tmp_path, rows=2)
    drafts: dict[str, object] = {}
    for name, make in SERVERS.items():
        server = make(plan)
        assert server is not None
        if isinstance(server.process, LocalServer):
            drafts[name] = tomllib.loads(server.process.config.read_text())["models"]["draft"]
        else:
            _, _, draft = " ".join(server.process._command).partition("--draft-model ")
            drafts[name] = draft.partition(" ")[0] or "none"
    assert drafts == {
        "plain": "none",
        "static": "d",
        "adapted": "a",
        "mlx_lm_server": "none",
        "mlx_lm_server_draft": "m",
    }


def test_an_arm_that_lacks_something_is_refused_before_anything_starts(tmp_path: Path) -> None:
    load = Load(list(prompts(3)), clients=[1], turns=1, max_tokens=TOKENS)
    with pytest.raises(BadRequest, match="the arm adapted needs an adapter"):
        run_serve(Settings(), (tmp_path, tmp_path), load, title="t", command="c", arms=["adapted"])
