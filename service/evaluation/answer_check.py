"""Compares served greedy answers with the target decoding alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from service.core import Sampling
from service.evaluation.clients import Answer
from service.evaluation.oracle import forced_mismatches, naive_greedy, naive_greedy_batch
from service.evaluation.progress import OnProgress, silent
from service.evaluation.prompts import encode_prompts
from service.evaluation.ties import Text, exact, measure_ties
from service.models.pair import Pair
from service.settings import EngineSettings

TIE = 1e-3
"""Difference of two log-probabilities below which passes of different shapes may disagree in float32."""
CHECKING = "checking every answer against the target alone"


class CheckedAnswers(NamedTuple):
    """wrong: answers that differ from the target's; where precision leaves ties (see ties.py), incomplete answers and tokens
    that rounding does not explain. near_ties: positions that a pass of another shape cannot decide, or ties."""

    wrong: int
    near_ties: int


def check_answers(
    pair: Pair, answers: Sequence[Answer], *, max_tokens: int, stepwise: int, on_progress: OnProgress = silent
) -> CheckedAnswers:
    """Check every answer that did not fail.

    In float32 on a CPU: all in teacher-forced passes; `stepwise` of them, and each with a near-tie, also token by token. In
    other precisions: up to ties of rounding. max_tokens: the limit that the requests had.
    """
    served = [answer for answer in answers if answer.error is None]
    complete = [answer for answer in served if _complete(answer, pair, max_tokens)]
    incomplete = len(served) - len(complete)
    if not complete:
        return CheckedAnswers(incomplete, 0)
    prompts = encode_prompts(pair, [answer.line for answer in complete])
    outputs = [answer.tokens for answer in complete]
    check = _check_exactly if exact(pair.target.model) else _check_up_to_ties
    wrong, near_ties = check(pair, prompts, outputs, stepwise, on_progress)
    return CheckedAnswers(incomplete + wrong, near_ties)


def _complete(answer: Answer, pair: Pair, max_tokens: int) -> bool:
    """Whether it ends with an end token or at the limit: the beginning of the right text is not enough."""
    return bool(answer.tokens) and (answer.tokens[-1] in pair.eos or len(answer.tokens) == max_tokens)


def _check_up_to_ties(
    pair: Pair, prompts: Sequence[Sequence[int]], outputs: Sequence[list[int]], stepwise: int, on_progress: OnProgress
) -> CheckedAnswers:
    positions = sum(map(len, outputs))
    report = measure_ties(
        pair.target.model,
        [Text(prompt, output, Sampling()) for prompt, output in zip(prompts, outputs, strict=True)],
        k=EngineSettings().num_draft_tokens,
        vocabulary=pair.vocabulary,
        on_step=lambda done: on_progress(CHECKING, done, positions, "tokens"),
    )
    return CheckedAnswers(report.differences, report.ties)


def _check_exactly(
    pair: Pair, prompts: Sequence[Sequence[int]], outputs: Sequence[list[int]], stepwise: int, on_progress: OnProgress
) -> CheckedAnswers:
    positions = sum(map(len, outputs))
    forced = forced_mismatches(
        pair.target.model,
        list(zip(prompts, outputs, strict=True)),
        pair.vocabulary,
        tie=TIE,
        on_step=lambda done: on_progress(CHECKING, done, positions, "tokens"),
    )
    wrong = [found.positions > found.near_ties for found in forced]
    doubtful = {i for i, found in enumerate(forced) if found.near_ties}
    doubtful |= _differ_in_batches(pair, prompts, outputs, stepwise, on_progress)
    for done, i in enumerate(sorted(doubtful)):
        on_progress("decoding the near-ties with the target alone", done, len(doubtful))
        wrong[i] |= naive_greedy(pair.target.model, prompts[i], len(outputs[i]), pair.eos) != outputs[i]
    return CheckedAnswers(sum(wrong), sum(found.near_ties for found in forced))


def _differ_in_batches(
    pair: Pair, prompts: Sequence[Sequence[int]], outputs: Sequence[list[int]], count: int, on_progress: OnProgress
) -> set[int]:
    """Indices of the answers, of `count` decoded token by token, that differ. A batch is a pass of another shape, so they are
    doubtful, not wrong: one row alone decides."""
    batches = equal_length_batches(prompts, count)
    total, found = sum(map(len, batches)), set[int]()
    for done, batch in enumerate(batches):
        on_progress(f"decoding {total} of them with the target alone, token by token", done, len(batches), "groups")
        counts = [len(outputs[i]) for i in batch]
        expected = naive_greedy_batch(pair.target.model, [prompts[i] for i in batch], counts, pair.eos)
        found |= {i for i, alone in zip(batch, expected, strict=True) if outputs[i] != alone}
    return found


def equal_length_batches(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Random batches of prompts of equal length, as indices: `count` prompts in all, fewer where there are fewer."""
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    batches = list(by_length.values())
    random.Random(0).shuffle(batches)
    chosen: list[list[int]] = []
    for batch in batches:
        if (left := count - sum(map(len, chosen))) > 0:
            chosen.append(batch[:left])
    return chosen
