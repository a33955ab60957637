"""The table of metrics: nothing is exposed that is not in it, and no label ever carries anything a client sent.

What vLLM's V1 engine has too bears vLLM's name and labels, but for `engine` (here is one), so that a dashboard made for vLLM
ports by renaming the prefix. Every series carries MODEL_LABEL, which the table leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.core import FinishReason

PREFIX = "redraft:"
MODEL_LABEL = "model_name"
OLDER = "older"
CODES = (
    "bad_request",
    "context_length_exceeded",
    "model_not_found",
    "tool_not_found",
    "forbidden",
    "invalid_api_key",
    "rate_limit_exceeded",
    "body_too_large",
    "unsupported_media_type",
    "overloaded",
    "unavailable",
    "timeout",
    "nonfinite_logits",
    "internal_error",
)
"""Values of the label `code`; anything else is counted as internal_error."""

FINISHED_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
"""Values of the label `finished_reason`: vLLM's words."""
TIES = ("true", "false")
"""Values of the label `tie`."""

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `name` lacks the prefix and is otherwise as exposed (counters end in _total); times are seconds. labels:
    those other than MODEL_LABEL."""

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
_BESIDE = "while a training run was under way and not paused; counted in both."
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
        "source_num_drafts_total",
        "Rounds with proposed tokens, by who proposed: draft model, look-up, prediction or grammar.",
        "source",
    ),
    _counter("source_num_draft_tokens_total", "Tokens proposed, by who proposed.", "source"),
    _counter("source_num_accepted_tokens_total", "Tokens accepted, by who proposed.", "source"),
    _counter("adapter_num_drafts_total", f"Rounds drafted, by adapter version. {_PER_ADAPTER}", "adapter"),
    _counter("adapter_num_draft_tokens_total", "Tokens drafted, by adapter version.", "adapter"),
    _counter("adapter_num_accepted_tokens_total", "Tokens accepted, by adapter version.", "adapter"),
    _counter("draft_failures_total", "Rounds decoded plainly because the draft broke, by version.", "adapter"),
    _counter("draft_length_rounds_total", "Rounds of one request by the number of tokens proposed.", "length"),
    _gauge(
        "spec_decode_estimated_speedup",
        "Tokens that recent rounds emitted, for each that plain decoding would have emitted in the same time, by the "
        "measured costs of rounds; 0 before the first round, and where costs are not measured.",
    ),
    _counter(
        "failure_cases_total",
        "First rejections of rounds of recorded answers; tie: the target's two best tokens there are closer than "
        "engine.tie_margin, so that the case counts for nothing.",
        "tie",
    ),
    _counter("rounds_total", "Rounds of one request, drafted or not: target calls per request, summed."),
    _histogram("round_seconds", "Wall time of one round of the whole batch.", FAST),
    _counter("generation_tokens_total", "Tokens emitted."),
    _counter("prompt_tokens_total", "Tokens of prompts whose prefill ended, those from the prefix cache too."),
    _counter("prefix_cache_queries_total", "Tokens that were looked for in the prefix cache: those of all prompts."),
    _counter("prefix_cache_hits_total", "Of those, tokens that the prefix cache held; the others were computed."),
    _counter("prefix_cache_disk_hits_total", "Tokens whose keys and values were read from the prefix cache's files."),
    _gauge("prefix_cache_disk_bytes", "Bytes of the prefix cache's files, those of other models in its folder too."),
    _gauge("num_requests_running", "Requests that prefill or decode."),
    _gauge("num_requests_waiting", "Requests in the queue."),
    _counter("requests_started_total", "Requests admitted to the queue."),
    _counter(
        "request_success_total",
        "Requests that ended with an answer, by reason; abort: given up by the client.",
        "finished_reason",
    ),
    _counter("requests_failed_total", "Requests that ended in an error after they were admitted.", "code"),
    _counter("requests_refused_total", "Requests that were not admitted.", "code"),
    _histogram("time_to_first_token_seconds", "From the request's arrival to its first token.", SLOW),
    _histogram("inter_token_latency_seconds", "Between two deliveries, of one or more tokens, to a request.", FAST),
    _histogram("e2e_request_latency_seconds", "From the arrival of a request with an answer to its end.", SLOW),
    _histogram("request_queue_time_seconds", "Of a request with an answer, in the queue until it was admitted.", SLOW),
    _histogram("request_prefill_time_seconds", "Of such a request, from its admission to its first token.", SLOW),
    _histogram("request_decode_time_seconds", "Of such a request, from its first token to its last.", SLOW),
    _histogram("request_prompt_tokens", "Tokens of such a request's prompt.", TOKENS),
    _histogram("request_generation_tokens", "Tokens of such a request's answer.", TOKENS),
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
    _gauge("build_info", "1; what runs, and on what.", "version", "mlx_version", "backend", "device"),
    _gauge("engine_ready", "1 while the engine serves."),
    _gauge("engine_idle_seconds", "Since the engine last made progress while it had work; 0 when idle."),
    _counter(
        "num_preemptions_total", "Requests that went back to the queue because memory for keys and values ran out."
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the memory for keys and values that rows that run take, and need to grow.",
    ),
    _gauge(
        "memory_bytes",
        "Of MLX in the server's process: active, cache (freed, held for reuse), peak; of active: weights, kv, prefix.",
        "kind",
    ),
    _gauge("adapter_active", "Version of the adapter that drafts now; 0: the bare draft."),
    _gauge("adapter_info", "1 for the adapter that drafts now.", "adapter", "parent", "rank", "sha256"),
    _gauge(
        "draft_tokens_per_call",
        "Tokens per target call with the base draft and with the adapter that serves (GET /gains); 0: not measured.",
        "draft",
    ),
    _gauge(
        "draft_gain",
        "Relative change of tokens per target call by the adapter that serves, and its 90 % interval; 0 without a measurement.",
        "bound",
    ),
    _counter("adapter_promotions_total", "Adapters that passed the gate and were switched in."),
    _counter("adapter_rollbacks_total", "Adapters rolled back, by the watch or by an operator."),
    _histogram("adapter_swap_seconds", "From staging a draft to its first round.", SLOW),
    _gauge("training_active", "1 while a training run is under way."),
    _gauge("training_paused", "1 while the run under way is paused; GET /train/{id} says why."),
    _gauge("training_run_state", "1 for the state of the latest run, 0 for the others.", "state"),
    _counter("training_runs_total", "Training runs that ended, by their last state.", "state"),
    _gauge("training_step", "Optimiser steps done by the latest run."),
    _gauge("training_steps", "Optimiser steps the latest run will take."),
    _gauge("training_loss", "Latest loss, nats per response position; 0 before the first step."),
    _gauge("training_grad_norm", "Latest gradient norm; 0 before the first step."),
    _gauge("training_tokens_per_second", "Training tokens per second; 0 before the first step."),
    _gauge("training_seconds_left", "Estimated rest of the latest run; 0 when unknown."),
    _counter("recorder_dropped_total", "Finished generations that could not be remembered."),
)
