"""Benchmark reports: medians and ratios with their spread, and a section in a document."""

import json
from pathlib import Path

import pytest

from service.evaluation.bench import host
from service.evaluation.bench.report import Report, publish, ratios, spread, with_section


def test_a_spread_is_the_median_with_a_bootstrap_interval() -> None:
    assert spread([3.0]) == spread([3.0, 3.0, 3.0])
    one = spread([3.0])
    assert (one.median, one.low, one.high) == (3.0, 3.0, 3.0)
    # Of three values the median of a resample is the least with probability 7/27, above 5 %: the interval is the range.
    three = spread([10.0, 12.0, 20.0])
    assert (three.median, three.low, three.high) == (12.0, 10.0, 20.0)
    # Of 101 values 1 to 101 the median's standard error is about 1.25 * 29.2 / sqrt(101) = 3.6.
    many = spread([float(i) for i in range(1, 102)])
    assert many.median == 51.0
    assert 51 - 1.645 * 3.6 - 2.5 < many.low < 51 - 3.5
    assert 51 + 3.5 < many.high < 51 + 1.645 * 3.6 + 2.5
    assert spread([1.0, 2.0, 5.0, 9.0]) == spread([1.0, 2.0, 5.0, 9.0]), "the same every time"


def test_ratios_are_computed_per_turn() -> None:
    """A machine that becomes four times slower between turns changes no ratio."""
    speeds = {"fast": [20.0, 5.0, 10.0], "slow": [10.0, 2.5, 5.0], "other": [10.0, 10.0, 10.0]}
    found = ratios(speeds, [("fast", "slow"), ("fast", "other"), ("fast", "absent"), ("absent", "slow")])
    assert list(found) == ["fast/slow", "fast/other"]
    assert (found["fast/slow"].median, found["fast/slow"].low, found["fast/slow"].high) == (2.0, 2.0, 2.0)
    assert (found["fast/other"].median, found["fast/other"].low, found["fast/other"].high) == (1.0, 0.5, 2.0)


def test_turns_that_do_not_pair_are_an_error() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratios({"a": [1.0, 2.0], "b": [1.0]}, [("a", "b")])


def report(name: str, title: str, value: str) -> Report:
    return Report(
        name,
        title,
        "redraft bench x --prompts a.jsonl",
        ("arm", "speed"),
        (("plain|bare", value),),
        {"arms": {"plain": {"tokens_per_second": 1.5}}},
        {"speed": {"plain": 1.5}},
    )


def test_a_section_is_replaced_and_the_rest_of_the_document_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "new" / "benchmarks.md"

    def write(name: str, title: str, value: str) -> str:
        publish(report(name, title, value), png=None, markdown=document)
        return document.read_text()

    first = write("decode", "One stream -- maths", "21")
    assert first.startswith("# Benchmarks\n\n<!-- ")
    assert "\n## One stream -- maths\n" in first
    assert "\n    redraft bench x --prompts a.jsonl\n" in first
    assert "\n| arm | speed |\n| --- | --- |\n| plain\\|bare | 21 |\n" in first
    assert host.sentence() in " ".join(first.split())
    typed = f"By hand, \\1 before.\n\n{first}\nBy hand, after.\n"
    document.write_text(typed)
    second = write("serve", "Clients", "40")
    assert second.startswith(typed.rstrip())
    third = write("decode", "One stream -- maths", "22 \\1")
    assert third == second.replace("| plain\\|bare | 21 |", "| plain\\|bare | 22 \\1 |")
    fourth = write("decode", "One stream -- stories", "23")
    assert fourth.startswith(third.rstrip()), "another title is another section"
    assert fourth.count("## ") == 3


def test_another_machine_s_section_is_another_one() -> None:
    here, there = "bench decode: maths (this)", "bench decode: maths (that)"
    both = with_section(with_section("", here, "one"), there, "two")
    assert with_section(both, here, "three") == both.replace("one", "three")


def test_json_names_the_machine_and_the_picture_is_drawn_where_asked(tmp_path: Path) -> None:
    found = report("decode", "t", "1")
    publish(found, png=tmp_path / "b" / "r.png", markdown=None)
    written = json.loads(json.dumps(found.as_json()))
    assert written["arms"]["plain"]["tokens_per_second"] == 1.5
    assert (written["name"], written["title"]) == ("decode", "t")
    assert written["command"] == "redraft bench x --prompts a.jsonl"
    assert written["machine"] == host.describe()
    assert (tmp_path / "b" / "r.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described_without_folders_or_names() -> None:
    found = host.describe()
    assert found["cores"] and found["processor"] and found["memory_gib"]
    assert found["device"] in {"cpu", "metal", "cuda"}
    text = json.dumps(found)
    assert str(Path.home()) not in text
    assert "/" not in str(found["blas"])
    for name in ("mlx", "mlx-lm"):
        assert f"{name} " in host.sentence()
