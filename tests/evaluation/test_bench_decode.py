"""`redraft bench decode` on a tiny pair, with mlx-lm's own generators: outputs and calls against a hand count."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.cli import main
from service.core import BARE_DRAFT, AdapterRef, AdapterState, BadRequest, Sampling
from service.engine.adapters import load, served
from service.evaluation.bench.adapter import BenchAdapter
from service.evaluation.bench.arms import rotated
from service.evaluation.bench.decode import Task, run_decode
from service.evaluation.bench.mlx_lm_arm import target_calls, with_full_head
from service.evaluation.bench.servers import fused_draft
from service.learning import lora
from service.learning.make.eagle_head import init_eagle_head
from service.models import vocabulary
from service.models.pair import Pair, load_model, load_pair
from service.models.text import TextEncoder
from service.settings import EngineSettings
from service.store.artifacts import publish
from tests.support.oracle import naive
from tests.support.rounding import shape_dependent
from tests.support.tiny_server import prompts, write_pair
from tests.support.typed import leaves

K, TOKENS, COUNT = 3, 20, 4
REDUCED = 150
"""Size of the served draft's reduced vocabulary, of 258 ids: the reduced and the full head draft differently."""


@dataclass(frozen=True)
class BenchFiles:
    """A pair, prompts, settings and an adapter on disk."""

    target: Path
    draft: Path
    prompts: Path
    config: Path
    adapter: BenchAdapter


@pytest.fixture(scope="module")
def bench_files(tmp_path_factory: pytest.TempPathFactory) -> BenchFiles:
    root = tmp_path_factory.mktemp("bench")
    target, draft = write_pair(root)
    vocabulary.write(list(range(REDUCED)), draft)
    lines = [{"id": p.id, "domain": "ab"[i % 2], "prompt": p.prompt} for i, p in enumerate(prompts(COUNT))]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = root / "settings.toml"
    models = f"[models]\ntarget = {json.dumps(str(target))}\ndraft = {json.dumps(str(draft))}\n"
    config.write_text(
        f"home = {json.dumps(str(root / 'home'))}\n{models}[engine]\nnum_draft_tokens = 2\nnum_lookup_tokens = 2\n"
    )
    return BenchFiles(target, draft, root / "prompts.jsonl", config, write_adapter(root, target, draft))


def write_adapter(root: Path, target: Path, draft: Path) -> BenchAdapter:
    who = load_pair(target, draft).provenance
    model = load_model(draft).model
    shape = lora.wrap(model, rank=4, scale=2.0, seed=0)
    noise = [
        (name, 0.1 * mx.random.normal(array.shape, key=mx.random.key(i)))
        for i, (name, array) in enumerate(leaves(model.trainable_parameters()))
    ]
    model.load_weights(noise, strict=False)
    lora.save(model, shape, root / "made.part", draft=who.draft, target=who.target)
    digest = publish(root / "made.part", root / "made")
    ref = AdapterRef(
        id=7,
        folder=root / "made",
        sha256=digest,
        rank=shape.rank,
        scale=shape.scale,
        keys=tuple(shape.keys),
        draft=who.draft,
        parent=BARE_DRAFT,
        run=None,
        state=AdapterState.ACTIVE,
        created_at=datetime.now(UTC),
    )
    return BenchAdapter(ref, {"version": 7})


Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """bench("decode", …) -> exit status, stdout, stderr. The recorded command would name the BLAS otherwise."""
    monkeypatch.delenv("REDRAFT_BLAS", raising=False)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redraft", "bench", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def counted(target: nn.Module, draft: nn.Module, asked: Sequence[int], ends: frozenset[int]) -> tuple[int, int]:
    """Tokens and target calls of greedy speculation at K, counted by hand: the draft alone proposes after every round."""
    output = naive(target, asked, Sampling(max_tokens=TOKENS), ends)
    done = rounds = 0
    while done < len(output):
        guess = naive(draft, [*asked, *output[:done]], Sampling(max_tokens=K))
        accepted = 0
        while accepted < K and done + accepted < len(output) and guess[accepted] == output[done + accepted]:
            accepted += 1
        done = min(done + accepted + 1, len(output))
        rounds += 1
    return len(output), rounds


