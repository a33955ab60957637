"""Every metric is in the table, starts at zero, and equals a recount of the inputs."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from service.core import (
    AdapterRef,
    AdapterState,
    EngineStatus,
    FinishReason,
    Memory,
    Progress,
    Round,
    RunState,
    Source,
    Timings,
    TrainingRun,
    Trigger,
)
from service.metrics import CODES, FINISHED_REASONS, METRICS, MODEL_LABEL, OLDER, PREFIX, TIES, Metrics

K = 4
MODEL = 'org/a "model"\nof two lines'


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name without prefix, label values but for the model's name) -> value."""
    text = metrics.exposition()[0].decode()
    return {
        (sample.name.removeprefix(PREFIX), tuple(v for n, v in sample.labels.items() if n != MODEL_LABEL)): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


Samples = dict[tuple[str, tuple[str, ...]], float]


def by_label(metrics: Metrics | Samples, name: str) -> dict[str, float]:
    known = samples(metrics) if isinstance(metrics, Metrics) else metrics
    return {labels[0]: value for (found, labels), value in known.items() if found == name}


@st.composite
def one_round(draw: st.DrawFn) -> Round:
    drafted = draw(st.integers(0, K))
    accepted = draw(st.integers(0, drafted))
    return Round(
        draw(st.integers(0, 12)),
        draw(st.integers(0, 500)),
        drafted,
        accepted,
        draw(st.integers(0, accepted + 1)),
        draw(st.sampled_from(Source)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(one_round(), max_size=5), max_size=25), st.integers(1, 8))
@pytest.mark.promise(4)
def test_counters_equal_a_recount_of_the_rounds(batches: list[list[Round]], limit: int) -> None:
    metrics = Metrics(draft_tokens=K, adapters_kept=limit)
    for batch in batches:
        metrics.observe(batch, 0.05)
    rounds = [item for batch in batches for item in batch]
    drafted = [item for item in rounds if item.drafted]
    found = samples(metrics)
    assert found["rounds_total", ()] == len(rounds)
    assert found["round_seconds_count", ()] == len(batches)
    assert found["generation_tokens_total", ()] == sum(item.emitted for item in rounds)
    assert found["spec_decode_num_drafts_total", ()] == len(drafted)
    assert found["spec_decode_num_draft_tokens_total", ()] == sum(item.drafted for item in rounds)
    assert found["spec_decode_num_accepted_tokens_total", ()] == sum(item.accepted for item in rounds)
    tested = sum(item.accepted + (item.accepted < item.drafted) for item in rounds)
    assert found["spec_decode_num_tested_tokens_total", ()] == tested
    positions = by_label(found, "spec_decode_num_accepted_tokens_per_pos_total")
    assert positions == {str(place): sum(item.accepted > place for item in rounds) for place in range(K)}
    for source in Source:
        named = [item for item in drafted if item.source is source]
        assert by_label(found, "source_num_drafts_total")[source] == len(named)
        assert by_label(found, "source_num_draft_tokens_total")[source] == sum(item.drafted for item in named)
        assert by_label(found, "source_num_accepted_tokens_total")[source] == sum(item.accepted for item in named)
    # Look-ups do not count for an adapter.
    drafted = [item for item in drafted if item.source is Source.DRAFT]
    for name, amounts in (
        ("adapter_num_drafts_total", [1 for _ in drafted]),
        ("adapter_num_draft_tokens_total", [item.drafted for item in drafted]),
        ("adapter_num_accepted_tokens_total", [item.accepted for item in drafted]),
    ):
        versions = by_label(found, name)
        assert sum(versions.values()) == sum(amounts)
        assert len(versions) <= limit + 1
        if len({0, *(item.adapter for item in drafted)}) <= limit:
            expected = {OLDER: 0, "0": 0}
            for item, amount in zip(drafted, amounts, strict=True):
                expected[str(item.adapter)] = expected.get(str(item.adapter), 0) + amount
            assert versions == expected


def test_the_versions_used_last_keep_series_of_their_own() -> None:
    metrics = Metrics(draft_tokens=K, adapters_kept=3)
    for adapter in (1, 2, 3, 1, 4):
        metrics.observe([Round(adapter, 0, 4, 2, 3)], 0.01)
    assert by_label(metrics, "adapter_num_drafts_total") == {"3": 1, "1": 2, "4": 1, OLDER: 1}
    metrics.draft_failed(2)
    assert by_label(metrics, "draft_failures_total") == {"1": 0, "4": 0, "2": 1, OLDER: 0}
    assert by_label(metrics, "adapter_num_accepted_tokens_total") == {"1": 4, "4": 2, "2": 0, OLDER: 4}


def test_every_series_is_there_at_zero_from_the_start() -> None:
    metrics = Metrics(draft_tokens=K)
    found = samples(metrics)
    info = {key for key in found if key[0] in {"adapter_info", "build_info"}}
    assert {found[key] for key in info} == {1}
    assert {value for key, value in found.items() if key not in info} == {0}
    names = {name for name, _ in found}
    for item in METRICS:
        suffixes = ("_bucket", "_sum", "_count") if item.kind == "histogram" else ("",)
        assert names >= {item.name + suffix for suffix in suffixes}
    labels = {item.name: item.labels for item in METRICS if item.labels}
    expected = {
        "position": {str(place) for place in range(K)},
        "finished_reason": set(FINISHED_REASONS.values()),
        "tie": set(TIES),
        "code": set(CODES),
        "source": set(Source),
        "adapter": {"0", OLDER},
        "kind": {"active", "cache", "peak", "weights", "kv", "prefix"},
    }
    for name, (label, *more) in labels.items():
        if label in expected and not more:
            assert set(by_label(metrics, name)) == expected[label], name
    assert set(by_label(metrics, "training_run_state")) == set(RunState)
    assert set(by_label(metrics, "training_runs_total")) == {state for state in RunState if state.over}


@pytest.mark.parametrize("accept", [None, "application/openmetrics-text; version=1.0.0"])
def test_nothing_is_exposed_that_the_table_does_not_name(accept: str | None) -> None:
    metrics = Metrics(K, MODEL)
    metrics.observe([Round(5, 0, 4, 2, 3)], 0.01)
    text, content_type = metrics.exposition(accept)
    families = parse_text(text.decode()) if accept is None else parse_openmetrics(text.decode())
    table = {PREFIX + item.name.removesuffix("_total"): item for item in METRICS}
    seen: set[str] = set()
    for family in families:
        item = table[family.name]
        seen.add(family.name)
        assert (family.type, family.documentation) == (item.kind, item.help)
        for sample in family.samples:
            assert sample.name.startswith(family.name)
            assert sample.labels.pop(MODEL_LABEL) == MODEL
            assert set(sample.labels) - {"le"} == set(item.labels)
    assert seen == set(table)
    assert content_type.startswith("text/plain" if accept is None else "application/openmetrics-text")


def test_two_servers_in_one_process_count_apart() -> None:
    one, other = Metrics(draft_tokens=K), Metrics(draft_tokens=K)
    one.observe([Round(0, 0, 4, 2, 3)], 0.01)
    assert samples(one)["rounds_total", ()] == 1
    assert samples(other)["rounds_total", ()] == 0


def test_counting_from_many_threads_loses_nothing() -> None:
    metrics = Metrics(draft_tokens=K, adapters_kept=2)
    batch = [Round(adapter, 0, 4, 3, 4) for adapter in range(4)]

    def count() -> None:
        for _ in range(300):
            metrics.observe(batch, 0.01)
            metrics.recorder_dropped(2)

    threads = [threading.Thread(target=count, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert sum(by_label(metrics, "adapter_num_drafts_total").values()) <= 4 * 4 * 300
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert samples(metrics)["spec_decode_num_accepted_tokens_total", ()] == 3 * 4 * 4 * 300
    assert sum(by_label(metrics, "adapter_num_accepted_tokens_total").values()) == 3 * 4 * 4 * 300
    assert samples(metrics)["recorder_dropped_total", ()] == 2 * 4 * 300


def test_the_engine_is_asked_at_every_scrape() -> None:
    memory = {"active": 11, "cache": 12, "peak": 13, "weights": 5, "kv": 4, "prefix": 2}
    status = EngineStatus(True, "serving", 3, 2, 0.5, 7, 0, Memory(**memory), 0.25, 99, 1.5)
    asked: list[EngineStatus] = []
    metrics = Metrics(draft_tokens=K)

    def ask() -> EngineStatus:
        asked.append(status)
        return status

    metrics.watch_engine(ask)
    found = samples(metrics)
    assert len(asked) == 1, "the gauges of one scrape are of one moment"
    shown = ("num_requests_running", "num_requests_waiting", "engine_ready", "engine_idle_seconds", "adapter_active")
    names = (*shown, "kv_cache_usage_perc", "prefix_cache_disk_bytes", "spec_decode_estimated_speedup")
    assert [found[name, ()] for name in names] == [3, 2, 1, 0.5, 7, 0.25, 99, 1.5]
    assert by_label(metrics, "memory_bytes") == memory
    status = EngineStatus(False, "draining", 0, 0, 0.0, 8, 0)
    assert [samples(metrics)[name, ()] for name in names] == [0, 0, 0, 0, 8, 0, 0, 0]
    assert set(by_label(metrics, "memory_bytes").values()) == {0}


def test_prompt_tokens_are_counted_by_computed_and_cached() -> None:
    metrics = Metrics(draft_tokens=K)
    metrics.prompt_read(100, 0)
    metrics.prompt_read(70, 64)
    found = samples(metrics)
    assert (found["prefix_cache_queries_total", ()], found["prefix_cache_hits_total", ()]) == (170, 64)
    assert found["prompt_tokens_total", ()] == 170


def test_requests_are_counted_by_how_they_ended() -> None:
    metrics = Metrics(draft_tokens=K)
    metrics.request_started()
    metrics.first_token(0.2)
    metrics.next_tokens(0.05)
    spent = Timings(9, 0.3, 5, 0.3, 0, 0, 3, 0, (), 0, queue_seconds=0.1, first_token_seconds=0.35)
    metrics.request_finished(FinishReason.LENGTH, 0.7, spent)
    metrics.request_finished(FinishReason.CANCELLED, 0.5, Timings(7, 0.2, 0, 0.0, 0, 0, 0, 0, (), 0, 0.15))
    metrics.request_finished(FinishReason.CANCELLED, 0.25, None)
    metrics.request_refused("overloaded")
    metrics.request_refused("something a client made up")
    metrics.request_failed("timeout")
    found = samples(metrics)
    assert found["requests_started_total", ()] == 1
    assert by_label(metrics, "request_success_total") == {"stop": 0, "length": 1, "abort": 2}
    for name, count, total in (
        ("e2e_request_latency_seconds", 3, 1.45),
        ("request_queue_time_seconds", 2, 0.25),
        ("request_prefill_time_seconds", 1, 0.25),
        ("request_decode_time_seconds", 1, 0.25),
        ("request_prompt_tokens", 2, 16),
        ("request_generation_tokens", 2, 5),
    ):
        assert found[f"{name}_count", ()] == count, name
        assert found[f"{name}_sum", ()] == pytest.approx(total), name
    assert found["time_to_first_token_seconds_sum", ()] == pytest.approx(0.2)
    assert found["inter_token_latency_seconds_count", ()] == 1
    assert by_label(metrics, "requests_refused_total") == {
        **dict.fromkeys(CODES, 0),
        "overloaded": 1,
        "internal_error": 1,
    }
    assert by_label(metrics, "requests_failed_total") == {**dict.fromkeys(CODES, 0), "timeout": 1}


def test_failure_cases_are_counted_with_their_ties_apart() -> None:
    metrics = Metrics(draft_tokens=K)
    metrics.failure_cases(2, 5)
    metrics.failure_cases(0, 1)
    assert by_label(metrics, "failure_cases_total") == {"true": 2, "false": 6}


def test_what_runs_is_shown_as_it_becomes_known() -> None:
    metrics = Metrics(draft_tokens=K)
    versions = version("mlx"), version("redraft")
    # Labels come in the order of their names.
    assert [labels for name, labels in samples(metrics) if name == "build_info"] == [("", "", *versions)]
    metrics.built("cuda", "NVIDIA H200")
    assert [labels for name, labels in samples(metrics) if name == "build_info"] == [("cuda", "NVIDIA H200", *versions)]


def test_the_latest_run_and_the_serving_adapter_are_shown() -> None:
    now = datetime.now(UTC)
    metrics = Metrics(draft_tokens=K)
    run = TrainingRun(
        3,
        RunState.TRAINING,
        Trigger.CASES,
        1,
        0,
        9,
        4,
        Progress(2, 8, 1.5, 0.25, 900.0, 12.0),
        None,
        None,
        None,
        now,
        None,
    )
    metrics.training(run)
    found = samples(metrics)
    assert found["training_active", ()] == 1
    assert {state for state, value in by_label(metrics, "training_run_state").items() if value} == {"training"}
    shown = ("step", "steps", "loss", "grad_norm", "tokens_per_second", "seconds_left")
    assert [found[f"training_{name}", ()] for name in shown] == [2, 8, 1.5, 0.25, 900.0, 12.0]
    over = TrainingRun(3, RunState.FAILED, Trigger.CASES, 1, 0, 9, 4, Progress(), None, None, "NaN", now, now)
    metrics.training(over)
    metrics.training_ended(over.state)
    assert samples(metrics)["training_active", ()] == 0
    over_states = [state.value for state in RunState if state.over]
    assert by_label(metrics, "training_runs_total") == dict.fromkeys(over_states, 0) | {"failed": 1}
    metrics.promoted()
    metrics.swapped(0.4)
    metrics.serving(AdapterRef(5, Path("a"), "ab", 16, 2.0, (), "cd", 3, 3, AdapterState.ACTIVE, now))
    assert [labels for name, labels in samples(metrics) if name == "adapter_info"] == [("5", "3", "16", "ab")]
    metrics.rolled_back()
    metrics.serving(None)
    assert [labels[0] for name, labels in samples(metrics) if name == "adapter_info"] == ["0"]
    assert samples(metrics)["adapter_promotions_total", ()] == samples(metrics)["adapter_rollbacks_total", ()] == 1
