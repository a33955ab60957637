"""Rounds that are run before the first request, so that none waits for kernels to be compiled."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from service.core import Prompt, Sampling
from service.engine.replay import FIRST_CALLS
from service.engine.request import Request

if TYPE_CHECKING:
    from service.engine.decoder import Decoder

log = logging.getLogger(__name__)


def warm_up(decoder: Decoder, sizes: Sequence[int]) -> None:
    """Run rounds of every draft length of this decoder's models, and over each of these numbers of rows. On a machine that has
    not run them before each kernel takes seconds to compile."""
    draft = decoder.batch.drafter.draft if decoder.batch.drafter is not None else None
    lengths = [0, *decoder.strategy.allowed(decoder.draft_length)] if draft is not None else [0]
    middle = lengths[len(lengths) // 2]
    greedy, drawn, seeded = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, seed=0)
    rounds = [(1, k, greedy) for k in lengths]
    rounds += [(rows, k, greedy) for rows in sizes[1:] for k in {0, middle}]
    rounds += [(1, lengths[-1], drawn), (1, lengths[-1], seeded)]
    started_at = time.perf_counter()
    for rows, k, sampling in rounds:
        other = type(decoder)(
            decoder.batch.target.model,
            draft if k else None,
            vocabulary=decoder.runner.vocabulary,
            k=k,
            collect=decoder.collect,
        )
        prompt = Prompt((0, 0), replace(sampling, max_tokens=sys.maxsize))
        for _ in range(rows):
            other.admit(Request("", prompt, frozenset(), None))
        # A draft that was parked first reads what it has missed.
        for length in (k, 0, k) if k == middle else (k,):
            other.draft_length = length
            other.leave([])
            for _ in range(FIRST_CALLS):
                other.round()
        other.leave(other.rows)
    log.info("rounds of %d kinds warmed up in %.1f s", len(rounds), time.perf_counter() - started_at)
