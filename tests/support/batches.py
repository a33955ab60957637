"""Drives a Decoder in tests: rows join at random moments, one or several at a time."""

import random
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from service.core import Prompt
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.kv.prefix import PrefixCache
from service.engine.prefill import Prefill
from service.engine.request import Request


def decode(
    target: nn.Module,
    draft: Draft | nn.Module | None,
    prompts: Sequence[Prompt],
    *,
    k: int,
    vocabulary: int,
    eos: frozenset[int] = frozenset(),
    chunk: int = 16,
    max_rows: int = 8,
    seed: int = 0,
    collect: bool = False,
    adaptive: bool = False,
    lookup: int = 0,
    prefix: PrefixCache | None = None,
    between: Callable[[Decoder], None] = lambda decoder: None,
) -> list[Request]:
    """Every prompt's finished row, in the prompts' order."""
    start = bare(draft) if isinstance(draft, nn.Module) else draft
    decoder = Decoder(
        target,
        start,
        vocabulary=vocabulary,
        k=k,
        prefill_chunk=chunk,
        collect=collect,
        adaptive=adaptive,
        lookup=lookup,
        prefix=prefix,
        key=mx.random.key(seed),
    )
    return serve(decoder, prompts, eos=eos, max_rows=max_rows, seed=seed, between=between)


def admit(decoder: Decoder, rows: Sequence[Request], room: int = 64) -> list[Prefill]:
    """Prefill rows that arrived together, batched as the decoder groups them. Returns the groups."""
    waiting, prefilled = [decoder.start_prefill(row) for row in rows], list[Prefill]()
    while waiting:
        prefilled.append(decoder.batch_prompts(waiting, room))
        while not decoder.prefill(prefilled[-1], len(waiting)):
            pass
        decoder.join([prefilled[-1]])
        waiting = [prefill for prefill in waiting if not any(prefill.rows[0] is row for row in prefilled[-1].rows)]
    return prefilled


def serve(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    eos: frozenset[int] = frozenset(),
    max_rows: int = 8,
    seed: int = 0,
    between: Callable[[Decoder], None] = lambda decoder: None,
) -> list[Request]:
    """`decode` with a given decoder, which may have served before."""
    rng = random.Random(seed)
    rows = [Request(str(i), prompt, eos, None) for i, prompt in enumerate(prompts)]
    waiting = list(rows)
    while waiting or decoder.rows:
        coming: list[Request] = []
        while waiting and (taken := len(decoder.rows) + len(coming)) < max_rows and (not taken or rng.random() < 0.6):
            coming.append(waiting.pop(0))
        admit(decoder, coming)
        between(decoder)
        if decoder.rows:
            decoder.round()
    return rows
