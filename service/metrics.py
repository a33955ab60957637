"""Every metric and its definition. The one place that knows Prometheus.

Names follow vLLM's with our prefix, so a dashboard made for vLLM or llama.cpp ports by renaming the prefix. METRICS is
the documented table; nothing is exposed that is not in it. No label ever carries anything a client sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Literal, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from service.core import BARE_DRAFT, AdapterRef, EngineStatus, FinishReason, Round, RunState, Source, TrainingRun

PREFIX = "redraft:"
OLDER = "older"
CODES = (
    "bad_request",
    "body_too_large",
    "unsupported_media_type",
    "overloaded",
    "unavailable",
    "timeout",
    "internal_error",
)
"""Values of the label `code`; anything else is counted as internal_error."""

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `name` lacks the prefix and is otherwise as exposed (counters end in _total); times are seconds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, "gauge", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Definition:
    return Definition(name, "histogram", text, buckets=buckets)


_TESTED = "Tokens after the first rejection are drafted but never tested against the target."
_BESIDE = "while a training run was under way and did not hold still; counted in both."
_PER_ADAPTER = f'The newest versions have a series each (0: bare draft); what earlier ones counted is under "{OLDER}".'

METRICS: tuple[Definition, ...] = (
    _counter(
        "spec_decode_num_drafts_total", "Rounds of one request with at least one proposed token, whoever proposed."
    ),
    _counter("spec_decode_num_draft_tokens_total", f"Tokens proposed. {_TESTED}"),
    _counter(
        "spec_decode_num_accepted_tokens_total",
        "Proposed tokens that the target accepted. Acceptance rate, as vLLM has it: accepted / drafted; mean length: "
        "1 + accepted / drafts.",
    ),
    _counter("spec_decode_num_accepted_tokens_per_pos_total", "Accepted tokens by place in the draft.", "position"),
    _counter(
        "spec_decode_num_tested_tokens_total",
        "Drafted tokens up to and with the first rejection. llama.cpp's acceptance rate is accepted / tested, which is "
        "never below accepted / drafted.",
    ),
    _counter(
        "source_num_drafts_total", "Rounds with proposed tokens, by who proposed: draft model or look-up.", "source"
    ),
    _counter("source_num_draft_tokens_total", "Tokens proposed, by who proposed.", "source"),
    _counter("source_num_accepted_tokens_total", "Tokens accepted, by who proposed.", "source"),
    _counter("adapter_num_drafts_total", f"Rounds drafted, by adapter version. {_PER_ADAPTER}", "adapter"),
    _counter("adapter_num_draft_tokens_total", "Tokens drafted, by adapter version.", "adapter"),
    _counter("adapter_num_accepted_tokens_total", "Tokens accepted, by adapter version.", "adapter"),
    _counter("draft_failures_total", "Rounds decoded plainly because the draft broke, by version.", "adapter"),
    _counter("draft_length_rounds_total", "Rounds of one request by the number of tokens proposed.", "length"),
    _counter("rounds_total", "Rounds of one request, drafted or not: target calls per request, summed."),
    _histogram("round_seconds", "Wall time of one round of the whole batch.", FAST),
    _counter("generation_tokens_total", "Tokens emitted."),
    _counter("prompt_tokens_total", "Prompt tokens of requests that ended."),
    _counter(
        "prefix_cache_queries_total", "Tokens of prompts whose reading ended, by the model or from the prefix cache."
    ),
    _counter("prefix_cache_hits_total", "Of those, tokens that the prefix cache held; the others were read."),
    _gauge("requests_running", "Requests being decoded or having their prompt read."),
    _gauge("requests_waiting", "Requests in the queue."),
    _counter("requests_started_total", "Requests admitted to the queue."),
    _counter("requests_finished_total", "Requests that ended with an answer, by reason.", "finish"),
    _counter("requests_failed_total", "Requests that ended in an error after they were admitted.", "code"),
    _counter("requests_refused_total", "Requests that were not admitted.", "code"),
    _histogram("time_to_first_token_seconds", "From the request's arrival to its first token.", SLOW),
    _histogram("inter_token_latency_seconds", "Between two deliveries, of one or more tokens, to a request.", FAST),
    _histogram("request_seconds", "From a request's arrival to its end.", SLOW),
    _histogram(
        "training_time_to_first_token_seconds",
        f"The same as time_to_first_token_seconds, of first tokens that came {_BESIDE}",
        SLOW,
    ),
    _histogram(
        "training_inter_token_latency_seconds",
        f"The same as inter_token_latency_seconds, of deliveries that came {_BESIDE}",
        FAST,
    ),
    _gauge("engine_ready", "1 while the engine serves."),
    _gauge("engine_idle_seconds", "Since the engine last made progress while it had work; 0 when idle."),
    _gauge("adapter_active", "Version of the adapter that drafts now; 0: the bare draft."),
    _gauge("adapter_info", "1 for the adapter that drafts now.", "adapter", "parent", "rank", "sha256"),
    _counter("adapter_promotions_total", "Adapters that passed the gate and were switched in."),
    _counter("adapter_rollbacks_total", "Adapters taken back, by the watch or by an operator."),
    _histogram("adapter_swap_seconds", "From staging a draft to its first round.", SLOW),
    _gauge("training_active", "1 while a training run is under way."),
    _gauge("training_paused", "1 while the run under way holds still; GET /train/{id} says why."),
    _gauge("training_run_state", "1 for the state of the latest run, 0 for the others.", "state"),
    _counter("training_runs_total", "Training runs that ended, by their last state.", "state"),
    _gauge("training_step", "Optimiser steps done by the latest run."),
    _gauge("training_steps", "Optimiser steps the latest run will take."),
    _gauge("training_loss", "Latest loss, nats per response position; 0 before the first step."),
    _gauge("training_grad_norm", "Latest gradient norm; 0 before the first step."),
    _gauge("training_tokens_per_second", "Training tokens per second; 0 before the first step."),
    _gauge("training_seconds_left", "Estimated rest of the latest run; 0 when unknown."),
    _counter(
        "cases_supplied_total", "Failure cases worked out afterwards, from generations on which no draft was tried."
    ),
    _counter("recorder_dropped_total", "Finished generations that could not be remembered."),
)

_ADAPTER_COUNTERS = tuple(item for item in METRICS if item.labels == ("adapter",))
_DRAFTS, _DRAFTED, _ACCEPTED, _FAILURES = range(4)
_PER_SOURCE = ("source_num_drafts_total", "source_num_draft_tokens_total", "source_num_accepted_tokens_total")


class _AdapterCounts(Collector):
    """Counters per adapter version for the `kept` versions used last; what others had counted is added up as OLDER.

    The unlabelled totals are separate metrics because folding moves counts: a rate over the sum of these series would
    show what an old version had ever counted as if it happened now.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._lock = Lock()
        self._versions: OrderedDict[int, list[int]] = OrderedDict({BARE_DRAFT: [0] * len(_ADAPTER_COUNTERS)})
        self._older = [0] * len(_ADAPTER_COUNTERS)

    def add(self, adapter: int, counts: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            row = self._versions.setdefault(adapter, [0] * len(_ADAPTER_COUNTERS))
            self._versions.move_to_end(adapter)
            for index, amount in counts:
                row[index] += amount
            while len(self._versions) > self._kept:
                _, folded = self._versions.popitem(last=False)
                self._older = [mine + theirs for mine, theirs in zip(self._older, folded, strict=True)]

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            rows = [(str(adapter), tuple(row)) for adapter, row in self._versions.items()] + [
                (OLDER, tuple(self._older))
            ]
        for index, item in enumerate(_ADAPTER_COUNTERS):
            family = CounterMetricFamily(PREFIX + item.name, item.help, labels=item.labels)
            for label, row in rows:
                family.add_metric([label], row[index])
            yield family


class Metrics:
    """All metrics of one server, in a registry of their own. Implements core.RoundObserver. Every method is thread-safe
    and returns at once.

    draft_tokens: tokens proposed per round at most, which fixes the `position` and `length` series. adapters_kept: adapter
    versions that have series of their own.
    """

    def __init__(self, draft_tokens: int, adapters_kept: int = 8) -> None:
        self._registry = CollectorRegistry()
        self._adapters = _AdapterCounts(adapters_kept)
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
            elif item not in _ADAPTER_COUNTERS:
                self._counters[item.name] = Counter(*described, registry=self._registry)
        # Naming a series makes it: a dashboard must find every one at 0, not absent, before anything has happened.
        for name, labels in (
            ("spec_decode_num_accepted_tokens_per_pos_total", range(draft_tokens)),
            ("draft_length_rounds_total", range(draft_tokens + 1)),
            ("requests_finished_total", FinishReason),
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
        self.serving(None)

    def exposition(self, accept: str | None = None) -> tuple[bytes, str]:
        """The metrics as text and their content type: OpenMetrics when an Accept header names it, else Prometheus."""
        shown = _Shown(self._registry)
        # Not the library's choose_encoder: its OpenMetrics rewrites the colon in sample names but not in TYPE lines
        # unless the scraper also asks for UTF-8 names, and a malformed version in the header makes it raise.
        if any(part.split(";")[0].strip() == "application/openmetrics-text" for part in (accept or "").split(",")):
            text = cast("bytes", openmetrics.generate_latest(shown, openmetrics.ALLOWUTF8))  # pyright: ignore[reportUnknownMemberType]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(shown), CONTENT_TYPE_PLAIN_0_0_4

    def watch_engine(self, status: Callable[[], EngineStatus]) -> None:
        """Ask `status` at every scrape for the engine's gauges, which are 0 until this is called."""
        self._gauges["requests_running"].set_function(lambda: status().rows)
        self._gauges["requests_waiting"].set_function(lambda: status().waiting)
        self._gauges["engine_ready"].set_function(lambda: float(status().ready))
        self._gauges["engine_idle_seconds"].set_function(lambda: status().idle_seconds)
        self._gauges["adapter_active"].set_function(lambda: status().adapter)

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
                self._adapters.add(round_.adapter, tuple(zip((_DRAFTS, _DRAFTED, _ACCEPTED), counts, strict=True)))

    def prompt_read(self, tokens: int, reused: int) -> None:
        self._series("prefix_cache_queries_total").inc(tokens)
        self._series("prefix_cache_hits_total").inc(reused)

    def draft_failed(self, adapter: int) -> None:
        self._adapters.add(adapter, ((_FAILURES, 1),))

    def request_started(self) -> None:
        self._series("requests_started_total").inc()

    def request_refused(self, code: str) -> None:
        self._series("requests_refused_total", code if code in CODES else "internal_error").inc()

    def request_failed(self, code: str) -> None:
        self._series("requests_failed_total", code if code in CODES else "internal_error").inc()

    def first_token(self, seconds: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        if self._trains:
            self._histograms["training_time_to_first_token_seconds"].observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        self._histograms["inter_token_latency_seconds"].observe(seconds)
        if self._trains:
            self._histograms["training_inter_token_latency_seconds"].observe(seconds)

    def request_finished(self, finish: FinishReason, prompt_tokens: int, seconds: float) -> None:
        self._series("requests_finished_total", finish).inc()
        self._series("prompt_tokens_total").inc(prompt_tokens)
        self._histograms["request_seconds"].observe(seconds)

    def recorder_dropped(self, generations: int) -> None:
        self._series("recorder_dropped_total").inc(generations)

    def cases_supplied(self, cases: int) -> None:
        self._series("cases_supplied_total").inc(cases)

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
        self._series("adapter_promotions_total").inc()

    def rolled_back(self) -> None:
        self._series("adapter_rollbacks_total").inc()

    def swapped(self, seconds: float) -> None:
        self._histograms["adapter_swap_seconds"].observe(seconds)

    def serving(self, ref: AdapterRef | None) -> None:
        """Show which adapter drafts from now on; None: the bare draft."""
        info = self._gauges["adapter_info"]
        info.clear()
        if ref is None:
            info.labels(str(BARE_DRAFT), "", "0", "").set(1)
        else:
            info.labels(str(ref.id), str(ref.parent), str(ref.rank), ref.sha256).set(1)

    def _series(self, name: str, label: str | None = None) -> Counter:
        counter = self._counters[name]
        return counter if label is None else counter.labels(label)


class _Shown(Collector):
    """A registry without the `_created` series, which would double its size and which no definition names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
