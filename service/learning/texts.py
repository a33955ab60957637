"""Selects the texts of a run: new ones, and older ones that are replayed to prevent forgetting (docs/learning.md, "What
a run learns from")."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest

from service.core import Generation
from service.store.log.rows import id_bytes
from service.store.log.sampler import Text, capped, text

COVERED = 0.1
"""Fraction of the new texts above which a domain needs no replay."""


def training_texts(
    new: Sequence[Generation],
    *,
    share: float,
    general: Sequence[Generation],
    reservoir: Callable[[int], Sequence[Generation]],
    seed: int,
) -> list[Generation]:
    """The texts of a run: the new ones in the given order, then the replayed ones, each part limited by `cap_shares`.

    share: replayed texts as a fraction of all; 1: only replayed texts. general, reservoir, seed: see `replay`.
    """
    new = cap_shares(new)

    def bounded(count: int) -> list[Generation]:
        return cap_shares(reservoir(count))

    replayed = replay(new, share=share, general=general, reservoir=bounded, seed=seed)
    return [*(new if share < 1.0 else []), *replayed]


def replay(
    new: Sequence[Generation],
    *,
    share: float,
    general: Sequence[Generation],
    reservoir: Callable[[int], Sequence[Generation]],
    seed: int,
) -> list[Generation]:
    """The texts to replay with `new`; none of them is new.

    Domains that make up less than COVERED of the new texts get equal parts, and so does the general set; if one has too
    few texts, the others contribute more. reservoir(n): n stored generations in any order, drawn uniformly over
    domains. seed: of the order in which a domain's texts are taken.
    """
    count = replay_count(len(new), share)
    if count == 0:
        return []
    domains = _uncovered(reservoir(2 * count), new, has_general=bool(general))
    rng = random.Random(seed)
    for texts in domains.values():
        rng.shuffle(texts)
    in_turn = [one for each in zip_longest(*domains.values()) for one in each if one is not None]
    parts = len(domains) + (1 if general else 0)
    stored = in_turn[: max(count * len(domains) // parts, count - len(general))] if parts else []
    return [*stored, *general[: count - len(stored)]]


def replay_count(new: int, share: float) -> int:
    """Number of texts to replay with `new` new ones so that they are `share` of all. With a share of 1 no new text is
    used and the same number of replayed ones takes their place."""
    return new if share >= 1.0 else round(new * share / (1.0 - share))


def cap_shares(generations: Sequence[Generation]) -> list[Generation]:
    """Each text once, and of every client and template at most its share (`sampler.capped`), in the given order."""
    selected = {one.id for one in capped([as_text(g, str(i)) for i, g in enumerate(generations)])}
    return [g for i, g in enumerate(generations) if str(i) in selected]


Domain = tuple[str | None, str | None]
"""A client's tag, or the kind of an untagged prompt: together they identify a reservoir."""


def _uncovered(
    stored: Sequence[Generation], new: Sequence[Generation], *, has_general: bool
) -> dict[Domain, list[Generation]]:
    """Stored texts that are not new, by domain. If a general set can replace them, the domains that the new texts cover
    are left out."""
    known = {generation.id for generation in new}
    counts = Counter(_domain(generation) for generation in new)
    covered = {domain for domain, n in counts.items() if has_general and n >= COVERED * len(new)}
    domains: dict[Domain, list[Generation]] = {}
    for generation in stored:
        if generation.id not in known and _domain(generation) not in covered:
            domains.setdefault(_domain(generation), []).append(generation)
    return domains


def _domain(generation: Generation) -> Domain:
    return generation.prompt.domain, generation.prompt.kind


def as_text(generation: Generation, name: str | None = None) -> Text:
    """What the sampler needs to know about a generation. name: replaces its id."""
    prompt = generation.prompt
    return text(
        name or generation.id,
        prompt=id_bytes(prompt.tokens),
        output=id_bytes(generation.output),
        client=prompt.api_key or prompt.client,
        first_user=prompt.first_user,
    )
