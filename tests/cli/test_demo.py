"""`redraft demo` on a tiny random pair: its output, and that every failure gives a reason and a non-zero status.

Server and training child of the first test are real processes.
"""

import inspect
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from service.cli import demo as command
from service.cli import main
from service.core import Prompt, Sampling
from service.evaluation import charts, demo, demo_plan
from service.evaluation.answer_check import check_answers, equal_length_batches
from service.evaluation.bench.arms import Decoded
from service.evaluation.clients import Answer, Clients
from service.evaluation.demo_plan import Goal, Scale
from service.evaluation.machine_speed import MachineSpeed
from service.evaluation.oracle import naive_greedy
from service.evaluation.paired_speed import SpeedRatio
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine
from service.models.pair import Pair, load_pair
from service.models.text import TextEncoder
from service.settings import Settings
from service.store.log.generations import HELD_OUT, split_of
from tests.support.rounding import shape_dependent
from tests.support.tiny_server import InProcessServer, prompts, register_adapters, settings_of, write_pair

TINY = Scale(
    clients=2,
    pause_seconds=0.0,
    max_tokens=16,
    min_tokens=300,
    epochs=4,
    replay=0.2,
    answers_after=4,
    held_out=10,
    stepwise=4,
    turns=4,
    gate_texts=200,
    limit_seconds=120.0,
)
SPEED = MachineSpeed(1.0, 1.0, 0.01, 0.01, 0.01, 0.01, 0.01, 16.0)

MEASURED = {
    "agreement": {"before": 0.5, "after": 0.6, "low90": 0.05},
    "tokens_per_call": {"before": 2.0, "after": 2.3},
    "tokens_per_second": {"plain": 8.31, "before": 9.13, "after": 9.32},
    "longest_gap_ms": {"without_swap": 100.0, "with_swap": 90.0},
}
QUIET = {
    "before/plain": SpeedRatio(1.1, 1.05, 1.15),
    "after/plain": SpeedRatio(1.3, 1.2, 1.4),
    "after/before": SpeedRatio(1.2, 1.1, 1.3),
}
FINE = demo.DemoReport(
    failed_requests=0,
    failures=[],
    greedy_mismatches=0,
    near_ties=3,
    promotions=1,
    requests=9,
    speed_ratios=QUIET,
    announced_seconds=240.0,
    seconds=251.4,
    **MEASURED,
)
NOISY = replace(FINE, speed_ratios=QUIET | {"after/before": SpeedRatio(1.02, 0.8, 1.3)})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


