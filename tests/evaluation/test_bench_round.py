"""`redraft bench round` on a tiny pair: what is reported, waits under an accelerator's strategy, the bare loop's outputs."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn
import pytest

from service.cli import main
from service.core import BadRequest, Prompt, Sampling
from service.engine import device
from service.engine.adapters import served
from service.engine.strategy import CPU, CUDA, METAL, using
from service.evaluation.bench.bare_loop import BareArm
from service.evaluation.bench.doctor_speed import pays_from
from service.evaluation.bench.model_calls import WARM, ModelCalls, queued
from service.evaluation.bench.round import measure, run_round, strategy_named
from service.evaluation.bench.round_modes import KINDS, Mode, modes
from service.learning.make.eagle_head import init_eagle_head
from service.models import vocabulary
from service.models.pair import Pair, load_model, load_pair
from tests.support.oracle import naive
from tests.support.tiny_server import prompts, write_pair

FIELDS = {
    "shape", "rows", "mode", "sampling", "recording", "ragged", "wall_ms", "wall_ms_quartiles", "calls_ms", "waits",
    "handovers", "constrained",
}  # fmt: skip
REDUCED = 150
"""Size of the draft's reduced vocabulary, of 258 ids."""
K = 4


@dataclass(frozen=True)
class RoundFiles:
    folders: tuple[Path, Path]
    config: Path
    prompts: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> RoundFiles:
    root = tmp_path_factory.mktemp("round")
    target, draft = write_pair(root)
    vocabulary.write(list(range(REDUCED)), draft)
    config = root / "settings.toml"
    models = f"[models]\ntarget = {json.dumps(str(target))}\ndraft = {json.dumps(str(draft))}\n"
    config.write_text(f"home = {json.dumps(str(root / 'home'))}\n{models}[engine]\nnum_draft_tokens = 3\n")
    lines = [{"id": p.id, "domain": p.domain, "prompt": p.prompt} for p in prompts(3)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RoundFiles((target, draft), config, root / "prompts.jsonl")


@pytest.fixture(scope="module")
def pair(files: RoundFiles) -> Pair:
    return load_pair(*files.folders)


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(files: RoundFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """bench(…) -> exit status, stdout, stderr of `redraft bench round … --config`."""
    monkeypatch.delenv("REDRAFT_BLAS", raising=False)
    # What is counted is the same in every round; 50 of them are for the median of times.
    monkeypatch.setattr("service.evaluation.bench.round.run_round", partial(run_round, rounds=12))

    def run(*words: object) -> tuple[int, str, str]:
        asked = ["redraft", "bench", "round", *map(str, words), "--config", str(files.config)]
        monkeypatch.setattr(sys, "argv", asked)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def texts(count: int) -> list[tuple[int, ...]]:
    return [tuple(range(5 + i, 45 + i)) for i in range(count)]


@pytest.mark.nightly
def test_the_report_has_a_mode_for_each_kind_and_its_fields(bench: Bench, files: RoundFiles, tmp_path: Path) -> None:
    out = tmp_path / "round.json"
    status, shown, err = bench("--json", out, "--markdown", tmp_path / "round.md", "--png", tmp_path / "round.png")
    assert status == 0, err
    written = json.loads(out.read_text())
    assert len(written["modes"]) == len(KINDS) == 6
    for mode, one in zip(KINDS, written["modes"], strict=True):
        assert one.keys() == FIELDS
        assert (one["rows"], one["mode"], one["sampling"], one["recording"]) == (
            mode.rows,
            mode.mode,
            mode.sampling,
            mode.recording,
        )
        assert one["ragged"] is (mode.ragged and mode.rows > 1)
        low, high = one["wall_ms_quartiles"]
        assert 0.0 < low <= one["wall_ms"] <= high and one["calls_ms"] > 0.0
        assert one["shape"] == files.folders[0].name
    assert written["machine"]["versions"].keys() == {"redraft", "mlx", "mlx-lm"}
    assert written["settings"]["k"] == K and written["settings"]["strategy"] == "own"
    assert written["command"] == "redraft bench round --config settings.toml"
    assert "handovers" in shown and written["command"] in (tmp_path / "round.md").read_text()
    assert (tmp_path / "round.png").stat().st_size > 1000


@pytest.mark.parametrize("rows", ["3", pytest.param("1,3", marks=pytest.mark.nightly)])
def test_steady_rounds_wait_once_as_on_an_accelerator(bench: Bench, tmp_path: Path, rows: str) -> None:
    out = tmp_path / "round.json"
    words = ("--rows", rows, "--modes", "plain,drafted", "--sampling", "greedy,seeded", "--json", out)
    status, _, err = bench(*words, "--strategy", "device")
    assert status == 0, err
    found = json.loads(out.read_text())["modes"]
    assert len(found) == 4 * len(rows.split(","))
    for one in found:
        assert one["waits"] == 1, one
        # Each draft step, the proposal, the verification.
        assert one["handovers"] == (K + 2 if one["mode"] == "drafted" else 1), one
    assert {one["ragged"] for one in found if one["rows"] == 3} == {True}


def test_a_row_within_a_grammar_is_measured_beside_the_same_round_without(bench: Bench, tmp_path: Path) -> None:
    """What it may say depends on its last token, and on what was drafted for it: no round before it is unread."""
    out = tmp_path / "round.json"
    words = ("--rows", "2", "--modes", "plain,drafted", "--constrained", "--strategy", "device", "--json", out)
    status, shown, err = bench(*words)
    assert status == 0, err
    found = json.loads(out.read_text())["modes"]
    assert [(one["mode"], one["constrained"]) for one in found] == [
        ("plain", False), ("plain", True), ("drafted", False), ("drafted", True),
    ]  # fmt: skip
    assert [one["waits"] for one in found] == [1, 1, 1, 2] and "one within" in shown


def test_on_a_cpu_evidence_is_another_wait(pair: Pair) -> None:
    assert pair.draft is not None
    with using(CPU):
        found = [
            measure(pair, served(pair.draft), Mode(1, "drafted", recording=recording), texts(1), k=K, rounds=8)
            for recording in (False, True)
        ]
    assert [one["waits"] for one in found] == [1, 2]


@pytest.mark.parametrize(
    ("mode", "sampling"), [("plain", "sampled"), ("drafted", "greedy"), ("drafted", "seeded"), ("lookup", "greedy")]
)
def test_rows_of_equal_lengths_stay_equal(pair: Pair, mode: str, sampling: str) -> None:
    assert pair.draft is not None
    asked = Mode(3, mode, sampling, ragged=False)
    one = measure(pair, served(pair.draft), asked, texts(3), k=K, rounds=8)
    assert one["ragged"] is False


def test_the_calls_are_those_of_a_round(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens of as many rows through either model as a drafted round feeds, with one wait at the end."""
    assert pair.draft is not None
    draft, fed = served(pair.draft), list[tuple[str, tuple[int, ...]]]()
    backbone = cast("nn.Module", draft.model.model)
    for name, model in (("target", pair.target.model), ("draft", backbone)):
        whole: Any = type(model).__call__

        class Noted(type(model)):
            def __call__(self, tokens: Any, *more: Any, name: str = name, whole: Any = whole, **named: Any) -> Any:
                fed.append((name, tokens.shape))
                return whole(self, tokens, *more, **named)

        monkeypatch.setattr(model, "__class__", Noted)
    held = [list(range(5, 25)), list(range(5, 40))]
    with ModelCalls(pair, draft, held) as calls:
        fed.clear()
        with device.counting() as counts:
            seconds = queued(lambda: calls.round(K, K), 10)
    assert seconds > 0.0
    assert counts.waits == WARM + 1
    rounds = WARM + 10
    assert fed == [*[("draft", (2, 1))] * K, ("target", (2, K + 1))] * rounds


def calls_by_hand(pair: Pair, draft: Any, text: tuple[int, ...], output: list[int], k: int) -> int:
    """Target calls of speculation at K where the draft alone proposes after every round."""
    done = calls = 0
    while done < len(output):
        guess = naive(draft, [*text, *output[:done]], Sampling(max_tokens=k))
        accepted = 0
        while accepted < k and done + accepted < len(output) and guess[accepted] == output[done + accepted]:
            accepted += 1
        done, calls = done + accepted + 1, calls + 1
    return calls


@pytest.mark.parametrize(
    "k", [pytest.param(1, marks=pytest.mark.nightly), 3, pytest.param(8, marks=pytest.mark.nightly)]
)
def test_the_bare_loop_says_what_the_target_says(pair: Pair, k: int) -> None:
    assert pair.draft is not None
    draft, sampling = served(pair.draft), Sampling(max_tokens=40)
    arm, calls = BareArm(pair, draft, k), 0
    for text in texts(4):
        answer = arm.decode(Prompt(text, sampling))
        assert answer.tokens == naive(pair.target.model, text, sampling, pair.eos)
        assert answer.calls == calls_by_hand(pair, draft.model, text, answer.tokens, k)
        calls += answer.calls
    assert calls < 4 * 40, "something is accepted"


def test_the_bare_loop_ends_with_the_end_token(pair: Pair) -> None:
    assert pair.draft is not None
    (text,), sampling = texts(1), Sampling(max_tokens=40)
    output = naive(pair.target.model, text, sampling)
    arm = BareArm(pair, served(pair.draft), 4)
    arm._eos = frozenset({output[9]})
    assert arm.decode(Prompt(text, sampling)).tokens == output[: output.index(output[9]) + 1]


@pytest.mark.nightly
def test_bare_is_reported_beside_mlx_lm_and_the_engine(bench: Bench, files: RoundFiles, tmp_path: Path) -> None:
    out = tmp_path / "bare.json"
    words = ("--modes", "plain", "--bare", "--prompts", files.prompts, "--limit", 2, "--max-tokens", 12, "--json", out)
    status, shown, err = bench(*words, "--markdown", tmp_path / "bare.md")
    assert status == 0, err
    written = json.loads(out.read_text())
    bare = written["bare"]
    rates = {int(k): rate for k, rate in bare["tokens_per_second_by_k"].items()}
    assert rates.keys() == {1, 2, 3, 4, 6, 8} and rates[bare["best_k"]] == max(rates.values())
    assert bare["arms"].keys() == {"bare", "mlx_lm_plain", "engine_adaptive", "engine_best_k"}
    for arm in bare["arms"].values():
        assert arm["identical"] is True
        assert 0.0 < arm["low"] <= arm["tokens_per_second"] <= arm["high"]
    assert bare["arms"]["mlx_lm_plain"]["tokens_per_call"] == 1.0 < bare["arms"]["bare"]["tokens_per_call"]
    assert (bare["prompts"], bare["max_tokens"]) == (2, 12)
    assert "engine_best_k" in shown and len(written["modes"]) == 1
    assert "A bare loop on" in (tmp_path / "bare.md").read_text()


def test_modes_are_the_kinds_or_exactly_what_is_asked() -> None:
    assert modes() == list(KINDS)
    assert [mode.rows for mode in modes([2, 5])] == [2] * 6 + [5] * 6
    assert modes([2], ["plain"], ["sampled"], recording=False) == [Mode(2, "plain", "sampled", recording=False)]
    assert modes(drawing=["seeded"], ragged=False) == [
        Mode(1, name, "seeded", ragged=False) for name in ("plain", "drafted", "lookup")
    ]


def test_strategies_by_name() -> None:
    with using(CPU):
        assert (strategy_named("own"), strategy_named("device")) == (CPU, METAL)
    with using(CUDA):
        assert strategy_named("device") == strategy_named("cuda") == CUDA


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "0"), "--rows takes positive numbers"),
        (("--modes", "plain,fast"), "--modes takes plain, drafted, lookup, not 'fast'"),
        (("--sampling", "nucleus"), "--sampling takes greedy, seeded, sampled, not 'nucleus'"),
        (("--strategy", "tpu"), "no strategy 'tpu': choose among own, device"),
        (("--limit", "2"), "--domain and --limit require --prompts"),
        (("--bits", "4"), "--bits requires --shape"),
        (("--draft", "none"), "the mode drafted needs a draft"),
        (("--draft", "none", "--modes", "plain", "--bare"), "the bare loop needs a draft"),
        (("--prompts", "/no/such.jsonl"), "cannot read the prompts in /no/such.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_answered_with_one_sentence(words: tuple[str, ...], message: str, bench: Bench) -> None:
    status, out, err = bench(*words)
    assert (status, out) == (1, "")
    said = [line for line in err.splitlines() if line.startswith("redraft: ")]
    assert message in err and len(said) == 1, err
    if "--draft" not in words:
        assert re.fullmatch(r"redraft: \S[^\n]*\n", err), err


def test_a_head_drafts_rounds_but_no_bare_loop(files: RoundFiles, tmp_path: Path) -> None:
    head = tmp_path / "head"
    init_eagle_head(load_model(files.folders[0]), None, head)
    pair = load_pair(files.folders[0], head)
    assert pair.draft is not None
    lines = list(prompts(1))
    found = run_round(
        (files.folders[0], head), lines, [Mode(2, "drafted")], k=K, title="t", command="c", shape="s", rounds=8
    )
    assert found.plain["modes"][0]["wall_ms"] > 0.0
    with pytest.raises(BadRequest, match="the bare loop needs a draft that mlx-lm runs"):
        BareArm(pair, served(pair.draft), 2)


def test_drafts_pay_from_the_acceptance_that_makes_up_for_their_cost() -> None:
    flat, none = dict.fromkeys(range(1, 10), 10.0), {"plain": 0.0, "drafted": 0.0}
    # Rounds of 4 tokens cost 1.4 times a plain one: 1 + a + a^2 + a^3 + a^4 = 1.4.
    found = pays_from(4, flat, 1.0, none)
    assert found is not None and sum(found**i for i in range(5)) == pytest.approx(1.4, abs=1e-6)
    assert pays_from(1, flat, 5.0, none) == pytest.approx(0.5, abs=1e-6)
    dear = {n: 10.0 * n for n in range(1, 10)}
    assert pays_from(4, dear, 1.0, none) is None
    later = pays_from(4, flat, 1.0, {"plain": 0.0, "drafted": 5.0})
    assert later is not None and later > found
