"""The replay reservoirs' rows: one for every tag that clients gave, and for every kind of prompt that came without one.

Tags and kinds are columns of their own: a client may call its domain whatever it likes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, update

from service.core import Generation, Provenance
from service.store.database import Database
from service.store.log.generations import TRAIN, Generations
from service.store.log.likeness import content_key, groups_of, kind, template
from service.store.log.run_texts import GIVEN_BACK, Role, texts_of
from service.store.replay.reservoir import Item, Reservoir
from service.store.tables import failure_cases, generations, replay_buffer, replay_domains, run_texts, training_runs

MOST_WELL = 4096
"""Texts without a failure case that are offered at a time: a server whose draft is parked may log any number of them."""

Place = tuple[str, str]
"""A reservoir's name: the clients' tag, or ("", kind) for prompts that came without one."""

_TEXT = (
    generations.c.id,
    generations.c.seq,
    generations.c.prompt,
    generations.c.output,
    generations.c.client,
    generations.c.api_key,
    generations.c.domain,
    generations.c.first_user,
)
_FREE = generations.c.quarantined_run.is_(None)


class Replay:
    """The replay buffer of a database. Writes wait until they are committed."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._generations = Generations(database)

    def offer(self, domain: str | None, generation_ids: Sequence[str], capacity: int, seed: int) -> None:
        """Offer texts to the reservoir of a domain, or (None) each to its own: its tag's, or its kind's. A slot that a deletion
        has emptied is filled first. Held-out and quarantined generations, unknown ids and texts held already are passed
        over."""

        def work(connection: Connection) -> None:
            rows: dict[str, Any] = {}
            for start in range(0, len(generation_ids), 500):
                some = list(generation_ids[start : start + 500])
                query = select(*_TEXT).where(generations.c.id.in_(some), generations.c.split == TRAIN, _FREE)
                rows |= {row.id: row for row in connection.execute(query)}
            _offer(connection, domain, [rows[name] for name in generation_ids if name in rows], capacity, seed)

        self._db.write(work, urgent=False).result()

    def offer_run(self, run_id: int, capacity: int, seed: int) -> None:
        """Offer what a run has learnt from, each text to its own reservoir, and with it the newest MOST_WELL of what was
        logged since the run before and left no failure case: later runs must not forget what the draft does well either.
        Texts that were quarantined meanwhile are passed over."""

        def work(connection: Connection) -> None:
            new = run_texts.c.role == Role.NEW
            newest = connection.execute(
                select(func.max(run_texts.c.seq)).where(new, run_texts.c.run == run_id)
            ).scalar()
            if newest is None:
                return
            last = connection.execute(
                select(func.max(run_texts.c.seq))
                .join_from(run_texts, training_runs, training_runs.c.id == run_texts.c.run)
                .where(new, run_texts.c.run < run_id, training_runs.c.state.not_in(GIVEN_BACK))
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
                generations.c.cases.is_not(None),
                ~cases.exists(),
            )
            newest_well = select(generations.c.seq).where(well).order_by(generations.c.seq.desc()).limit(MOST_WELL)
            offered = or_(texts_of(run_id, Role.NEW), generations.c.seq.in_(newest_well))
            query = select(*_TEXT).where(offered, _FREE).order_by(generations.c.seq)
            _offer(connection, None, connection.execute(query).all(), capacity, seed)

        self._db.write(work, urgent=False).result()

    def labelled(self, found: Sequence[Generation]) -> list[Generation]:
        """With their kind where they have no tag: which of the reservoirs they are like."""
        known = [name for _, name in self.sizes() if name]
        return [
            g if g.prompt.domain else replace(g, prompt=replace(g.prompt, kind=kind(g.prompt.tokens, known)))
            for g in found
        ]

    def sample(self, who: Provenance, count: int, seed: int) -> list[Generation]:
        """Up to `count` held generations of this target and tokenizer, uniform over reservoirs, then within each; their domain
        or kind is the reservoir's."""
        query = (
            select(replay_buffer.c.domain, replay_buffer.c.kind, generations.c.id)
            .join_from(replay_buffer, generations, generations.c.seq == replay_buffer.c.seq)
            .where(generations.c.target == who.target, generations.c.tokenizer == who.tokenizer)
            .order_by(replay_buffer.c.domain, replay_buffer.c.kind, replay_buffer.c.slot)
        )
        held: dict[Place, list[str]] = {}
        with self._db.read() as connection:
            for domain, of_kind, name in connection.execute(query):
                held.setdefault((domain, of_kind), []).append(name)
        rng = random.Random(seed)
        for names in held.values():
            rng.shuffle(names)
        place: dict[str, Place] = {}
        while len(place) < count and any(held.values()):
            for where, names in held.items():
                if names and len(place) < count:
                    place.setdefault(names.pop(), where)
        found = {g.id: g for g in self._generations.by_ids(list(place))}
        return [
            replace(g, prompt=replace(g.prompt, domain=place[name][0] or None, kind=place[name][1] or None))
            for name, g in found.items()
        ]

    def sizes(self) -> Mapping[Place, int]:
        """Texts held by each reservoir that holds any."""
        name = (replay_buffer.c.domain, replay_buffer.c.kind)
        query = select(*name, func.count()).group_by(*name)
        with self._db.read() as connection:
            return {(domain, of_kind): count for domain, of_kind, count in connection.execute(query)}


def _offer(connection: Connection, domain: str | None, rows: Sequence[Any], capacity: int, seed: int) -> None:
    known = list(connection.execute(select(replay_domains.c.kind).where(replay_domains.c.kind != "")).scalars())
    offered: dict[Place, list[Item]] = {}
    for row in rows:
        tag = domain or row.domain
        place = (tag, "") if tag else ("", kind(_ids(row.prompt), known))
        if not tag and place[1] not in known:
            known.append(place[1])
        offered.setdefault(place, []).append(_item(row))
    for place, items in offered.items():
        _fill(connection, place, items, capacity, seed)


def _fill(connection: Connection, place: Place, items: Sequence[Item], capacity: int, seed: int) -> None:
    here = and_(replay_buffer.c.domain == place[0], replay_buffer.c.kind == place[1])
    this = and_(replay_domains.c.domain == place[0], replay_domains.c.kind == place[1])
    name = {"domain": place[0], "kind": place[1]}
    query = select(replay_buffer.c.slot, *_TEXT).join_from(replay_buffer, generations, _same).where(here)
    held = {row.slot: _item(row) for row in connection.execute(query)}
    seen = connection.execute(select(replay_domains.c.seen).where(this)).scalar()
    if seen is None:
        connection.execute(insert(replay_domains).values(**name, seen=0))
    reservoir = Reservoir(capacity, held, seen or 0, random.Random(f"{seed} {place[0] or place[1]} {seen or 0}"))
    taken = {slot for item in items if (slot := reservoir.offer(item)) is not None}
    for slot in sorted(taken):
        connection.execute(delete(replay_buffer).where(here, replay_buffer.c.slot == slot))
        connection.execute(insert(replay_buffer).values(**name, slot=slot, seq=reservoir.held[slot].seq))
    connection.execute(update(replay_domains).where(this).values(seen=reservoir.seen))


_same: ColumnElement[bool] = generations.c.seq == replay_buffer.c.seq


def _item(row: Any) -> Item:
    groups = groups_of(row.api_key or row.client, template(row.first_user, _ids(row.prompt)))
    return Item(row.seq, content_key(row.prompt, row.output), groups)


def _ids(blob: bytes) -> list[int]:
    return np.frombuffer(blob, dtype="<u4").tolist()
