"""Tokens per second of one stream, several ways in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

from service.core import Prompt
from service.engine.decoder import Decoder
from service.engine.draft import Draft
from service.engine.row import Row
from service.models.pair import Pair


def one_stream(
    pair: Pair, contenders: Mapping[str, Draft | None], prompts: Sequence[Prompt], k: int
) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
    """Median tokens per second of decoding (prompts read beforehand) per contender, None being the target alone, and the
    outputs. Up to k tokens are drafted, as many as pay. The contenders take turns prompt by prompt, so that a machine that
    slows down slows all of them."""
    decoders = {
        name: Decoder(pair.target.model, draft, vocabulary=pair.vocabulary, k=k if draft else 0, adaptive=True)
        for name, draft in contenders.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    outputs: dict[str, list[list[int]]] = {name: [] for name in contenders}
    for turn, prompt in enumerate(prompts):
        order = list(decoders)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            decoder = decoders[name]
            row = Row(str(turn), prompt, pair.eos, None)
            decoder.admit(row)
            begun = time.perf_counter()
            while row.finish is None:
                decoder.round()
            speeds[name].append(row.emitted / (time.perf_counter() - begun))
            outputs[name].append(row.output)
    return {name: median(values) for name, values in speeds.items()}, outputs
