"""What lm-eval has read of a server's answers, against the target alone: one call over each text, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from service.models.pair import load_model
from tests.support.typed import as_float

TOLERANCE = 1e-4


def check(folder: Path) -> None:
    """folder: where the client ran. Raises AssertionError where a log-likelihood, or the accuracy, is not the target's."""
    read = json.loads((folder / "lm_eval.json").read_text(encoding="utf-8"))
    loaded = load_model(folder / "home" / "models" / "smollm2-135m")
    own: dict[str, list[float]] = {}
    for context, continuation, logprob, greedy in read["likelihoods"]:
        # As lm-eval cuts the two: of the whole text, what is behind the context's own tokens.
        begin = len(cast("list[int]", loaded.tokenizer.encode(context, add_special_tokens=False)))
        tokens = cast("list[int]", loaded.tokenizer.encode(context + continuation, add_special_tokens=False))
        logits = cast("mx.array", loaded.model(mx.array([tokens]), cache=make_prompt_cache(loaded.model)))
        logprobs = logits[0, begin - 1 : -1].astype(mx.float32)
        logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        after = mx.array(tokens[begin:])
        expected = as_float(mx.take_along_axis(logprobs, after[:, None], axis=-1).sum())
        assert abs(logprob - expected) < TOLERANCE * max(len(tokens) - begin, 1), (
            context,
            continuation,
            logprob,
            expected,
        )
        assert greedy == bool(mx.array_equal(logprobs.argmax(axis=-1), after).item())
        own.setdefault(context, []).append(expected)
    tasks = [json.loads(line) for line in (Path(__file__).parent / "lm_eval_tasks" / "capitals.jsonl").open()]
    right = [max(range(len(each)), key=each.__getitem__) for each in own.values()]
    accuracy = sum(one == task["answer"] for one, task in zip(right, tasks, strict=True)) / len(tasks)
    assert abs(accuracy - read["accuracy"]) < 1e-9, (accuracy, read["accuracy"])
