"""Rounds that are run before the first request, so that none waits for what a device prepares once for each shape."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING

from service.core import Prompt, Sampling
from service.engine.attention import MOST, SHARE
from service.engine.prefill import Prefill
from service.engine.replay import FIRST_CALLS
from service.engine.request import Request

if TYPE_CHECKING:
    from service.engine.decoder import Decoder

log = logging.getLogger(__name__)

WIDTHS = (96, 128, 64, 192, 48, 256, 32, 384)
"""Tokens of the prompts, those of most requests first: the first prefill of a width takes several times as long as others."""
LONG_WIDTH = 2 * SHARE + 64
"""Tokens of a prompt over which attention runs as over the longest."""
MASKED_CHUNK = MOST + 1
"""Tokens of a call that `attention` leaves to MLX."""
BATCHED, MOST_ROWS = 3, 64
"""The longest proposals of rounds over several rows that are run, and rows of the largest batch."""


def warm_up(decoder: Decoder, most: int, context: int | None = None) -> None:
    """Run rounds of a decoder without rows: of every draft length over one row, of the usual ones over every size of batch
    that up to `most` requests run in, and where `context`, tokens of a request, allows it, of one over a long row and a prefill
    under a mask. On a machine that has not run them before each kernel takes seconds to compile; in a process that has not, a
    shape takes 20 to 80 ms more the first time, and the first call of cuDNN under a mask 2 to 3 s."""
    started_at, strategy = time.perf_counter(), decoder.strategy
    one, *sizes = sorted({strategy.batch_size(n) for n in range(1, min(most, MOST_ROWS) + 1)})
    if decoder.adaptive:
        lengths = strategy.allowed(decoder.draft_length)
        batched = {n: [k for k in lengths if k <= BATCHED and strategy.fits(n, k)][-2:] for n in sizes}
    else:
        lengths = [decoder.draft_length] if decoder.draft_length else []
        batched = dict.fromkeys(sizes, lengths)
    catches_up = lengths[(len(lengths) - 1) // 2] if lengths else None
    greedy, drawn, seeded = Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, seed=0)
    rounds = [(one, k, greedy) for k in (0, *lengths)]
    rounds += [(rows, k, greedy) for rows in sizes for k in (0, *batched[rows])]
    rounds += [(one, max(lengths, default=0), sampling) for sampling in (drawn, seeded)]
    widths = [width for width, _ in zip(cycle(WIDTHS), rounds, strict=False)]
    long_rows = strategy.paged and (context or 0) > 2 * LONG_WIDTH
    if long_rows:
        rounds.append((one, min(lengths, default=0), greedy))
        widths.append(LONG_WIDTH)
    with decoder.unplanned():
        if long_rows:
            _prefill_under_a_mask(decoder)
        for (rows, k, sampling), width in zip(rounds, widths, strict=True):
            prompt = Prompt((0,) * (width + 1), replace(sampling, max_tokens=sys.maxsize))
            decoder.admit(*(Request("", prompt, frozenset(), None) for _ in range(rows)))
            # A draft that was parked first reads what it has missed.
            for length in (k, 0, k) if k == catches_up else (k,):
                decoder.draft_length = length
                # Two rounds, and one launched behind them: the first call of `round` reports the last one of another length.
                decoder.leave([])
                for _ in range(FIRST_CALLS):
                    decoder.round()
            decoder.leave(decoder.rows)
    log.info("rounds of %d kinds warmed up in %.1f s", len(rounds), time.perf_counter() - started_at)


def _prefill_under_a_mask(decoder: Decoder) -> None:
    """Prefill two prompts in chunks, of which one is at its end after the first chunk."""
    batch = decoder.batch
    cache = batch.target.cache(batch.size(2))
    if cache.states:
        # Models with recurrent layers prefill prompts one by one.
        return
    prompts = [Prompt((0,) * (n + 1), Sampling()) for n in (MASKED_CHUNK // 2, 2 * MASKED_CHUNK)]
    prefill = Prefill([Request("", prompt, frozenset(), None) for prompt in prompts], cache, None, batch.epoch)
    while not decoder.prefill(prefill, chunk=MASKED_CHUNK):
        pass