def test_outputs_are_the_target_s_and_calls_are_counted_right(bench_files: BenchFiles) -> None:
    lines = list(prompts(COUNT))
    found = run_decode(
        (bench_files.target, bench_files.draft),
        EngineSettings(),
        Task(lines, TOKENS, k=K),
        title="t",
        command="c",
        adapter=bench_files.adapter,
    ).plain
    assert list(found["arms"]) == [
        "plain",
        "static",
        "adapted",
        "mlx_lm_plain",
        "mlx_lm_spec_static",
        "mlx_lm_spec_adapted",
    ]
    assert {arm["identical"] for arm in found["arms"].values()} == {True}

    pair = load_pair(bench_files.target, bench_files.draft)
    assert pair.draft is not None
    adapted = load(pair.draft.model, bench_files.adapter.ref, pair.provenance.draft).model
    ends, encoder = pair.eos, TextEncoder(pair.target.tokenizer)
    asked = [encoder.encode_chat([{"role": "user", "content": line.prompt}]).tokens for line in lines]
    for name, draft in (("mlx_lm_spec_static", pair.draft.model), ("mlx_lm_spec_adapted", adapted)):
        by_hand = [counted(pair.target.model, draft, prompt, ends) for prompt in asked]
        tokens, rounds = sum(t for t, _ in by_hand), sum(n for _, n in by_hand)
        assert found["arms"][name]["tokens_per_call"] == tokens / rounds, name
        assert 1.0 < tokens / rounds < K + 1
        assert found["arms"][name]["k"] == K
    assert found["arms"]["plain"]["tokens_per_call"] == found["arms"]["mlx_lm_plain"]["tokens_per_call"] == 1.0
    static, theirs = found["arms"]["static"]["tokens_per_call"], found["arms"]["mlx_lm_spec_static"]["tokens_per_call"]
    assert static > 1.0 and theirs > 1.0
    assert {arm["tokens"] for arm in found["arms"].values()} == {found["arms"]["plain"]["tokens"]}
    assert found["settings"]["adapter"] == {"version": 7}


