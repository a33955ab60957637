"""The target's outputs to prompts and its distribution at every position: decoded once, then read from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from service.core import FinishReason, Generation, ModelError, Prompt, Provenance, Sampling
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.evaluation.progress import OnProgress
from service.evaluation.prompts import PromptLine, encode_prompts
from service.learning.targets import TargetCache
from service.models.pair import Pair

ROWS = 16
"""Prompts decoded together; an accelerator is full only with many more."""


class OutputCache:
    """Outputs of one target, tokenizer, length and temperature: a JSON-lines file in home/outputs, and the target's
    distributions in home/targets."""

    def __init__(self, home: Path, who: Provenance, max_tokens: int, temperature: float) -> None:
        self.targets = TargetCache(home / "targets", who.target)
        suffix = f"-t{temperature:g}" if temperature else ""
        self.path = home / "outputs" / f"{who.target[:16]}-{who.tokenizer[:16]}-{max_tokens}{suffix}.jsonl"
        self._by_prompt: dict[str, tuple[list[int], list[float]]] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    item = json.loads(line)
                    self._by_prompt[item["prompt"]] = item["output"], item.get("sampled", [])
                except (ValueError, KeyError):
                    # The last line of a process that was killed while it wrote.
                    continue

    def get(self, prompt: Prompt) -> tuple[list[int], list[float]] | None:
        """Output tokens, and the log-probability of each in the distribution it was sampled from (empty when greedy); None for
        a prompt that is not in the cache."""
        return self._by_prompt.get(_digest(prompt).hex())

    def add(self, generation: Generation) -> None:
        """Append the output to the cache file, with its log-probabilities where sampled, and store its targets, if any."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if generation.targets is not None:
            self.targets.store(generation, generation.targets)
        key = _digest(generation.prompt).hex()
        item: dict[str, object] = {"prompt": key, "output": generation.output}
        if not generation.prompt.sampling.greedy:
            item["sampled"] = generation.sampled_logprobs
        self._by_prompt[key] = list(generation.output), list(generation.sampled_logprobs)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(item) + "\n")


def _digest(prompt: Prompt) -> bytes:
    return hashlib.sha256(np.array(prompt.tokens, dtype="<u4").tobytes()).digest()


def greedy_generations(
    pair: Pair,
    lines: Sequence[PromptLine],
    home: Path,
    *,
    max_tokens: int = 128,
    rows: int = ROWS,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> list[Generation]:
    """The target's greedy answer to each prompt as one user turn, with targets, in order.

    rows: prompts decoded together. on_step: (answers at hand, of all).
    """
    return target_generations(pair, lines, home, temperature=0.0, max_tokens=max_tokens, rows=rows, on_step=on_step)


def greedy_answers(
    pair: Pair,
    lines: Sequence[PromptLine],
    home: Path,
    stage: str,
    *,
    max_tokens: int,
    rows: int,
    on_progress: OnProgress,
) -> list[Generation]:
    """greedy_generations without empty answers. stage: for `on_progress`."""
    found = greedy_generations(
        pair, lines, home, max_tokens=max_tokens, rows=rows, on_step=lambda done, of: on_progress(stage, done, of)
    )
    return [generation for generation in found if generation.output]


def target_generations(
    pair: Pair,
    lines: Sequence[PromptLine],
    home: Path,
    *,
    temperature: float,
    max_tokens: int = 128,
    rows: int = ROWS,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> list[Generation]:
    """The target's answer to each prompt at any temperature, without filters; see greedy_generations.

    Above T = 0 the seed comes from the prompt, so that outputs are the same wherever they are made. They come back as unseeded
    samples, for which drafts are accepted by rejection sampling.
    """
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    prompts = [
        Prompt(tokens, sampling, line.domain, first_user=line.prompt)
        for tokens, line in zip(encode_prompts(pair, lines), lines, strict=True)
    ]
    cache = OutputCache(home, pair.provenance, max_tokens, temperature)
    missing = [prompt for prompt in dict.fromkeys(prompts) if _missing(cache, prompt, pair)]
    _decode(pair, missing, cache, rows, lambda done: on_step(len(prompts) - len(missing) + done, len(prompts)))
    return [_generation(str(i), prompt, cache, pair) for i, prompt in enumerate(prompts)]


def _generation(name: str, prompt: Prompt, cache: OutputCache, pair: Pair) -> Generation:
    output, sampled = cache.get(prompt) or ([], [])
    finish = FinishReason.STOP if output and output[-1] in pair.eos else FinishReason.LENGTH
    bare = Generation(
        id=name,
        prompt=prompt,
        output=tuple(output),
        finish=finish,
        rounds=(),
        cases=(),
        logprobs=(),
        sampled_logprobs=tuple(sampled),
        targets=None,
        provenance=pair.provenance,
        created_at=datetime.now(UTC),
    )
    return replace(bare, targets=cache.targets.load(bare))


def _missing(cache: OutputCache, prompt: Prompt, pair: Pair) -> bool:
    return cache.get(prompt) is None or _generation("", prompt, cache, pair).targets is None


def _decode(
    pair: Pair, prompts: Sequence[Prompt], cache: OutputCache, rows: int, on_step: Callable[[int], None]
) -> None:
    """Decode prompts with the target alone, `rows` together, and add them to the cache."""
    decoder = Decoder(pair.target.model, None, vocabulary=pair.vocabulary, k=0, collect=True)
    waiting = [Request(str(i), _seeded(prompt), pair.eos, None) for i, prompt in enumerate(prompts)]
    waiting.sort(key=lambda row: len(row.tokens))
    done = 0
    while waiting or decoder.rows:
        while waiting and len(decoder.rows) < rows:
            decoder.admit(waiting.pop(0))
        report = decoder.round()
        for row in report.failed:
            raise ModelError(f"the target cannot answer a prompt: {row.error}")
        for row in report.rows:
            if row.finish is not None and (generation := row.generation(pair.provenance)) is not None:
                cache.add(generation)
                done += 1
                on_step(done)


def _seeded(prompt: Prompt) -> Prompt:
    if prompt.sampling.greedy:
        return prompt
    return replace(prompt, sampling=replace(prompt.sampling, seed=int.from_bytes(_digest(prompt)[:7])))
