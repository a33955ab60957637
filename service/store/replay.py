"""The replay reservoir's rows: per domain a uniform sample of everything ever offered."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sqlalchemy import Connection, delete, func, insert, select, update

from service.core import Generation, Provenance
from service.store.database import Database
from service.store.generations import TRAIN, Generations
from service.store.tables import generations, replay_buffer, replay_domains


class Replay:
    def __init__(self, database: Database) -> None:
        self._db = database
        self._generations = Generations(database)

    def offer(self, domain: str, generation_ids: Sequence[str], capacity: int, seed: int) -> None:
        """Algorithm R (Vitter 1985): after any number of offers each one is held with the same probability. A slot that a
        deletion has emptied is filled first. Held-out generations, unknown ids and those held already are passed over."""

        def work(connection: Connection) -> None:
            rows = connection.execute(
                select(generations.c.id, generations.c.seq).where(
                    generations.c.id.in_(list(generation_ids)), generations.c.split == TRAIN
                )
            )
            seqs = {row.id: row.seq for row in rows}
            here = replay_buffer.c.domain == domain
            held: dict[int, int] = {
                row.slot: row.seq
                for row in connection.execute(select(replay_buffer.c.slot, replay_buffer.c.seq).where(here))
            }
            seen = connection.execute(select(replay_domains.c.seen).where(replay_domains.c.domain == domain)).scalar()
            if seen is None:
                connection.execute(insert(replay_domains).values(domain=domain, seen=0))
                seen = 0
            free = [slot for slot in reversed(range(capacity)) if slot not in held]
            rng = random.Random(f"{seed} {domain} {seen}")
            for name in dict.fromkeys(generation_ids):
                if (seq := seqs.get(name)) is None or seq in held.values():
                    continue
                seen += 1
                slot = free.pop() if free else rng.randrange(seen)
                if slot < capacity:
                    held[slot] = seq
                    connection.execute(delete(replay_buffer).where(here, replay_buffer.c.slot == slot))
                    connection.execute(insert(replay_buffer).values(domain=domain, slot=slot, seq=seq))
            connection.execute(update(replay_domains).where(replay_domains.c.domain == domain).values(seen=seen))

        self._db.write(work, urgent=False).result()

    def sample(self, who: Provenance, count: int, seed: int) -> list[Generation]:
        """Up to `count` held generations of this target and tokenizer, uniform over domains, then within each."""
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
        chosen: list[str] = []
        while len(chosen) < count and any(held.values()):
            for names in held.values():
                if names and len(chosen) < count:
                    chosen.append(names.pop())
        return self._generations.by_ids(chosen)

    def sizes(self) -> dict[str, int]:
        query = select(replay_buffer.c.domain, func.count()).group_by(replay_buffer.c.domain)
        with self._db.read() as connection:
            return dict(connection.execute(query).all())