@pytest.mark.nightly
def test_half_precision_is_compared_up_to_ties(bench_files: BenchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where weights keep their stored precision."""

    def half(target: Path, draft: Path | None) -> Pair:
        pair = load_pair(target, draft)
        for loaded in (pair.target, pair.draft):
            assert loaded is not None
            shape_dependent(loaded.model).set_dtype(mx.bfloat16)
        return pair

    monkeypatch.setattr("service.evaluation.bench.decode.load_pair", half)
    task = Task(list(prompts(COUNT)), TOKENS, k=K)
    report = run_decode((bench_files.target, bench_files.draft), EngineSettings(), task, title="t", command="c")
    for name, arm in report.plain["arms"].items():
        assert arm["ties"]["positions"] == arm["tokens"], name
        assert arm["ties"]["rounding"] > 0.0
        assert arm["ties"]["lossless"], (name, arm["ties"])
    cells = {row[0]: row[3] for row in report.rows}
    assert all("ties per 1,000 tokens (the target's own:" in str(cells[name]) for name in report.plain["arms"])


def test_every_call_ends_with_a_token_of_the_target_but_the_last_may_be_cut() -> None:
    yes, no = True, False
    assert target_calls([]) == 0
    assert target_calls([no, no, no]) == 3
    assert target_calls([yes, yes, no, no, yes, no]) == 3
    assert target_calls([yes, no, yes, yes]) == 2


def test_mlx_lm_gets_the_full_head_and_no_lora_layers(bench_files: BenchFiles) -> None:
    pair = load_pair(bench_files.target, bench_files.draft)
    assert pair.draft is not None
    probe = mx.array([[5, 9, 30]])
    adapted = load(served(pair.draft).model, bench_files.adapter.ref, pair.provenance.draft).model
    assert not mx.isfinite(adapted(probe)).all().item(), "a cut head"
    names = {name for name, _ in leaves(with_full_head(adapted).parameters())}
    assert names == {name for name, _ in leaves(pair.draft.model.parameters())}
    assert mx.isfinite(with_full_head(adapted)(probe)).all().item()


def test_a_fused_draft_serves_what_the_adapter_does(bench_files: BenchFiles, tmp_path: Path) -> None:
    pair = load_pair(bench_files.target, bench_files.draft)
    assert pair.draft is not None
    probe = mx.array([[5, 9, 30]])
    expected = load(served(pair.draft).model, bench_files.adapter.ref, pair.provenance.draft).model(probe)
    found = served(load_model(fused_draft(bench_files.adapter, bench_files.draft, tmp_path / "fused"))).model(probe)
    assert not mx.isfinite(expected).all().item(), "a cut head"
    assert mx.array_equal(mx.isfinite(found), mx.isfinite(expected)).item()
    assert mx.allclose(found[..., :REDUCED], expected[..., :REDUCED], atol=1e-4).item()


@pytest.mark.nightly
def test_an_adapter_is_trained_through_the_real_loop_first(
    bench_files: BenchFiles, bench: Bench, tmp_path: Path
) -> None:
    config, out = tmp_path / "settings.toml", tmp_path / "found.json"
    small = "[training]\nepochs = 1\nrank = 4\nniceness = 0\nreplay = 0.0\n[gate]\nmin_prompts = 2\nmin_tokens = 20\n"
    config.write_text(bench_files.config.read_text() + small)
    lines = [{"id": p.id, "domain": "more", "prompt": p.prompt} for p in prompts(12, seed=5)]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--limit", 2, "--max-tokens", 6, "--k", 2, "--arms", "adapted,mlx_lm_spec_adapted", "--json", out)
    adapting = ("--adapt-on", tmp_path / "more.jsonl", "--adapt-limit", 8)
    status, _, err = bench("decode", "--prompts", bench_files.prompts, *words, *adapting, "--config", config)
    assert status == 0, err
    written = json.loads(out.read_text())
    assert list(written["arms"]) == ["plain", "adapted", "mlx_lm_spec_adapted"]
    assert {arm["identical"] for arm in written["arms"].values()} == {True}
    adapter = written["settings"]["adapter"]
    assert (adapter["trained_on"], adapter["prompts"]) == ("more.jsonl", 8)
    assert adapter["state"] in {"promoted", "rejected"}
    assert written["title"].endswith("adapted on 8 of more.jsonl")
    assert "adapted/mlx_lm_spec_adapted" in written["ratios"]


def test_arms_rotate() -> None:
    assert [rotated(["a", "b", "c"], turn) for turn in (0, 1, 2, 3)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


@pytest.mark.nightly
def test_the_command_shows_writes_and_names_no_folder(bench_files: BenchFiles, bench: Bench, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "png", "markdown")}
    asked = (
        "decode",
        "--prompts",
        bench_files.prompts,
        "--limit",
        3,
        "--max-tokens",
        6,
        "--config",
        bench_files.config,
    )
    status, out, err = bench(*asked, *(word for name, path in files.items() for word in (f"--{name}", path)))
    assert status == 0, err
    assert "static/plain" in out
    written = json.loads(files["json"].read_text())
    assert list(written["arms"]) == ["plain", "static", "lookup", "mlx_lm_plain", "mlx_lm_spec_static"]
    for arm in written["arms"].values():
        assert arm["identical"] is True
        assert 0 < arm["low"] <= arm["tokens_per_second"] <= arm["high"]
    speculation = written["arms"]["mlx_lm_spec_static"]
    tried = {int(k): rate for k, rate in speculation["tokens_per_second_by_k"].items()}
    assert tried.keys() == {1, 2, 3, 4}
    assert tried[speculation["k"]] == max(tried.values())
    assert written["arms"]["static"]["adaptive"] is True
    ratio, turns = written["ratios"]["static/plain"], written["turns"]
    by_turn = sorted(a / b for a, b in zip(turns["static"], turns["plain"], strict=True))
    assert ratio["median"] == by_turn[1]
    assert written["domains"]["a"]["prompts"] == 2
    assert written["domains"]["b"]["ratios"]["static/plain"]["median"] == turns["static"][1] / turns["plain"][1]
    assert written["machine"]["device"] in {"cpu", "metal", "cuda"}
    assert written["command"] == (
        "redraft bench decode --prompts prompts.jsonl --limit 3 --max-tokens 6 --config settings.toml"
    )
    document = files["markdown"].read_text()
    assert written["command"] in document
    for text in (document, files["json"].read_text()):
        assert str(tmp_path) not in text
        assert str(bench_files.target.parent) not in text
    assert files["png"].stat().st_size > 1000


def test_sampled_output_is_not_compared(bench_files: BenchFiles, bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "sampled.json"
    words = (
        "--limit",
        2,
        "--max-tokens",
        8,
        "--temperature",
        1,
        "--k",
        2,
        "--json",
        out,
        "--config",
        bench_files.config,
    )
    status, _, err = bench("decode", "--prompts", bench_files.prompts, *words)
    assert status == 0, err
    written = json.loads(out.read_text())
    assert {arm["identical"] for arm in written["arms"].values()} == {None}
    assert written["arms"]["static"]["k"] == written["arms"]["mlx_lm_spec_static"]["k"] == 2


def test_without_a_draft_only_plain_decoding_is_measured(bench_files: BenchFiles, bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "plain.json"
    words = ("--limit", 1, "--max-tokens", 4, "--draft", "none", "--json", out, "--config", bench_files.config)
    assert bench("decode", "--prompts", bench_files.prompts, *words)[0] == 0
    assert list(json.loads(out.read_text())["arms"]) == ["plain", "lookup", "mlx_lm_plain"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("decode", "--prompts", "{empty}"), "empty.jsonl holds no prompts"),
        (("decode", "--prompts", "/no/such.jsonl"), "cannot read the prompts in /no/such.jsonl"),
        (("decode", "--prompts", "{prompts}", "--domain", "z"), "holds no prompts of the domain z"),
        (("decode", "--prompts", "{prompts}", "--arms", "plain,fast"), "no arm 'fast': choose among plain, static"),
        (("decode", "--prompts", "{prompts}", "--adapter", "3"), "run `redraft db upgrade`"),
        (("decode", "--prompts", "{prompts}", "--adapt-limit", "3"), "--adapt-limit requires --adapt-on"),
        (("decode", "--prompts", "{prompts}", "--adapter", "1", "--adapt-on", "{prompts}"), "give either --adapter"),
        (("decode", "--prompts", "{prompts}", "--adapt-on", "{empty}"), "empty.jsonl holds no prompts"),
        (("serve", "--prompts", "{prompts}", "--clients", "0,x"), "--clients takes positive numbers"),
        (("serve", "--prompts", "{prompts}", "--clients", "0"), "--clients takes positive numbers"),
        (
            ("serve", "--prompts", "{prompts}", "--clients", "1,2"),
            "4 prompts are too few: 3 turns of 1, 2 clients need 9",
        ),
        (("serve", "--prompts", "{prompts}", "--clients", "1", "--arms", "vllm"), "no arm 'vllm': choose among plain"),
        (("serve", "--prompts", "{empty}"), "empty.jsonl holds no prompts"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_answered_with_one_sentence(
    words: tuple[str, ...], message: str, bench_files: BenchFiles, bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    places = {"empty": tmp_path / "empty.jsonl", "prompts": bench_files.prompts}
    status, out, err = bench(*(word.format_map(places) for word in words), "--config", bench_files.config)
    assert (status, out) == (1, "")
    assert message in err
    assert re.fullmatch(r"redraft: \S[^\n]*\n", err), err


@pytest.mark.parametrize(
    ("arm", "message"), [("adapted", "the arm adapted needs an adapter"), ("static", "the arm static needs a draft")]
)
def test_a_named_arm_that_lacks_something_is_refused(bench_files: BenchFiles, arm: str, message: str) -> None:
    models = (bench_files.target, bench_files.draft if arm == "adapted" else None)
    with pytest.raises(BadRequest, match=message):
        run_decode(models, EngineSettings(), Task(list(prompts(1)), 4), title="t", command="c", arms=[arm])


def test_mlx_lm_drafts_with_a_model_where_ours_is_a_head(bench_files: BenchFiles, bench: Bench, tmp_path: Path) -> None:
    head = tmp_path / "head"
    init_eagle_head(load_model(bench_files.target), None, head)
    words = [
        "decode",
        "--prompts",
        bench_files.prompts,
        "--config",
        bench_files.config,
        "--draft",
        head,
        "--max-tokens",
        8,
    ]
    words += ["--limit", 2, "--k", 2]
    words += ["--json", tmp_path / "report.json"]
    status, _, err = bench(*words, "--arms", "static,mlx_lm_spec_static")
    assert status == 1
    assert "needs a draft that mlx-lm runs: give --mlx-lm-draft" in err
    assert bench(*words)[0] == 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["arms"].keys() == {"plain", "static", "mlx_lm_plain"}
    assert bench(*words, "--arms", "static,mlx_lm_spec_static", "--mlx-lm-draft", bench_files.draft)[0] == 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["arms"].keys() == {"plain", "static", "mlx_lm_spec_static"}
    assert all(arm["identical"] for arm in written["arms"].values())
    assert written["settings"]["mlx_lm"] == {"draft": bench_files.draft.name, "adapter": None}
