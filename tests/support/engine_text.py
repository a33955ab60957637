"""Texts that the engine decodes, for comparison with the target alone."""

from collections.abc import Sequence

import mlx.nn as nn

from service.core import Prompt
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.evaluation.ties import Text


def generate(
    target: nn.Module,
    draft: nn.Module | None,
    prompts: Sequence[Prompt],
    *,
    vocabulary: int,
    k: int,
    rows: int = 1,
    lookup: int = 0,
) -> list[Text]:
    """Decodes the prompts, up to `rows` of them in a batch, with `k` drafted tokens a round."""
    drafting = None if draft is None else bare(draft)
    decoder = Decoder(target, drafting, vocabulary=vocabulary, k=k, adaptive=lookup > 0, lookup=lookup)
    made = [Request(str(i), prompt, frozenset(), None) for i, prompt in enumerate(prompts)]
    waiting = list(made)
    while waiting or decoder.rows:
        while waiting and len(decoder.rows) < rows:
            decoder.admit(waiting.pop(0))
        decoder.round()
    return [Text(row.prompt.tokens, row.output, row.prompt.sampling) for row in made]
