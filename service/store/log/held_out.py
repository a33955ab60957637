"""Selects the logged texts a gate measures on, and counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import Provenance
from service.store.log.generations import Generations
from service.store.log.likeness import is_client
from service.store.log.sampler import Text, sample

POOL = 2
"""Conversations drawn from per text of a gate, so that successive gates share about half of their texts."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a gate could measure on now: numbers of prompts, conversations and output tokens."""

    prompts: int = 0
    conversations: int = 0
    tokens: int = 0


def draw(stored: Generations, who: Provenance, *, limit: int, run: int, seeds: Sequence[Text] = ()) -> list[Text]:
    """At most `limit` texts to judge the candidate of `run` on: none was trained on, equal texts count once, and no client and
    no template has more than its share (store.log.sampler). seeds: texts that practice began like; texts that share their
    conversation or template are left out."""
    conversations = {one.conversation for one in seeds}
    templates = {group for one in seeds for group in one.groups if not is_client(group)}
    found = stored.held_out_texts(who, POOL * limit)
    apart = [one for one in found if one.conversation not in conversations and not one.groups & templates]
    return sample(apart, limit, run)


def held_out_counts(stored: Generations, who: Provenance, limit: int) -> HeldOut:
    """How much the next gate could measure on if it scored at most `limit` texts."""
    texts = draw(stored, who, limit=limit, run=0)
    tokens = stored.output_tokens([one.id for one in texts])
    return HeldOut(len(texts), len({one.conversation for one in texts}), tokens)
