"""What one server counts and measures, by the table's definitions, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from service.core import (
    BARE_DRAFT,
    AdapterRef,
    EngineStatus,
    FinishReason,
    MeasuredGain,
    Memory,
    Round,
    RunState,
    Source,
    Timings,
    TrainingRun,
    package_version,
)
from service.metrics.adapters import ACCEPTED, ADAPTER_COUNTERS, DRAFTED, DRAFTS, FAILURES, AdapterCounts
from service.metrics.definitions import CODES, FINISHED_REASONS, METRICS, MODEL_LABEL, PREFIX, TIES

_MEMORY = tuple(field.name for field in fields(Memory))
_PER_SOURCE = ("source_num_drafts_total", "source_num_draft_tokens_total", "source_num_accepted_tokens_total")


class Metrics:
    """All metrics of one server, in a registry of their own. Implements core.RoundObserver. Every method is thread-safe
    and returns at once.

    draft_tokens: tokens proposed per round at most, which fixes the `position` and `length` series. model_name: the served
    model's, which every series carries; empty: none does. adapters_kept: adapter versions that have series of their own.
    """

    def __init__(self, draft_tokens: int, model_name: str = "", adapters_kept: int = 8) -> None:
        self._model_name = model_name
        self._status: Callable[[], EngineStatus] | None = None
        self._registry = CollectorRegistry()
        self._adapters = AdapterCounts(adapters_kept)
        self._registry.register(self._adapters)
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._trains = False
        for item in METRICS:
            described = (PREFIX + item.name, item.help, item.labels)
            if item.kind == "gauge":
                self._gauges[item.name] = Gauge(*described, registry=self._registry)
            elif item.kind == "histogram":
                self._histograms[item.name] = Histogram(*described, buckets=item.buckets, registry=self._registry)
            elif item not in ADAPTER_COUNTERS:
                self._counters[item.name] = Counter(*described, registry=self._registry)
        # Naming a series makes it: a dashboard must find every one at 0, not absent, before anything has happened.
        for name, labels in (
            ("spec_decode_num_accepted_tokens_per_pos_total", range(draft_tokens)),
            ("draft_length_rounds_total", range(draft_tokens + 1)),
            ("request_success_total", FINISHED_REASONS.values()),
            ("failure_cases_total", TIES),
            ("requests_failed_total", CODES),
            ("requests_refused_total", CODES),
            ("training_runs_total", (state for state in RunState if state.over)),
        ):
            for label in labels:
                self._series(name, str(label))
        for source in Source:
            for name in _PER_SOURCE:
                self._series(name, source)
        for state in RunState:
            self._gauges["training_run_state"].labels(state)
        for kind in _MEMORY:
            self._gauges["memory_bytes"].labels(kind)
        self.serving(None)
        self.gain(None)
        self.built()

    def exposition(self, accept: str | None = None) -> tuple[bytes, str]:
        """The metrics as text and their content type: OpenMetrics when an Accept header names it, else Prometheus."""
        if self._status is not None:
            self._show_engine(self._status())
        shown = _Shown(self._registry, self._model_name)
        # Not the library's choose_encoder: its OpenMetrics rewrites the colon in sample names but not in TYPE lines
        # unless the scraper also asks for UTF-8 names, and a malformed version in the header makes it raise.
        if any(part.split(";")[0].strip() == "application/openmetrics-text" for part in (accept or "").split(",")):
            text = cast("bytes", openmetrics.generate_latest(shown, openmetrics.ALLOWUTF8))  # pyright: ignore[reportUnknownMemberType]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(shown), CONTENT_TYPE_PLAIN_0_0_4

    def totals(self) -> dict[str, float]:
        """What the counters without labels stand at, by their names in the table."""
        return {
            name: sample.value
            for name, counter in self._counters.items()
            for family in counter.collect()
            for sample in family.samples
            if sample.name == PREFIX + name and not sample.labels
        }

    def watch_engine(self, status: Callable[[], EngineStatus]) -> None:
        """Ask `status` once at every scrape for the engine's gauges, which are 0 until this is called."""
        self._status = status

    def _show_engine(self, status: EngineStatus) -> None:
        for name, value in (
            ("num_requests_running", status.rows),
            ("num_requests_waiting", status.waiting),
            ("engine_ready", status.ready),
            ("engine_idle_seconds", status.idle_seconds),
            ("adapter_active", status.adapter),
            ("kv_cache_usage_perc", status.kv_cache_usage),
            ("prefix_cache_disk_bytes", status.prefix_disk_bytes),
            ("spec_decode_estimated_speedup", status.speedup),
        ):
            self._gauges[name].set(value)
        for kind, size in asdict(status.memory).items():
            self._gauges["memory_bytes"].labels(kind).set(size)

    def observe(self, rounds: Sequence[Round], seconds: float) -> None:
        """Count one round of the batch: one Round per row, `seconds` of wall time together."""
        self._histograms["round_seconds"].observe(seconds)
        self._series("rounds_total").inc(len(rounds))
        self._series("generation_tokens_total").inc(sum(round_.emitted for round_ in rounds))
        for round_ in rounds:
            self._series("draft_length_rounds_total", str(round_.drafted)).inc()
        drafted = [round_ for round_ in rounds if round_.drafted]
        if not drafted:
            return
        self._series("spec_decode_num_drafts_total").inc(len(drafted))
        self._series("spec_decode_num_draft_tokens_total").inc(sum(round_.drafted for round_ in drafted))
        self._series("spec_decode_num_accepted_tokens_total").inc(sum(round_.accepted for round_ in drafted))
        tested = sum(min(round_.drafted, round_.accepted + 1) for round_ in drafted)
        self._series("spec_decode_num_tested_tokens_total").inc(tested)
        for position in range(max(round_.accepted for round_ in drafted)):
            kept = sum(round_.accepted > position for round_ in drafted)
            self._series("spec_decode_num_accepted_tokens_per_pos_total", str(position)).inc(kept)
        for round_ in drafted:
            counts = (1, round_.drafted, round_.accepted)
            for name, count in zip(_PER_SOURCE, counts, strict=True):
                self._series(name, round_.source).inc(count)
            if round_.source is Source.DRAFT:
                self._adapters.add(round_.adapter, tuple(zip((DRAFTS, DRAFTED, ACCEPTED), counts, strict=True)))

    def prompt_read(self, tokens: int, reused: int) -> None:
        """Count a prompt whose prefill is over: its tokens, and those of them that came from the prefix cache (`reused`)."""
        self._series("prompt_tokens_total").inc(tokens)
        self._series("prefix_cache_queries_total").inc(tokens)
        self._series("prefix_cache_hits_total").inc(reused)

    def prefix_read(self, tokens: int) -> None:
        """Count tokens that were read from the prefix cache's files."""
        self._series("prefix_cache_disk_hits_total").inc(tokens)

    def preempted(self) -> None:
        """Count a request that went back to the queue because memory ran out."""
        self._series("num_preemptions_total").inc()

    def failure_cases(self, ties: int, others: int) -> None:
        """Count the failure cases of an answer that is recorded: those that are ties, and others."""
        for label, count in zip(TIES, (ties, others), strict=True):
            self._series("failure_cases_total", label).inc(count)

    def draft_failed(self, adapter: int) -> None:
        """Count a round decoded without a draft because this adapter's failed."""
        self._adapters.add(adapter, ((FAILURES, 1),))

    def request_started(self) -> None:
        """Count a request that was admitted to the queue."""
        self._series("requests_started_total").inc()

    def request_refused(self, code: str) -> None:
        """Count a request that was not admitted. code: the error's; one not in CODES counts as internal_error."""
        self._series("requests_refused_total", code if code in CODES else "internal_error").inc()

    def request_failed(self, code: str) -> None:
        """Count an admitted request that ended in an error. code: the error's; one not in CODES counts as internal_error."""
        self._series("requests_failed_total", code if code in CODES else "internal_error").inc()

    def first_token(self, seconds: float) -> None:
        """Observe the seconds from a request's arrival to its first token; during training in that histogram too."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        if self._trains:
            self._histograms["training_time_to_first_token_seconds"].observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """Observe the seconds between two deliveries to a request; during training in that histogram too."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)
        if self._trains:
            self._histograms["training_inter_token_latency_seconds"].observe(seconds)

    def request_finished(self, finish: FinishReason, seconds: float, timings: Timings | None) -> None:
        """Count a request that ended with an answer. seconds: from its arrival to its end. timings: the engine's; None where it
        was given up before it was admitted."""
        self._series("request_success_total", FINISHED_REASONS[finish]).inc()
        self._histograms["e2e_request_latency_seconds"].observe(seconds)
        if timings is None:
            return
        self._histograms["request_queue_time_seconds"].observe(timings.queue_seconds)
        self._histograms["request_prompt_tokens"].observe(timings.prompt_n)
        self._histograms["request_generation_tokens"].observe(timings.predicted_n)
        if timings.predicted_n:
            self._histograms["request_prefill_time_seconds"].observe(timings.prefill_seconds)
            self._histograms["request_decode_time_seconds"].observe(timings.decode_seconds)

    def recorder_dropped(self, generations: int) -> None:
        """Count finished generations that could not be stored."""
        self._series("recorder_dropped_total").inc(generations)

    def training(self, run: TrainingRun) -> None:
        """Show the latest run: its state and how far it is."""
        paused = not run.state.over and run.progress.paused is not None
        self._trains = not run.state.over and not paused
        self._gauges["training_active"].set(not run.state.over)
        self._gauges["training_paused"].set(paused)
        for state in RunState:
            self._gauges["training_run_state"].labels(state).set(state is run.state)
        for name in ("step", "steps", "loss", "grad_norm", "tokens_per_second", "seconds_left"):
            self._gauges[f"training_{name}"].set(getattr(run.progress, name) or 0.0)

    def training_ended(self, state: RunState) -> None:
        """Count a run that is over."""
        self._series("training_runs_total", state).inc()

    def promoted(self) -> None:
        """Count an adapter that passed the gate and was switched in."""
        self._series("adapter_promotions_total").inc()

    def rolled_back(self) -> None:
        """Count an adapter that was rolled back."""
        self._series("adapter_rollbacks_total").inc()

    def gain(self, measured: MeasuredGain | None) -> None:
        """Show what the adapter that serves was measured to gain; None: that is not known."""
        per_call, change = self._gauges["draft_tokens_per_call"], self._gauges["draft_gain"]
        for name, field in (("base", "before"), ("adapter", "after")):
            per_call.labels(name).set(0.0 if measured is None else getattr(measured, field))
        for name, field in (("estimate", "gain"), ("low90", "low90"), ("high90", "high90")):
            change.labels(name).set(0.0 if measured is None else getattr(measured, field))

    def swapped(self, seconds: float) -> None:
        """Observe the seconds that one switch of drafts took, from the start of staging."""
        self._histograms["adapter_swap_seconds"].observe(seconds)

    def serving(self, ref: AdapterRef | None) -> None:
        """Show which adapter drafts from now on; None: the bare draft."""
        info = self._gauges["adapter_info"]
        info.clear()
        if ref is None:
            info.labels(str(BARE_DRAFT), "", "0", "").set(1)
        else:
            info.labels(str(ref.id), str(ref.parent), str(ref.rank), ref.sha256).set(1)

    def built(self, backend: str = "", device: str = "") -> None:
        """Show which versions run. backend, device: MLX's, once they are known."""
        info = self._gauges["build_info"]
        info.clear()
        info.labels(package_version("redraft"), package_version("mlx"), backend, device).set(1)

    def _series(self, name: str, label: str | None = None) -> Counter:
        counter = self._counters[name]
        return counter if label is None else counter.labels(label)


class _Shown(Collector):
    """A registry whose series carry the model's name, without the `_created` series, which would double its size and which no
    definition names."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._labels = {MODEL_LABEL: model_name} if model_name else {}

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in family.samples
                if not sample.name.endswith("_created")
            ]
            yield family
