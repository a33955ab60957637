"""`redraft bench round --bare`: a speculative loop of forty lines on mlx-lm's caches, compared with mlx-lm and this engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from service.core import BadRequest, Prompt, Sampling
from service.engine.adapters import Draft, served
from service.engine.strategy import using
from service.evaluation.bench.arms import Arm, Decoded, EngineArm, take_turns, tokens_per_second
from service.evaluation.bench.mlx_lm_arm import MlxLmArm
from service.evaluation.bench.report import Report, spread
from service.evaluation.bench.round import strategy_named
from service.evaluation.oracle import prefilled_cache
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine, encode_prompts
from service.models.pair import Pair, load_pair, mlx_lm_runs
from service.settings import EngineSettings

KS = (1, 2, 3, 4, 6, 8)
"""Draft lengths of the bare loop."""


class BareArm:
    """One greedy stream: in each round K draft steps, each launched by itself, one target call, acceptance on the device, one
    wait.

    Raises BadRequest for a draft that mlx-lm does not run.
    """

    def __init__(self, pair: Pair, draft: Draft, k: int) -> None:
        if pair.draft is None or not mlx_lm_runs(pair.draft.folder):
            raise BadRequest("the bare loop needs a draft that mlx-lm runs", field="draft")
        self.settings: Mapping[str, object] = {"k": k}
        self._target, self._draft, self._k = pair.target.model, draft.model, k
        self._eos, self._vocabulary = pair.eos, pair.shared_vocabulary

    def decode(self, prompt: Prompt) -> Decoded:
        """Decode one prompt greedily up to and with the end token; prefill is not timed. Raises BadRequest for caches that
        cannot be truncated."""
        target, draft, most = self._target, self._draft, prompt.sampling.max_tokens
        target_cache, draft_cache = (prefilled_cache(model, prompt.tokens) for model in (target, draft))
        if not all(layer.is_trimmable() for layer in [*target_cache, *draft_cache]):
            raise BadRequest("the bare loop needs caches that can be trimmed", field="bare")
        output, pending, calls = list[int](), [prompt.tokens[-1]], 0
        started = time.perf_counter()
        while len(output) < most and not self._eos.intersection(output[-self._k - 1 :]):
            feed, drafted = mx.array([pending]), list[mx.array]()
            for _ in range(self._k):
                logits = draft(feed, cache=draft_cache)[:, -1:, : self._vocabulary]
                feed = mx.argmax(logits, axis=-1).astype(mx.int32)
                mx.async_eval(feed)
                drafted.append(feed)
            proposal = mx.concatenate(drafted, axis=1)
            verified = mx.concatenate([mx.array([pending[-1:]], dtype=mx.int32), proposal], axis=1)
            chosen = mx.argmax(target(verified, cache=target_cache), axis=-1).astype(mx.int32)
            accepted = mx.cumprod((chosen[:, :-1] == proposal).astype(mx.int32), axis=1).sum(axis=1)
            # The one wait of a round. An accepted token is the target's own choice.
            count, *tokens = np.array(mx.concatenate([accepted, chosen[0]])).tolist()
            output += tokens[: count + 1]
            calls += 1
            for layer in target_cache:
                layer.trim(self._k - count)
            for layer in draft_cache:
                layer.trim(max(self._k - 1 - count, 0))
            # After a proposal that was accepted whole, the draft has not processed its last token.
            pending = tokens[count - 1 : count + 1] if count == self._k else [tokens[count]]
        seconds = time.perf_counter() - started
        ends = [at + 1 for at, token in enumerate(output) if token in self._eos]
        return Decoded(output[: min([most, *ends])], calls, seconds)


def run_bare(
    models: tuple[Path, Path | None],
    engine: EngineSettings,
    lines: Sequence[PromptLine],
    *,
    max_tokens: int,
    title: str,
    command: str,
    strategy: str = "own",
    on_progress: OnProgress = silent,
) -> Report:
    """One greedy stream by the bare loop at each of KS; then at its best K in turn with mlx-lm plain and with this engine,
    adaptive and at that K.

    models: folders of target and draft. JSON: bare{tokens_per_second_by_k{K}, best_k, arms{bare, mlx_lm_plain, engine_adaptive,
    engine_best_k}{tokens_per_second, low, high, tokens_per_call, identical}, prompts, max_tokens}. identical: the output is
    mlx-lm's, which ties may prevent in half precision.

    Raises BadRequest for a draft or caches that the loop cannot use, ModelError.
    """
    way = strategy_named(strategy)
    on_progress("loading the pair", 0, 1)
    pair = load_pair(*models)
    if pair.draft is None:
        raise BadRequest("the bare loop needs a draft", field="draft")
    draft, sampling = served(pair.draft), Sampling(max_tokens=max_tokens)
    prompts = [Prompt(tokens, sampling) for tokens in encode_prompts(pair, lines)]
    with using(way):
        on_progress("bare loop", 0, 1)
        loops: dict[int, Arm] = {k: BareArm(pair, draft, k) for k in KS}
        take_turns(loops, [replace(prompts[0], sampling=Sampling(max_tokens=2 * max(KS)))])
        decoded = take_turns(loops, prompts, lambda done, of: on_progress("bare loop", done, of))
        by_k = {k: tokens_per_second(answers) for k, answers in decoded.items()}
        best = max(by_k, key=by_k.__getitem__)
        arms: dict[str, Arm] = {
            "bare": loops[best],
            "mlx_lm_plain": MlxLmArm(pair.target.model, pair.eos),
            "engine_adaptive": EngineArm(pair, draft, k=engine.num_draft_tokens, prefill_chunk=engine.prefill_chunk),
            "engine_best_k": EngineArm(pair, draft, k=best, adaptive=False, prefill_chunk=engine.prefill_chunk),
        }
        on_progress("arms", 0, 1)
        take_turns(arms, prompts[:1])
        answers = take_turns(arms, prompts, lambda done, of: on_progress("arms", done, of))
    figures = {name: _figures(texts, answers["mlx_lm_plain"]) for name, texts in answers.items()}
    content = {"tokens_per_second_by_k": by_k, "best_k": best, "arms": figures}
    content |= {"prompts": len(prompts), "max_tokens": max_tokens}
    return _report(f"{title}, K = {best}", command, figures, by_k, content)


def _report(
    title: str,
    command: str,
    figures: Mapping[str, Mapping[str, Any]],
    by_k: Mapping[int, float],
    content: Mapping[str, Any],
) -> Report:
    rows = [
        (name, _rate(one), f"{one['tokens_per_call']:.2f}", "yes" if one["identical"] else "no")
        for name, one in figures.items()
    ]
    rows += [(f"bare, K = {k}", f"{rate:.1f}", "", "") for k, rate in by_k.items()]
    columns = ("arm", "tokens/s, median (90 %)", "tokens per call", "identical")
    bars = {"tokens/s, one stream": {name: float(one["tokens_per_second"]) for name, one in figures.items()}}
    return Report("bare", title, command, columns, tuple(rows), {"bare": content}, bars)


def _figures(texts: Sequence[Decoded], reference: Sequence[Decoded]) -> dict[str, Any]:
    rate = spread([one.rate for one in texts])
    return {
        "tokens_per_second": rate.median,
        "low": rate.low,
        "high": rate.high,
        "tokens_per_call": sum(len(one.tokens) for one in texts) / sum(one.calls for one in texts),
        "identical": all(one.tokens == other.tokens for one, other in zip(texts, reference, strict=True)),
    }


def _rate(arm: Mapping[str, Any]) -> str:
    return f"{arm['tokens_per_second']:.1f} ({arm['low']:.1f} to {arm['high']:.1f})"
