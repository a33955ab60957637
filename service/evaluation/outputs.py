"""What the target says greedily to a prompt, and its distribution at every position: made once, kept by model and prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from service.core import FinishReason, Generation, Prompt, Provenance, Sampling
from service.engine.decoder import Decoder
from service.engine.row import Row
from service.evaluation.prompts import PromptLine
from service.learning.rescore import TargetCache
from service.models.pair import Pair
from service.models.text import TextEncoder

ROWS = 16


class GreedyOutputs:
    """The cache: one JSON-lines file of outputs per target and length, and the targets' files beside it."""

    def __init__(self, home: Path, who: Provenance, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.targets = TargetCache(home / "targets", who.target)
        self.path = home / "outputs" / f"{who.target[:16]}-{who.tokenizer[:16]}-{max_tokens}.jsonl"
        self.held: dict[str, list[int]] = {}
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    item = json.loads(line)
                    self.held[item["prompt"]] = item["output"]
                except (ValueError, KeyError):
                    # The last line of a process that was killed while it wrote.
                    continue

    def get(self, prompt: Prompt) -> tuple[int, ...] | None:
        output = self.held.get(_key(prompt))
        return None if output is None else tuple(output)

    def add(self, generation: Generation) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if generation.targets is not None:
            self.targets.store(generation, generation.targets)
        key = _key(generation.prompt)
        self.held[key] = list(generation.output)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"prompt": key, "output": generation.output}) + "\n")


def _key(prompt: Prompt) -> str:
    return hashlib.sha256(np.array(prompt.tokens, dtype="<u4").tobytes()).hexdigest()


def greedy_generations(
    pair: Pair,
    lines: Sequence[PromptLine],
    home: Path,
    *,
    max_tokens: int = 128,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> list[Generation]:
    """The target's greedy answer to each prompt as one user turn, with targets. on_step: (answers at hand, of all)."""
    encoder = TextEncoder(pair.target.tokenizer)
    sampling = Sampling(max_tokens=max_tokens)
    prompts = [
        Prompt(
            encoder.encode_chat([{"role": "user", "content": line.prompt}]),
            sampling,
            line.domain,
            first_user=line.prompt,
        )
        for line in lines
    ]
    cache = GreedyOutputs(home, pair.provenance, max_tokens)
    _fill(pair, [p for p in prompts if _unknown(cache, p, pair)], cache, lambda done: on_step(done, len(prompts)))
    return [_generation(str(i), prompt, cache, pair) for i, prompt in enumerate(prompts)]


def _generation(name: str, prompt: Prompt, cache: GreedyOutputs, pair: Pair) -> Generation:
    output = cache.get(prompt) or ()
    finish = FinishReason.STOP if output and output[-1] in pair.eos else FinishReason.LENGTH
    bare = Generation(
        id=name,
        prompt=prompt,
        output=output,
        finish=finish,
        rounds=(),
        cases=(),
        logprobs=(),
        sampled_logprobs=(),
        targets=None,
        provenance=pair.provenance,
        created_at=datetime.now(UTC),
    )
    return replace(bare, targets=cache.targets.load(bare))


def _unknown(cache: GreedyOutputs, prompt: Prompt, pair: Pair) -> bool:
    return cache.get(prompt) is None or _generation("", prompt, cache, pair).targets is None


def _fill(pair: Pair, prompts: list[Prompt], cache: GreedyOutputs, on_step: Callable[[int], None]) -> None:
    """Decode what is missing, the target alone, many rows together."""
    decoder = Decoder(pair.target.model, None, vocabulary=pair.vocabulary, k=0, collect=True)
    known = len(cache.held)
    waiting = [Row(str(i), prompt, pair.eos, None) for i, prompt in enumerate(dict.fromkeys(prompts))]
    waiting.sort(key=lambda row: len(row.tokens))
    while waiting or decoder.rows:
        while waiting and len(decoder.rows) < ROWS:
            decoder.admit(waiting.pop(0))
        for row in decoder.round().rows:
            if row.finish is not None and (generation := row.generation(pair.provenance)) is not None:
                cache.add(generation)
                on_step(len(cache.held) - known)
