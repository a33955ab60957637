"""`redraft eval score`: what adapters, vocabularies and draft lengths would be worth on the recorded traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from service.core import BARE_DRAFT, BadRequest, Generation, RedraftError, Sampling
from service.engine import profile
from service.engine.adapters import load, served
from service.engine.costs import Costs
from service.learning.scoring.acceptance import acceptance
from service.learning.scoring.expected import Forecast, forecast
from service.models import vocabulary
from service.models.heads import cut, shallow_copy, uncut
from service.models.pair import Pair, load_pair
from service.store.stores import Stores

ALL = "all"
"""In place of a sampling setting: generations of every setting."""
_MAX_LENGTH = 16
_COUNTED_TEXTS = 1000
"""Newest recorded texts whose tokens are counted for a reduced vocabulary."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One adapter on the recorded generations of one sampling setting. forecasts: by draft length."""

    adapter: int
    sampling: str
    generations: int
    tokens: int
    forecasts: tuple[Forecast, ...]

    def plain(self) -> dict[str, Any]:
        """All fields by name, the forecasts as dictionaries."""
        return asdict(self)


def setting_of(sampling: Sampling) -> str:
    """`greedy`, `seeded` or `unseeded`, the last two with `, filtered` where top-p, min-p or top-k filter."""
    if sampling.greedy:
        return "greedy"
    return ("unseeded" if sampling.seed is None else "seeded") + (", filtered" if sampling.filtered else "")


def run_score(
    stores: Stores,
    models: tuple[Path, Path],
    adapters: Sequence[int],
    ks: Sequence[int],
    *,
    proposable: int | None = None,
    limit: int = 200,
    rows: int | None = 1,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> list[Scored]:
    """Scores by adapter, then by sampling setting. Writes nothing.

    models: target and draft folders. adapters: versions, BARE_DRAFT for none. ks: draft lengths. proposable: size of the
    draft's reduced vocabulary, beside a row's own tokens: the first tokens of its own list, then those that are frequent in
    other recorded texts; 0: every token; None: as it serves. limit: newest held-out generations. rows: batch size for which
    the speed is predicted, from costs measured here; None: no speed. on_step: (adapters scored, of all).

    Raises BadRequest for other draft lengths than 0 to 16, RedraftError when nothing is recorded, NotFound for an unknown
    adapter.
    """
    if not ks or min(ks) < 0 or max(ks) > _MAX_LENGTH:
        raise BadRequest(f"draft lengths are 0 to {_MAX_LENGTH}, not {list(ks)}", field="k")
    pair = load_pair(*models)
    recorded = [g for g in stores.generations.held_out(pair.provenance, limit) if g.output and g.prompt.tokens]
    if not recorded:
        raise RedraftError("the log holds no held-out generations of this pair: serve some requests first")
    by_setting = _by_setting(recorded)
    found: list[Scored] = []
    costs: Costs | None = None
    for done, version in enumerate(adapters):
        on_step(done, len(adapters))
        model = _draft(pair, stores, version, proposable, recorded)
        if rows is not None and costs is None:
            costs = profile.measure(pair.target.model, model, rows=[rows], most=max(1, *ks))
        accepted = acceptance(model, recorded, vocabulary=pair.vocabulary, k=max(ks))
        rates = dict(zip((g.id for g in recorded), accepted, strict=True))
        for name, members in by_setting.items():
            forecasts = tuple(forecast([rates[g.id] for g in members], k, costs, rows or 1) for k in ks)
            found.append(Scored(version, name, len(members), sum(len(g.output) for g in members), forecasts))
    return found


def _by_setting(recorded: Sequence[Generation]) -> dict[str, list[Generation]]:
    """All generations under ALL and, where there are several sampling settings, those of each."""
    names = sorted({setting_of(g.prompt.sampling) for g in recorded})
    found = {ALL: list(recorded)}
    if len(names) > 1:
        found |= {name: [g for g in recorded if setting_of(g.prompt.sampling) == name] for name in names}
    return found


def _draft(
    pair: Pair, stores: Stores, version: int, proposable: int | None, recorded: Sequence[Generation]
) -> nn.Module:
    """The draft with an adapter and the vocabulary that it may propose."""
    assert pair.draft is not None
    model = served(pair.draft).model
    ranked = vocabulary.read(pair.draft.folder)
    if version != BARE_DRAFT:
        ref = stores.adapters.get(version)
        model = load(model, ref, pair.provenance.draft).model
        ranked = vocabulary.read(ref.folder) or ranked
    if proposable is None:
        return model
    model = shallow_copy(model)
    if proposable == 0:
        uncut(model)
    else:
        cut(model, _frequent(pair, stores, ranked or (), recorded)[:proposable])
    return model


def _frequent(pair: Pair, stores: Stores, first: Sequence[int], recorded: Sequence[Generation]) -> list[int]:
    """End tokens and `first`, then the tokens of recorded texts that are not scored, most frequent first."""
    scored = {g.id for g in recorded}
    names = stores.generations.names_after(pair.provenance, 0, _COUNTED_TEXTS)
    others = stores.generations.by_ids([name for name in names if name not in scored])
    texts = ((*g.prompt.tokens, *g.output) for g in others)
    return vocabulary.ranked(texts, [*sorted(pair.eos), *first], pair.shared_vocabulary)
