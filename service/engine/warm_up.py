"""Rounds that run before the first request, so that no request waits for work that a device does once per shape."""

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
"""Prompt lengths in tokens, most common first. The first prefill of a width takes several times as long as later ones."""
LONG_WIDTH = 2 * SHARE + 64
"""Tokens of a prompt over which attention splits keys as it does over the longest prompts."""
MASKED_CHUNK = MOST + 1
"""Tokens of a call that `attention` leaves to MLX."""
BATCHED, MOST_ROWS = 3, 64
"""Maximum length of proposals warmed up over several rows, and rows of the largest batch."""


def warm_up(decoder: Decoder, most: int, context: int | None = None) -> None:
    """Run rounds of an empty decoder: every draft length over one row, the usual lengths over every batch size used by up to
    `most` requests, and, if `context` (maximum tokens of a request) allows it, one over a long row and one masked prefill.

    The first time on a machine, each kernel takes seconds to compile. The first time in a process, a shape takes 20 to 80 ms
    more, and cuDNN's first masked call 2 to 3 s.
    """
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
            # A draft that was parked first catches up.
            for length in (k, 0, k) if k == catches_up else (k,):
                decoder.draft_length = length
                # Two rounds, and one launched ahead: the first call of `round` reports the last round of another length.
                decoder.leave([])
                for _ in range(FIRST_CALLS):
                    decoder.round()
            decoder.leave(decoder.rows)
    log.info("warmed up %d kinds of rounds in %.1f s", len(rounds), time.perf_counter() - started_at)


def _prefill_under_a_mask(decoder: Decoder) -> None:
    """Prefill two prompts in chunks, one of which ends with the first chunk."""
    batch = decoder.batch
    cache = batch.target.cache(batch.size(2))
    if cache.states:
        # Models with recurrent layers prefill prompts one by one.
        return
    prompts = [Prompt((0,) * (n + 1), Sampling()) for n in (MASKED_CHUNK // 2, 2 * MASKED_CHUNK)]
    prefill = Prefill([Request("", prompt, frozenset(), None) for prompt in prompts], cache, None, batch.epoch)
    while not decoder.prefill(prefill, chunk=MASKED_CHUNK):
        pass
