"""`redraft bench decode`: one stream, every arm in turn on every prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from service.core import BadRequest, Prompt, Sampling
from service.engine.adapters import Draft, load, served
from service.evaluation.bench.adapter import BenchAdapter
from service.evaluation.bench.arms import PLAIN, Arm, Decoded, take_turns
from service.evaluation.bench.decode_arms import ARMS, DecodeArms, make_arms
from service.evaluation.bench.report import Report, Spread, ratios, spread
from service.evaluation.oracle import naive_greedy
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import PromptLine, encode_prompts
from service.evaluation.ties import Text, TieReport, exact, measure_ties
from service.models.arrays import named_arrays
from service.models.pair import Pair, load_pair, mlx_lm_runs
from service.settings import EngineSettings

CHECKED = 3
"""Prompts on which the plain arm itself is compared with the target decoded naively."""
PROBES, PROBE_TOKENS = 3, 48
"""Prompts, spread over the file, and tokens of each, on which mlx-lm's best K is found and every arm warms up."""
OURS = [name for name in ARMS if not name.startswith("mlx_lm")]
THEIRS = [name for name in ARMS if name.startswith("mlx_lm")]
PAIRS = [*((name, PLAIN) for name in OURS if name != PLAIN), *product(OURS, THEIRS)]
"""Arms whose ratio is reported: ours to plain, and ours to mlx-lm's."""

Answers = Mapping[str, Sequence[Decoded]]
"""Arm -> its answer to each prompt."""


@dataclass(frozen=True, slots=True)
class Task:
    """What to decode. k: draft length of every arm that drafts; None: what each does best."""

    lines: Sequence[PromptLine]
    max_tokens: int = 128
    temperature: float = 0.0
    k: int | None = None

    def prompts(self, pair: Pair) -> list[Prompt]:
        """Each line encoded as a chat of one user turn, in order, with this task's sampling."""
        # Without a seed: at T > 0 this engine then accepts by rejection sampling, as mlx-lm does.
        sampling = Sampling(max_tokens=self.max_tokens, temperature=self.temperature)
        return [Prompt(tokens, sampling) for tokens in encode_prompts(pair, self.lines)]


@dataclass(frozen=True, slots=True)
class MlxLmDraft:
    """What mlx-lm drafts with, where that is not this engine's draft: the folder of a model, and an adapter of it."""

    folder: Path
    adapter: BenchAdapter | None


