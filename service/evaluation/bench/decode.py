"""`redraft bench decode`: one stream, every arm in turn on every prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from service.core import BadRequest, Prompt, Sampling
from service.engine.adapters import Draft, load, served
from service.evaluation.bench.adapter import Adapter
from service.evaluation.bench.decode_arms import ARMS, PLAIN, Contest, make
from service.evaluation.bench.report import Report, Spread, ratios, spread
from service.evaluation.bench.arms import Arm, Decoded, take_turns
from service.evaluation.oracle import naive_greedy
from service.evaluation.prompts import PromptLine
from service.evaluation.training_run import Step
from service.evaluation.ties import Text, TieReport, exact, measure_ties
from service.models.pair import Pair, load_pair, mlx_lm_runs
from service.models.text import TextEncoder
from service.settings import EngineSettings

CHECKED = 3
"""Prompts on which the plain arm itself is held against the target decoded naively."""
PROBES, PROBE_TOKENS = 3, 48
"""Prompts, spread over the file, and tokens of each, on which mlx-lm's best K is found and every arm warms up."""
OURS = [name for name in ARMS if not name.startswith("mlx_lm")]
THEIRS = [name for name in ARMS if name.startswith("mlx_lm")]
PAIRS = [*((name, PLAIN) for name in OURS if name != PLAIN), *product(OURS, THEIRS)]


@dataclass(frozen=True, slots=True)
class Task:
    """What to decode. k: exactly so many drafted tokens in every arm that drafts; None: what each does best."""

    lines: Sequence[PromptLine]
    max_tokens: int = 128
    temperature: float = 0.0
    k: int | None = None

    def prompts(self, pair: Pair) -> list[Prompt]:
        """Each line encoded as a chat of one user turn, in order, with this task's sampling."""
        encoder = TextEncoder(pair.target.tokenizer)
        # Without a seed, for this engine's own rule at T > 0 is rejection.
        sampling = Sampling(max_tokens=self.max_tokens, temperature=self.temperature)
        chats = ([{"role": "user", "content": line.prompt}] for line in self.lines)
        return [Prompt(encoder.encode_chat(chat), sampling) for chat in chats]


@dataclass(frozen=True, slots=True)
class Peer:
    """What mlx-lm drafts with where it cannot run what this engine drafts with, or is to be given something else: the folder of
    a model, and an adapter of it."""

    folder: Path
    adapter: Adapter | None


