"""Which texts a run learns from: new ones, and older ones that are replayed so that it does not forget (docs/learning.md, "What
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
"""Share of the new texts from which on a domain needs no replay."""


def training_texts(
    new: Sequence[Generation],
    *,
    share: float,
    general: Sequence[Generation],
    reservoir: Callable[[int], Sequence[Generation]],
    seed: int,
) -> list[Generation]:
    """The texts of a run: the new ones in the order given, then the replayed ones, each part bounded by `cap_shares`.

    share: replayed texts as a share of all; 1: nothing but replayed ones. general, reservoir, seed: see `replay`.
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
    """Which texts to replay with `new`, none of them new.

    Domains that make less than COVERED of the new texts get equal parts, and so does the general set; where one has too few
    texts the others give more. reservoir(n): n stored generations in any order, drawn uniformly over domains. seed: of the
    order in which a domain's texts are taken.
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
    """How many texts to replay with `new` new ones, so that they are `share` of all. With a share of 1 no new text is used:
    as many replayed ones take their place."""
    return new if share >= 1.0 else round(new * share / (1.0 - share))


def cap_shares(generations: Sequence[Generation]) -> list[Generation]:
    """Each text once, and of every client and template no more than its share (`sampler.capped`), in the order given."""
    selected = {one.id for one in capped([as_text(g, str(i)) for i, g in enumerate(generations)])}
    return [g for i, g in enumerate(generations) if str(i) in selected]


Domain = tuple[str | None, str | None]
"""A client's tag, and the kind of a prompt that came without: together they name a reservoir."""


def _uncovered(
    stored: Sequence[Generation], new: Sequence[Generation], *, has_general: bool
) -> dict[Domain, list[Generation]]:
    """Stored texts that are not new, by domain. Where a general set can take their place, without the domains that the new
    texts cover."""
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
    """What the sampler needs to know of a generation. name: another than its id."""
    prompt = generation.prompt
    return text(
        name or generation.id,
        prompt=id_bytes(prompt.tokens),
        output=id_bytes(generation.output),
        client=prompt.api_key or prompt.client,
        first_user=prompt.first_user,
    )
