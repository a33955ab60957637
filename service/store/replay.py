"""The replay reservoirs' rows: one for every tag that clients gave, and for every kind of prompt that came without one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, update

from service.core import Generation, Provenance
from service.store.database import Database
from service.store.generations import TRAIN, Generations
from service.store.likeness import kind, template, text_key
from service.store.reservoir import Item, Reservoir, groups_of
from service.store.tables import failure_cases, generations, replay_buffer, replay_domains

_TEXT = (
    generations.c.id,
    generations.c.seq,
    generations.c.prompt,
    generations.c.output,
    generations.c.client,
    generations.c.domain,
    generations.c.first_user,
)


class Replay:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._generations = Generations(database)

    def offer(self, domain: str | None, generation_ids: Sequence[str], capacity: int, seed: int) -> None:
        """Offer texts to the reservoir of a domain, or (None) each to its own: its tag's, or its kind's. A slot that a deletion
        has emptied is filled first. Held-out generations, unknown ids and texts held already are passed over."""

        def work(connection: Connection) -> None:
            rows: dict[str, Any] = {}
            for start in range(0, len(generation_ids), 500):
                some = list(generation_ids[start : start + 500])
                query = select(*_TEXT).where(generations.c.id.in_(some), generations.c.split == TRAIN)
                rows |= {row.id: row for row in connection.execute(query)}
            _offer(connection, domain, [rows[name] for name in generation_ids if name in rows], capacity, seed)

        self._db.write(work, urgent=False).result()

    def remember(self, run_id: int, capacity: int, seed: int) -> None:
        """Offer what a run has learnt from, each text to its own reservoir, and with it what was logged since the run before
        and left no case: what a draft does well is as much of the past as what it fails at."""

        def work(connection: Connection) -> None:
            mine = or_(failure_cases.c.claimed_run == run_id, failure_cases.c.trained_run == run_id)
            claimed = select(failure_cases.c.seq).where(mine).distinct()
            newest = connection.execute(select(func.max(failure_cases.c.seq)).where(mine)).scalar()
            if newest is None:
                return
            last = connection.execute(
                select(func.max(failure_cases.c.seq)).where(failure_cases.c.trained_run < run_id)
            ).scalar()
            own = connection.execute(
                select(generations.c.target, generations.c.tokenizer).where(generations.c.seq == newest)
            ).one()
            cases = select(failure_cases.c.id).where(failure_cases.c.seq == generations.c.seq)
            well = and_(
                generations.c.seq > (last or 0),
                generations.c.seq <= newest,
                generations.c.split == TRAIN,
                generations.c.target == own.target,
                generations.c.tokenizer == own.tokenizer,
                ~cases.exists(),
            )
            query = select(*_TEXT).where(or_(generations.c.seq.in_(claimed), well)).order_by(generations.c.seq)
            _offer(connection, None, connection.execute(query).all(), capacity, seed)

        self._db.write(work, urgent=False).result()

    def labelled(self, found: Sequence[Generation]) -> list[Generation]:
        """With the reservoir's name as the domain of those that have no tag: what is like what is held."""
        known = list(self.sizes())
        return [
            g if g.prompt.domain else replace(g, prompt=replace(g.prompt, domain=kind(g.prompt.tokens, known)))
            for g in found
        ]

    def sample(self, who: Provenance, count: int, seed: int) -> list[Generation]:
        """Up to `count` held generations of this target and tokenizer, uniform over reservoirs, then within each; their domain
        is the reservoir's name."""
        query = (
            select(replay_buffer.c.domain, generations.c.id)
            .join_from(replay_buffer, generations, generations.c.seq == replay_buffer.c.seq)
            .where(generations.c.target == who.target, generations.c.tokenizer == who.tokenizer)
            .order_by(replay_buffer.c.domain, replay_buffer.c.slot)
        )
        held: dict[str, list[str]] = {}
        with self._db.read() as connection:
            for domain, name in connection.execute(query):
                held.setdefault(domain, []).append(name)
        rng = random.Random(seed)
        for names in held.values():
            rng.shuffle(names)
        place: dict[str, str] = {}
        while len(place) < count and any(held.values()):
            for domain, names in held.items():
                if names and len(place) < count:
                    place.setdefault(names.pop(), domain)
        found = {g.id: g for g in self._generations.by_ids(list(place))}
        return [replace(g, prompt=replace(g.prompt, domain=place[name])) for name, g in found.items()]

    def sizes(self) -> dict[str, int]:
        query = select(replay_buffer.c.domain, func.count()).group_by(replay_buffer.c.domain)
        with self._db.read() as connection:
            return dict(connection.execute(query).all())


def _offer(connection: Connection, domain: str | None, rows: Sequence[Any], capacity: int, seed: int) -> None:
    known = list(connection.execute(select(replay_domains.c.domain)).scalars())
    offered: dict[str, list[Item]] = {}
    for row in rows:
        name = domain or row.domain or kind(_ids(row.prompt), known)
        if name not in known:
            known.append(name)
        offered.setdefault(name, []).append(_item(row))
    for name, items in offered.items():
        _fill(connection, name, items, capacity, seed)


def _fill(connection: Connection, domain: str, items: Sequence[Item], capacity: int, seed: int) -> None:
    here = replay_buffer.c.domain == domain
    query = select(replay_buffer.c.slot, *_TEXT).join_from(replay_buffer, generations, _same).where(here)
    held = {row.slot: _item(row) for row in connection.execute(query)}
    seen = connection.execute(select(replay_domains.c.seen).where(replay_domains.c.domain == domain)).scalar()
    if seen is None:
        connection.execute(insert(replay_domains).values(domain=domain, seen=0))
    reservoir = Reservoir(capacity, held, seen or 0, random.Random(f"{seed} {domain} {seen or 0}"))
    taken = {slot for item in items if (slot := reservoir.offer(item)) is not None}
    for slot in sorted(taken):
        connection.execute(delete(replay_buffer).where(here, replay_buffer.c.slot == slot))
        connection.execute(insert(replay_buffer).values(domain=domain, slot=slot, seq=reservoir.held[slot].seq))
    connection.execute(update(replay_domains).where(replay_domains.c.domain == domain).values(seen=reservoir.seen))


_same: ColumnElement[bool] = generations.c.seq == replay_buffer.c.seq


def _item(row: Any) -> Item:
    prompt = _ids(row.prompt)
    return Item(row.seq, text_key(prompt, _ids(row.output)), groups_of(row.client, template(row.first_user, prompt)))


def _ids(blob: bytes) -> list[int]:
    return np.frombuffer(blob, dtype="<u4").tolist()
