"""Rounds that are run before the first request, so that none waits for what a device prepares once for each shape."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

from service.core import Prompt, Sampling
from service.engine.replay import FIRST_CALLS
from service.engine.request import Request

if TYPE_CHECKING:
    from service.engine.decoder import Decoder

log = logging.getLogger(__name__)

WIDTHS = (96, 128, 64, 192, 48, 256, 32, 384)
"""Tokens of the prompts, those of most requests first: the first prefill of a width takes several times as long as others."""
BATCHED, MOST_ROWS = (2, 3), 64
"""Draft lengths of which rounds over several rows are run, and rows of the largest batch."""


def warm_up(decoder: Decoder, most: int) -> None:
    """Run rounds of a decoder without rows: of every draft length over one row, and of short ones over every size of batch that
    up to `most` requests run in. On a machine that has not run them before each kernel takes seconds to compile; in a process
    that has not, a shape takes 20 to 80 ms more the first time."""
    started_at = time.perf_counter()
    one, *sizes = sorted({decoder.strategy.batch_size(n) for n in range(1, min(most, MOST_ROWS) + 1)})
    lengths = [0, *decoder.strategy.allowed(decoder.draft_length)]
    catches_up = lengths[len(lengths) // 2]
    greedy, drawn, seeded = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, seed=0)
    rounds = [(one, k, greedy) for k in lengths]
    rounds += [(rows, 0, greedy) for rows in sizes]
    rounds += [
        (rows, k, greedy) for rows in sizes for k in lengths[1:] if k in BATCHED and decoder.strategy.fits(rows, k)
    ]
    rounds += [(one, lengths[-1], drawn), (one, lengths[-1], seeded)]
    with decoder.unplanned():
        for (rows, k, sampling), width in zip(rounds, cycle(WIDTHS), strict=False):
            prompt = Prompt((0,) * (width + 1), replace(sampling, max_tokens=sys.maxsize))
            _admit(decoder, [Request("", prompt, frozenset(), None) for _ in range(rows)])
            # A draft that was parked first reads what it has missed.
            for length in (k, 0, k) if k == catches_up else (k,):
                decoder.draft_length = length
                decoder.leave([])
                for _ in range(FIRST_CALLS):
                    decoder.round()
            decoder.leave(decoder.rows)
    log.info("rounds of %d kinds warmed up in %.1f s", len(rounds), time.perf_counter() - started_at)


def _admit(decoder: Decoder, rows: list[Request]) -> None:
    """Prefill these rows together, as far as one call takes them, and take them into the batch."""
    waiting = [decoder.start_prefill(row) for row in rows]
    while waiting:
        prefill = decoder.batch_prompts(waiting, decoder.prefill_chunk)
        while not decoder.prefill(prefill, len(waiting)):
            pass
        decoder.join([prefill])
        waiting = [each for each in waiting if not any(each.rows[0] is row for row in prefill.rows)]