def run_decode(
    models: tuple[Path, Path | None],
    engine: EngineSettings,
    task: Task,
    *,
    title: str,
    command: str,
    arms: Sequence[str] | None = None,
    adapter: BenchAdapter | None = None,
    mlx_lm_draft: MlxLmDraft | None = None,
    on_progress: OnProgress = silent,
) -> Report:
    """Decode every prompt with every arm.

    models: folders of target and draft. arms: None for all that draft and adapter allow; the plain one always runs. adapter: of
    the `adapted` arms. mlx_lm_draft: None for the same draft, where mlx-lm runs it.

    JSON: arms{NAME{tokens_per_second, low, high, tokens_per_call, identical, tokens, …}}, ratios{"A/B"{median, low, high}},
    domains{NAME{arms, ratios}}, turns{NAME[tokens per second of each prompt]}, settings. Where precision leaves ties (see
    ties.py), arms have ties{per_1000, own_per_1000, differences, rounding, positions, lossless} too.

    Raises BadRequest for arms that cannot be made, AdapterRefused, ModelError.
    """
    on_progress("loading the pair", 0, 1)
    pair = load_pair(*models)
    prompts = task.prompts(pair)
    brief = replace(prompts[0].sampling, max_tokens=min(task.max_tokens, PROBE_TOKENS))
    probes = [replace(prompt, sampling=brief) for prompt in prompts[:: -(-len(prompts) // PROBES)]]
    on_progress("making the arms, finding mlx-lm's best K", 0, 1)
    made = make_arms(_sources(pair, adapter, mlx_lm_draft, engine, task.k, probes), arms)
    on_progress("warming up", 0, 1)
    take_turns(made, probes[:1])
    answers = take_turns(made, prompts, lambda done, of: on_progress("decoding", done, of))
    on_progress("checking", 0, 1)
    greedy = task.temperature == 0.0
    identical = _identical(pair, prompts, answers) if greedy else None
    ties: dict[str, TieReport] = {}
    if greedy and not exact(pair.target.model):
        ties = _ties(pair, prompts, answers, task.k or engine.num_draft_tokens, on_progress)
    settings = _settings(pair, task, engine, adapter, mlx_lm_draft)
    figures = _arm_figures(made, answers, identical, ties)
    return _report(task.lines, answers, figures, title, command, settings)


def _sources(
    pair: Pair,
    adapter: BenchAdapter | None,
    mlx_lm_draft: MlxLmDraft | None,
    engine: EngineSettings,
    k: int | None,
    probes: list[Prompt],
) -> DecodeArms:
    static, adapted = _drafts(pair, adapter)
    mlx_lm_static, mlx_lm_adapted = static, adapted
    if mlx_lm_draft is not None:
        other = load_pair(pair.target.folder, mlx_lm_draft.folder)
        mlx_lm_static, mlx_lm_adapted = _drafts(other, mlx_lm_draft.adapter)
    elif pair.draft is not None and not mlx_lm_runs(pair.draft.folder):
        mlx_lm_static, mlx_lm_adapted = None, None
    return DecodeArms(pair, static, adapted, mlx_lm_static, mlx_lm_adapted, engine, k, probes)


def _drafts(pair: Pair, adapter: BenchAdapter | None) -> tuple[Draft | None, Draft | None]:
    """The bare draft and the adapted one, as they serve."""
    static = served(pair.draft) if pair.draft is not None else None
    if adapter is not None and static is None:
        raise BadRequest("an adapter needs the draft it belongs to, and there is none", field="draft")
    return static, load(static.model, adapter.ref, pair.provenance.draft) if static and adapter else None


def _settings(
    pair: Pair,
    task: Task,
    engine: EngineSettings,
    adapter: BenchAdapter | None,
    mlx_lm_draft: MlxLmDraft | None,
) -> dict[str, Any]:
    other: dict[str, object] | None = None
    if mlx_lm_draft is not None:
        origin = mlx_lm_draft.adapter.origin if mlx_lm_draft.adapter else None
        other = {"draft": mlx_lm_draft.folder.name, "adapter": origin}
    return {
        "prompts": len(task.lines),
        "max_tokens": task.max_tokens,
        "temperature": task.temperature,
        "k": task.k,
        "engine": engine.model_dump(include={"num_draft_tokens", "num_lookup_tokens", "adaptive", "prefill_chunk"}),
        "dtype": _dtype(pair),
        "adapter": adapter.origin if adapter else None,
        "mlx_lm": other,
    }


def _identical(pair: Pair, prompts: Sequence[Prompt], answers: Answers) -> dict[str, bool]:
    """Whether each arm's outputs are the plain arm's; whether the plain arm's are the naive decoder's, on CHECKED prompts."""
    outputs = {name: [one.tokens for one in decoded] for name, decoded in answers.items()}
    naive = all(
        naive_greedy(pair.target.model, prompt.tokens, prompt.sampling.max_tokens, pair.eos) == tokens
        for prompt, tokens in zip(prompts[:CHECKED], outputs[PLAIN], strict=False)
    )
    return {name: naive if name == PLAIN else tokens == outputs[PLAIN] for name, tokens in outputs.items()}


def _ties(
    pair: Pair, prompts: Sequence[Prompt], answers: Answers, k: int, on_progress: OnProgress
) -> dict[str, TieReport]:
    """Each arm's outputs, compared with the target alone."""
    found: dict[str, TieReport] = {}
    for name, decoded in answers.items():
        on_progress(f"counting ties of {name}", len(found), len(answers))
        texts = [Text(prompt.tokens, one.tokens, prompt.sampling) for prompt, one in zip(prompts, decoded, strict=True)]
        found[name] = measure_ties(pair.target.model, texts, k=k, vocabulary=pair.vocabulary)
    return found


def _dtype(pair: Pair) -> str:
    """Types of the target's arrays, packed integers of quantised layers among them."""
    arrays = named_arrays(pair.target.model.parameters())
    return ", ".join(sorted({str(array.dtype).removeprefix("mlx.core.") for _, array in arrays}))


def _arm_figures(
    made: Mapping[str, Arm], answers: Answers, identical: Mapping[str, bool] | None, ties: Mapping[str, TieReport]
) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {
        name: {**_figures(decoded), "identical": identical[name] if identical else None, **made[name].settings}
        for name, decoded in answers.items()
    }
    for name, report in ties.items():
        figures[name]["ties"] = report.plain()
    return figures


def _figures(answers: Sequence[Decoded]) -> dict[str, Any]:
    speed = spread([one.rate for one in answers])
    tokens, calls = sum(len(one.tokens) for one in answers), sum(one.calls for one in answers)
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
    answers: Answers,
    arms: Mapping[str, Mapping[str, Any]],
    title: str,
    command: str,
    settings: dict[str, Any],
) -> Report:
    speeds = {name: [one.rate for one in decoded] for name, decoded in answers.items()}
    overall = ratios(speeds, PAIRS)
    domains: dict[str, dict[str, Any]] = {}
    by_domain: dict[str, dict[str, Spread]] = {}
    for domain in dict.fromkeys(line.domain for line in lines):
        at = [i for i, line in enumerate(lines) if line.domain == domain]
        by_domain[domain] = ratios({name: [values[i] for i in at] for name, values in speeds.items()}, PAIRS)
        domains[domain] = {
            "prompts": len(at),
            "arms": {name: _figures([decoded[i] for i in at]) for name, decoded in answers.items()},
            "ratios": _plain_ratios(by_domain[domain]),
        }
    rows = [
        (name, f"{arm['tokens_per_second']:.1f} ({arm['low']:.1f} to {arm['high']:.1f})", *_cells(arm))
        for name, arm in arms.items()
    ]
    rows += [(name, _times(one), "", "") for name, one in overall.items()]
    bars = {"tokens/s, one stream": {name: float(arm["tokens_per_second"]) for name, arm in arms.items()}}
    if len(domains) > 1:
        to_plain = [f"{name}/{PLAIN}" for name in OURS if name in arms and name != PLAIN]
        rows += [
            (f"{name}, {domain}", _times(found[name]), "", "")
            for name in to_plain
            for domain, found in by_domain.items()
        ]
        bars |= {name: {domain: found[name].median for domain, found in by_domain.items()} for name in to_plain}
    plain = {
        "arms": dict(arms),
        "ratios": _plain_ratios(overall),
        "domains": domains,
        "turns": speeds,
        "settings": settings,
    }
    columns = ("arm or ratio", "tokens/s, median (90 %)", "tokens per call", "identical")
    return Report("decode", title, command, columns, tuple(rows), plain, bars)


def _plain_ratios(found: Mapping[str, Spread]) -> dict[str, dict[str, float]]:
    return {name: asdict(one) for name, one in found.items()}


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f} x ({ratio.low:.2f} to {ratio.high:.2f})"


def _cells(arm: Mapping[str, Any]) -> tuple[str, str]:
    """Acceptance length, with a fixed draft length, and whether the outputs are the target's."""
    k = f" (K = {arm['k']})" if "k" in arm and not arm.get("adaptive") else ""
    same = {True: "yes", False: "no", None: ""}[arm["identical"]]
    if ties := arm.get("ties"):
        same = f"{ties['per_1000']:.1f} ties per 1,000 tokens (the target's own: {ties['own_per_1000']:.1f})"
        if ties["differences"]:
            same = f"no: {ties['differences']} tokens that rounding does not explain"
    return f"{arm['tokens_per_call']:.2f}{k}", same
