"""`redraft eval score`: what adapters, vocabularies and draft lengths would be worth on the traffic that was logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from service.app import Stores
from service.core import BARE_DRAFT, BadRequest, Generation, RedraftError, Sampling
from service.engine import profile
from service.engine.adapters import load, served
from service.engine.costs import Costs
from service.learning.forecast import Forecast, forecast
from service.learning.offpolicy import acceptance
from service.models import vocabulary
from service.models.heads import cut, shallow_copy, uncut
from service.models.pair import Pair, load_pair

ALL = "all"
_MOST = 16
_TEXTS = 1000
"""Newest logged texts whose tokens are counted."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One adapter on the logged texts of one sampling setting (ALL: of every one)."""

    adapter: int
    sampling: str
    generations: int
    tokens: int
    forecasts: tuple[Forecast, ...]

    def plain(self) -> dict[str, Any]:
        """All fields by name, the forecasts as dictionaries."""
        return asdict(self)


def setting_of(sampling: Sampling) -> str:
    """greedy, seeded or unseeded, and whether filtered."""
    if sampling.greedy:
        return "greedy"
    filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.top_k > 0
    return ("unseeded" if sampling.seed is None else "seeded") + (", filtered" if filtered else "")


def run_score(
    stores: Stores,
    models: tuple[Path, Path],
    adapters: Sequence[int],
    ks: Sequence[int],
    *,
    kept: int | None = None,
    limit: int = 200,
    rows: int | None = 1,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> list[Scored]:
    """By adapter, then by sampling setting. kept: tokens the draft may propose beside a row's own: the first of its ranked
    list, joined behind by what is frequent in the other logged texts; 0: all; None: as it serves. limit: newest generations,
    of those that no run may train on. rows: for the speed, which is measured here first; None: no speed.

    Nothing is written. Raises RedraftError, BadRequest.
    """
    if not ks or min(ks) < 0 or max(ks) > _MOST:
        raise BadRequest(f"draft lengths are 0 to {_MOST}, not {list(ks)}", field="k")
    pair = load_pair(*models)
    told = [g for g in stores.generations.held_out(pair.provenance, limit) if g.output and g.prompt.tokens]
    if not told:
        raise RedraftError("the log holds no held-out generations of this pair: serve some requests first")
    settings = {name: [g for g in told if setting_of(g.prompt.sampling) == name] for name in _settings(told)}
    found: list[Scored] = []
    costs: Costs | None = None
    for done, version in enumerate(adapters):
        on_step(done, len(adapters))
        model = _model(pair, stores, version, kept, told)
        if rows is not None and costs is None:
            costs = profile.measure(pair.target.model, model, rows=[rows], most=max(1, *ks))
        kept_at = acceptance(model, told, vocabulary=pair.vocabulary, k=max(ks))
        rates = dict(zip((g.id for g in told), kept_at, strict=True))
        for name, members in ({ALL: told} | (settings if len(settings) > 1 else {})).items():
            mine = [rates[g.id] for g in members]
            told_of = tuple(forecast(mine, k, costs, rows or 1) for k in ks)
            found.append(Scored(version, name, len(members), sum(len(g.output) for g in members), told_of))
    return found


def _settings(told: Sequence[Generation]) -> list[str]:
    return sorted({setting_of(g.prompt.sampling) for g in told})


def _model(pair: Pair, stores: Stores, version: int, kept: int | None, told: Sequence[Generation]) -> nn.Module:
    assert pair.draft is not None
    model = served(pair.draft).model
    ranked = vocabulary.read(pair.draft.folder)
    if version != BARE_DRAFT:
        ref = stores.adapters.get(version)
        model = load(model, ref, pair.provenance.draft).model
        ranked = vocabulary.read(ref.folder) or ranked
    if kept is None:
        return model
    model = shallow_copy(model)
    if kept == 0:
        uncut(model)
        return model
    measured_on = {g.id for g in told}
    names = stores.generations.names_after(pair.provenance, 0, _TEXTS)
    others = stores.generations.by_ids([name for name in names if name not in measured_on])
    texts = ((*g.prompt.tokens, *g.output) for g in others)
    always = [*sorted(pair.eos), *(ranked or ())]
    cut(model, vocabulary.ranked(texts, always, pair.shared_vocabulary)[:kept])
    return model