def run_decode(
    models: tuple[Path, Path | None],
    engine: EngineSettings,
    task: Task,
    *,
    title: str,
    command: str,
    arms: Sequence[str] | None = None,
    adapter: Adapter | None = None,
    peer: Peer | None = None,
    on_step: Step = lambda stage, done, of: None,
) -> Report:
    """models: folders of target and draft. peer: None for the same draft, where mlx-lm runs it. arms: None for all that draft
    and adapter allow; the plain one always runs.

    JSON: arms{NAME{tokens_per_second, low, high, tokens_per_call, identical, tokens, …}}, ratios{"A/B"{median, low, high}},
    domains{NAME{arms, ratios}}, turns{NAME[tokens per second of each prompt]}, settings. Where precision leaves ties (see
    evaluation/ties.py), arms have ties{per_1000, own_per_1000, differences, rounding, positions, lossless} too.

    Raises BadRequest for arms that cannot be made, AdapterRefused, ModelError.
    """
    on_step("loading the pair", 0, 1)
    pair = load_pair(*models)
    prompts = task.prompts(pair)
    brief = replace(prompts[0].sampling, max_tokens=min(task.max_tokens, PROBE_TOKENS))
    probes = [replace(prompt, sampling=brief) for prompt in prompts[:: -(-len(prompts) // PROBES)]]
    on_step("making the arms, finding mlx-lm's best K", 0, 1)
    made = make(_contest(pair, adapter, peer, engine, task.k, probes), arms)
    on_step("warming up", 0, 1)
    take_turns(made, probes[:1])
    heard = take_turns(made, prompts, lambda done, of: on_step("decoding", done, of))
    on_step("checking", 0, 1)
    greedy = task.temperature == 0.0
    identical = _identical(pair, prompts, heard) if greedy else None
    ties: dict[str, TieReport] = {}
    if greedy and not exact(pair.target.model):
        ties = _ties(pair, prompts, heard, task.k or engine.num_draft_tokens, on_step)
    settings = {
        "prompts": len(prompts),
        "max_tokens": task.max_tokens,
        "temperature": task.temperature,
        "k": task.k,
        "engine": engine.model_dump(include={"num_draft_tokens", "num_lookup_tokens", "adaptive", "prefill_chunk"}),
        "dtype": _dtype(pair),
        "adapter": adapter.told if adapter else None,
        "mlx_lm": {"draft": peer.folder.name, "adapter": peer.adapter.told if peer.adapter else None} if peer else None,
    }
    return _report(task.lines, made, heard, identical, ties, title, command, settings)


def _contest(
    pair: Pair, adapter: Adapter | None, peer: Peer | None, engine: EngineSettings, k: int | None, probes: list[Prompt]
) -> Contest:
    static, adapted = _drafts(pair, adapter)
    theirs, theirs_adapted = static, adapted
    if peer is not None:
        theirs, theirs_adapted = _drafts(load_pair(pair.target.folder, peer.folder), peer.adapter)
    elif pair.draft is not None and not mlx_lm_runs(pair.draft.folder):
        theirs, theirs_adapted = None, None
    return Contest(pair, static, adapted, theirs, theirs_adapted, engine, k, probes)


def _drafts(pair: Pair, adapter: Adapter | None) -> tuple[Draft | None, Draft | None]:
    """The bare draft and the adapted one, as they serve."""
    static = served(pair.draft) if pair.draft is not None else None
    if adapter is not None and static is None:
        raise BadRequest("an adapter needs the draft it belongs to, and there is none", field="draft")
    return static, load(static.model, adapter.ref, pair.provenance.draft) if static and adapter else None


def _identical(pair: Pair, prompts: Sequence[Prompt], heard: Mapping[str, Sequence[Decoded]]) -> dict[str, bool]:
    said = {name: [one.tokens for one in told] for name, told in heard.items()}
    checked = zip(prompts[:CHECKED], said[PLAIN], strict=False)
    naive = all(
        naive_greedy(pair.target.model, prompt.tokens, prompt.sampling.max_tokens, pair.eos) == tokens
        for prompt, tokens in checked
    )
    return {name: naive if name == PLAIN else tokens == said[PLAIN] for name, tokens in said.items()}


def _ties(
    pair: Pair, prompts: Sequence[Prompt], heard: Mapping[str, Sequence[Decoded]], k: int, on_step: Step
) -> dict[str, TieReport]:
    """Each arm's texts against the target alone."""
    found: dict[str, TieReport] = {}
    for name, decoded in heard.items():
        on_step(f"counting ties of {name}", len(found), len(heard))
        texts = [Text(prompt.tokens, one.tokens, prompt.sampling) for prompt, one in zip(prompts, decoded, strict=True)]
        found[name] = measure_ties(pair.target.model, texts, k=k, vocabulary=pair.vocabulary)
    return found


def _dtype(pair: Pair) -> str:
    """Of the target's arrays, packed integers of quantised layers among them."""
    arrays = cast("list[tuple[str, mx.array]]", tree_flatten(pair.target.model.parameters()))
    return ", ".join(sorted({str(array.dtype).removeprefix("mlx.core.") for _, array in arrays}))


def _figures(told: Sequence[Decoded]) -> dict[str, Any]:
    speed = spread([one.rate for one in told])
    tokens, calls = sum(len(one.tokens) for one in told), sum(one.calls for one in told)
    return {
        "tokens_per_second": speed.median,
        "low": speed.low,
        "high": speed.high,
        "tokens_per_call": tokens / calls,
        "tokens": tokens,
        "calls": calls,
    }


def _report(
    lines: Sequence[PromptLine],
    made: Mapping[str, Arm],
    heard: Mapping[str, Sequence[Decoded]],
    identical: Mapping[str, bool] | None,
    ties: Mapping[str, TieReport],
    title: str,
    command: str,
    settings: dict[str, Any],
) -> Report:
    speeds = {name: [one.rate for one in told] for name, told in heard.items()}
    arms: dict[str, dict[str, Any]] = {
        name: {**_figures(told), "identical": identical[name] if identical else None, **made[name].settings}
        for name, told in heard.items()
    }
    for name, report in ties.items():
        arms[name]["ties"] = report.plain()
    found = ratios(speeds, PAIRS)
    domains: dict[str, dict[str, Any]] = {}
    by_domain: dict[str, dict[str, Spread]] = {}
    for domain in dict.fromkeys(line.domain for line in lines):
        at = [i for i, line in enumerate(lines) if line.domain == domain]
        by_domain[domain] = ratios({name: [values[i] for i in at] for name, values in speeds.items()}, PAIRS)
        domains[domain] = {
            "prompts": len(at),
            "arms": {name: _figures([told[i] for i in at]) for name, told in heard.items()},
            "ratios": {name: asdict(one) for name, one in by_domain[domain].items()},
        }
    ahead = [f"{name}/{PLAIN}" for name in OURS if name in made and name != PLAIN]
    rows = [
        (name, f"{arm['tokens_per_second']:.1f} ({arm['low']:.1f} to {arm['high']:.1f})", *_calls(arm))
        for name, arm in arms.items()
    ]
    rows += [(name, _times(one), "", "") for name, one in found.items()]
    bars = {"tokens/s, one stream": {name: float(arm["tokens_per_second"]) for name, arm in arms.items()}}
    if len(domains) > 1:
        rows += [
            (f"{name}, {domain}", _times(one[name]), "", "") for name in ahead for domain, one in by_domain.items()
        ]
        bars |= {name: {domain: one[name].median for domain, one in by_domain.items()} for name in ahead}
    plain = {
        "arms": arms,
        "ratios": {name: asdict(one) for name, one in found.items()},
        "domains": domains,
        "turns": speeds,
        "settings": settings,
    }
    columns = ("arm or ratio", "tokens/s, median (90 %)", "tokens per call", "identical")
    return Report("decode", title, command, columns, tuple(rows), plain, bars)


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f} x ({ratio.low:.2f} to {ratio.high:.2f})"


def _calls(arm: Mapping[str, Any]) -> tuple[str, str]:
    k = f" (K = {arm['k']})" if "k" in arm and not arm.get("adaptive") else ""
    same = {True: "yes", False: "no", None: ""}[arm["identical"]]
    if ties := arm.get("ties"):
        same = f"{ties['per_1000']:.1f} ties per 1,000 tokens (the target's own: {ties['own_per_1000']:.1f})"
        if ties["differences"]:
            same = f"no: {ties['differences']} tokens that rounding does not explain"
    return f"{arm['tokens_per_call']:.2f}{k}", same