class Demo:
    """`redraft demo` with its own traffic, run in this process."""

    def __init__(self, root: Path, pair: tuple[Path, Path]) -> None:
        self.png = root / "pictures" / "demo.png"
        self.json = root / "demo.json"
        self.prompts = root / "prompts.jsonl"
        self.config = root / "settings.toml"
        self.write([line.prompt for line in prompts(150)])
        self.config.write_text(
            f"home = {json.dumps(str(root / 'home'))}\n"
            f"[models]\ntarget = {json.dumps(str(pair[0]))}\ndraft = {json.dumps(str(pair[1]))}\n"
            "[engine]\nadaptive = false\nnum_draft_tokens = 3\n"
            "[training]\nlearning_rate = 1e-2\nrank = 8\nniceness = 0\n"
        )

    def write(self, texts: list[str]) -> None:
        self.prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))

    def run(self, monkeypatch: pytest.MonkeyPatch) -> int:
        words = ["demo", "--config", self.config, "--prompts", self.prompts, "--png", self.png, "--json", self.json]
        monkeypatch.setattr(sys, "argv", ["redraft", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)


@pytest.fixture
def shown(tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Demo:
    monkeypatch.setattr(demo_plan, "QUICK", Goal(TINY, 40.0))
    monkeypatch.setattr(demo_plan, "LEVELS", (1.0,))
    monkeypatch.setattr(demo_plan, "LEAST_PAUSE", 0.3)
    return Demo(tmp_path, pair)


def in_turn(texts: list[str]) -> list[str]:
    """Two training prompts, one held-out prompt, and so on, so that some tens of requests are enough for both."""
    held = [text for text in texts if split_of(text) == HELD_OUT]
    learnt = [text for text in texts if split_of(text) != HELD_OUT]
    return [text for i, one in enumerate(held) for text in (*learnt[2 * i : 2 * i + 2], one)]


@pytest.mark.nightly
def test_it_trains_and_swaps_and_reports_each_step(
    shown: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown.write(in_turn([line.prompt for line in prompts(300)]))
    # A tiny adapter trains within a second.
    monkeypatch.setattr("service.cli.console.HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(demo, "POLL_SECONDS", 0.05)
    assert shown.run(monkeypatch) == 0
    captured = capsys.readouterr()
    found = json.loads(shown.json.read_text())
    assert found["failed_requests"] == found["greedy_mismatches"] == 0
    assert found["promotions"] == 1
    assert found["agreement"]["low90"] > 0
    assert shown.png.read_bytes().startswith(b"\x89PNG")
    assert str(shown.png) in captured.out.replace("\n", "")
    # stderr is not a terminal here, so progress is plain lines.
    for pattern in (
        r"^measuring this machine",
        r"^the demo takes about (\d+ seconds|[\d.]+ minutes) on this machine$",
        r"^starting the server",
        r"gathering failure cases: \d+, [1-9]\d* failure cases recorded, 0 requests failed",
        r"training the adapter: \d+, .*step \d+ of \d+, loss \d\.\d+",
        r"^verdict: run \d+ promoted, \S",
        r"^swap: adapter \d+ drafts now",
        r"checking every answer against the target alone",
        r"timing one stream",
        r", about \d+ seconds left",
    ):
        assert re.search(pattern, captured.err, re.MULTILINE), (pattern, captured.err)
    assert captured.err.index(" promoted, ") < captured.err.index("swap: ")


@pytest.mark.nightly
def test_wrong_answers_and_failed_requests_are_failures(
    shown: Demo,
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Answers are checked against the draft instead of the target, as if the server had accepted every proposal."""

    def serve_here(
        settings: Settings,
        folder: Path,
        lines: Iterator[PromptLine],
        scale: Scale,
        on_progress: OnProgress,
    ) -> demo.ServedTraffic:
        """Skips training: an adapter exists, and none is promoted."""
        server = InProcessServer(folder, settings_of(pair), settings.home)
        register_adapters(server, pair, 1)
        server.start()
        try:
            clients = Clients(
                server.url, itertools.islice(lines, 20), clients=scale.clients, max_tokens=scale.max_tokens
            )
            clients.wait()
        finally:
            server.stop()
        return demo.ServedTraffic(clients.answers, [])

    monkeypatch.setattr(demo, "_serve", serve_here)
    monkeypatch.setattr(demo, "measure_speed", lambda *args, **settings: SPEED)
    monkeypatch.setattr(command, "pair_folders", lambda settings: (pair[1], pair[1]))
    texts = [line.prompt for line in prompts(150)]
    shown.write([*texts[:9], "x" * 5_000, *texts[9:]])
    assert shown.run(monkeypatch) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    failed, _, differ = last.partition("; ")
    assert re.match(r"redraft: 1 of 20 requests failed: 400 ", failed), last
    assert re.search(r"[1-9]\d* answers differ from what the target alone says$", differ or last), last
    assert json.loads(shown.json.read_text())["greedy_mismatches"] > 0


def test_one_kind_of_failure_is_enough() -> None:
    assert FINE.problems() == []
    assert len(replace(FINE, failed_requests=1, failures=["503"]).problems()) == 1
    assert len(replace(FINE, greedy_mismatches=1).problems()) == 1


@pytest.mark.parametrize("report", [FINE, NOISY], ids=["quiet", "noisy"])
def test_speeds_are_printed_only_where_they_can_be_told_apart(
    report: demo.DemoReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    drawn: list[str] = []
    monkeypatch.setattr(charts, "draw_bars", lambda path, panels, title: drawn.extend(panels))
    command._show(report)
    command._draw(report, tmp_path / "demo.png")
    # Cells of tables, wherever their lines are broken.
    text = " ".join(re.sub(r"[\u2500-\u257f]", " ", capsys.readouterr().out).split())
    shown = [name for name in ("8.3 tokens/s", "9.1 tokens/s", "9.3 tokens/s") if name in text]
    noisy = report is NOISY
    assert len(shown) == (0 if noisy else 3)
    assert ("too busy" in text) is noisy and ("cannot be told: 0.80 to 1.30 times" in text) is noisy
    assert ("tokens/s, one stream" in drawn) is not noisy
    assert "1.30 times as fast (1.20 to 1.40 times)" in text
    assert re.search(r"announced, taken\W+240, 251\b", text)


class Slow:
    """An arm whose answers take `seconds` on a clock of their own."""

    def __init__(self, clock: list[float], tokens: list[int], seconds: float, order: list[int]) -> None:
        self.settings: dict[str, object] = {}
        self._clock, self._tokens, self._seconds, self._order = clock, tokens, seconds, order

    def decode(self, prompt: Prompt) -> Decoded:
        self._clock[0] += self._seconds
        self._order.append(len(self._tokens))
        return Decoded(self._tokens, len(self._tokens), self._seconds)


@pytest.mark.parametrize(("left", "turns"), [(0.0, 4), (47.0, 15), (1e9, demo.MOST_TURNS)])
def test_turns_fill_the_time_that_was_announced(left: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [100.0], list[int]()
    monkeypatch.setattr(demo.time, "monotonic", lambda: clock[0])
    arms = {name: Slow(clock, [7] * n, 1.0, order) for n, name in ((1, "plain"), (2, "before"), (3, "after"))}
    prompts = [Prompt((1,), Sampling()), Prompt((2,), Sampling())]
    decoded = demo._take_turns(arms, prompts, 4, 100.0 + left, silent)
    assert {len(answers) for answers in decoded.values()} == {turns}
    # The arms alternate, each turn with another first one.
    assert order[:9] == [1, 2, 3, 2, 3, 1, 3, 1, 2]


def test_stages_say_how_much_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = [0.0], list[tuple[str, str]]()
    monkeypatch.setattr(demo.time, "monotonic", lambda: clock[0])
    report = demo.with_time_left(lambda stage, done, of, note="": said.append((stage, note)), 240.0)
    report("serving", 3, 0, "9 cases")
    report("verdict", 0, 0)
    clock[0] = 120.0
    report("checking", 0, 9)
    # The announced time is over.
    clock[0] = 250.0
    report("timing", 1, 9, "turns")
    assert said == [
        ("serving", "9 cases, about 4 minutes left"),
        ("verdict", ""),
        ("checking", "about 2 minutes left"),
        ("timing", "turns"),
    ]


def test_outputs_of_timed_turns_are_checked() -> None:
    def answers(*tokens: int) -> list[Decoded]:
        return [Decoded([token], 1, 1.0) for token in tokens]

    decoded = {"plain": answers(1, 2, 3), "before": answers(1, 2, 4), "after": answers(1, 5, 3)}
    assert demo._stream_speeds(decoded, lossless=True).differ == 2
    assert demo._stream_speeds(decoded, lossless=False).differ == 0


def test_git_ignores_the_picture(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    if shutil.which("git") is None:
        pytest.skip("no git here")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    shutil.copy(root / ".gitignore", tmp_path)
    default = inspect.signature(command.demo).parameters["png"].default
    done = subprocess.run(["git", "check-ignore", "-q", str(default)], cwd=tmp_path)
    assert done.returncode == 0


@pytest.mark.nightly
def test_nothing_promoted_is_a_failure_with_its_reason(
    shown: Demo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with too little memory fails, and there is no time for another."""
    monkeypatch.setattr(demo_plan, "QUICK", Goal(replace(TINY, limit_seconds=4.0), 600.0))
    shown.config.write_text(shown.config.read_text() + "memory_gb = 1e-3\n")
    assert shown.run(monkeypatch) == 1
    captured = capsys.readouterr().err
    assert "redraft: no adapter was promoted in 4 s of traffic: " in captured
    assert not shown.png.exists()


def check(pair: Pair, answers: Sequence[Answer]) -> int:
    """How many are wrong."""
    return check_answers(pair, answers, max_tokens=TINY.max_tokens, stepwise=TINY.stepwise).wrong


def test_a_truncated_answer_is_wrong(pair: tuple[Path, Path]) -> None:
    """Every token is right, but the target would have continued."""
    loaded = load_pair(*pair)
    line = PromptLine("0", "letters", "abc")
    prompt = TextEncoder(loaded.target.tokenizer).encode_chat([{"role": "user", "content": line.prompt}]).tokens
    whole = naive_greedy(loaded.target.model, prompt, TINY.max_tokens, loaded.eos)
    found = {count: check(loaded, [Answer(line, tokens=whole[:count])]) for count in (0, 1, len(whole) - 1, len(whole))}
    assert list(found.values()) == [1, 1, 1, 0]


def test_differences_beyond_rounding_are_wrong_in_half_precision_too(pair: tuple[Path, Path]) -> None:
    loaded = load_pair(*pair)
    shape_dependent(loaded.target.model).set_dtype(mx.bfloat16)
    encoder, answers = TextEncoder(loaded.target.tokenizer), list[Answer]()
    for line in prompts(4):
        prompt = encoder.encode_chat([{"role": "user", "content": line.prompt}]).tokens
        tokens = naive_greedy(loaded.target.model, prompt, TINY.max_tokens, loaded.eos)
        answers.append(Answer(line, tokens=tokens))
    assert check(loaded, answers) == 0
    answers[0].tokens[3] = (answers[0].tokens[3] + 1) % 256
    assert check(loaded, answers) > 0


def test_prompts_of_equal_length_are_checked_together() -> None:
    lengths = [random.Random(0).randint(3, 8) for _ in range(40)]
    groups = equal_length_batches([[0] * n for n in lengths], 12)
    assert sum(map(len, groups)) == 12
    assert all(len({lengths[i] for i in group}) == 1 for group in groups)
    assert len({i for group in groups for i in group}) == 12
