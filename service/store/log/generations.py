"""Recorded generations and their failure cases."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, literal, select, update

from service.core import Generation, Provenance, Selection
from service.store.database import Database
from service.store.log.cases import add_cases, undrafted
from service.store.log.queries import (
    TEXT,
    load,
    newest,
    newest_of_pair,
    of_target,
    same_target,
    selected,
    text_of,
)
from service.store.log.rows import grammar_values, ids_of, target_bytes, text_key, values_of
from service.store.log.run_texts import claimed_by_run, judged_run_texts
from service.store.log.sampler import Text
from service.store.tables import (
    failure_cases,
    generation_targets,
    generations,
    grammars,
    replay_buffer,
    replay_domains,
    run_texts,
)
from service.store.times import utc

TRAIN, HELD_OUT = "train", "held_out"
"""The split of a generation: trained on, or only measured on. Rows of older releases may be "constrained", which is
neither: answers that had to follow a grammar, with too little information stored."""
TURNS_READ = 10
"""Generations read per wanted conversation."""


def split_of(first_user: str) -> str:
    """Holds out one prompt in five, by the hash of the message that identifies its conversation, so that a continued
    chat keeps its split."""
    return HELD_OUT if hashlib.sha256(first_user.encode("utf-8", "surrogatepass")).digest()[0] % 5 == 0 else TRAIN


_BYTES = sum(
    (
        func.coalesce(func.length(column), 0)
        for column in (
            *(
                generations.c[name]
                for name in ("prompt", "output", "first_user", "rounds", "logprobs", "sampled_logprobs")
            ),
            generation_targets.c.blob,
        )
    ),
    start=literal(0),
)
"""Size of a generation: its tokens, rounds and probabilities. Rows and indexes add to it."""


@dataclass(frozen=True, slots=True)
class CaseStats:
    """requests: recorded generations including copies. generations: distinct ones. trained, quarantined: cases of texts
    that a run learnt from as new, and of quarantined ones."""

    requests: int
    generations: int
    tokens: int
    cases: int
    ties: int
    trained: int
    quarantined: int
    domains: Mapping[str, int]


class Generations:
    """The generations of a database with their failure cases. Methods that return a Future write in the background."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, batch: Sequence[Generation]) -> Future[int]:
        """Stores generations and their cases after urgent writes; returns the number of new ones. Known ids are
        ignored; a text that is already stored (see rows.text_key) is counted in its existing row."""

        def work(connection: Connection) -> int:
            ids = [generation.id for generation in batch]
            known = set(connection.execute(select(generations.c.id).where(generations.c.id.in_(ids))).scalars())
            new = {g.id: g for g in batch if g.id not in known and g.prompt.store}
            return sum(not _counted(connection, made) and _insert(connection, made) for made in new.values())

        return self._db.write(work, urgent=False, shared=True)

    def held_out(self, who: Provenance, limit: int) -> list[Generation]:
        """Generations no run may train on, newest first, one per prompt."""
        return load(self._db, generations.c.seq.in_(_held_out(who)), limit=limit)

    def held_out_texts(self, who: Provenance, conversations: int) -> list[Text]:
        """Of the newest `conversations` that no run may train on, one text per prompt, newest first."""
        query = select(*TEXT).where(generations.c.seq.in_(_held_out(who))).order_by(generations.c.seq.desc())
        known = set[str]()
        found: list[Text] = []
        with self._db.read() as connection:
            for row in connection.execute(query.limit(TURNS_READ * conversations)):
                one = text_of(row)
                if one.conversation in known or len(known) < conversations:
                    known.add(one.conversation)
                    found.append(one)
        return found

    def output_tokens(self, names: Sequence[str]) -> int:
        """Total output tokens of the generations with these ids."""
        query = select(func.sum(generations.c.output_tokens)).where(generations.c.id.in_(list(names)))
        with self._db.read() as connection:
            return connection.execute(query).scalar() or 0

    def end(self) -> int:
        """The newest generation's seq; 0 in an empty log."""
        with self._db.read() as connection:
            return log_end(connection)

    def texts_after(self, who: Provenance, seq: int, limit: int) -> list[Text]:
        """The newest `limit` generations of this pair recorded after `seq` that have an answer, newest first."""
        return [text_of(row) for row in newest_of_pair(self._db, who, limit, *TEXT, after=seq)]

    def names_after(self, who: Provenance, seq: int, limit: int) -> list[str]:
        """Ids of the newest `limit` generations of this pair recorded after `seq` that have an answer, newest first."""
        return [row.id for row in newest_of_pair(self._db, who, limit, generations.c.id, after=seq)]

    def outputs(
        self, who: Provenance, tokens: int, limit: int, since: datetime | None = None
    ) -> list[tuple[str | None, tuple[int, ...]]]:
        """The name of the key (None: without one) and the output of this target's newest generations, the newest last: of those
        among the newest `limit`, made since then, as many as have so many tokens together."""
        columns = (generations.c.seq, generations.c.output_tokens, generations.c.created_at)
        wanted, left = list[int](), tokens
        for row in newest(self._db, limit, *columns):
            # As the target, compared outside (`newest`).
            if same_target(row, who) and (since is None or utc(row.created_at) >= since):
                left -= row.output_tokens
                if left < 0:
                    break
                wanted.append(row.seq)
        query = select(generations.c.api_key, generations.c.output).where(generations.c.seq.in_(wanted))
        with self._db.read() as connection:
            rows = connection.execute(query.order_by(generations.c.seq)).all()
        return [(row.api_key, ids_of(row.output)) for row in rows]

    def by_ids(self, ids: Sequence[str]) -> list[Generation]:
        """Those that still exist, newest first."""
        return load(self._db, generations.c.id.in_(list(ids)))

    def names(self, selection: Selection) -> list[str]:
        """The ids of the selected generations, oldest first."""
        query = select(generations.c.id).where(*selected(selection)).order_by(generations.c.seq)
        with self._db.read() as connection:
            return list(connection.execute(query).scalars())

    def stats(self) -> CaseStats:
        """Totals over everything stored, of any target and draft. domains: generations by tag, "" for those without one."""

        def count(*where: ColumnElement[bool]) -> Any:
            return select(func.count()).select_from(failure_cases).where(*where).scalar_subquery()

        with self._db.read() as connection:
            requests, total, tokens = connection.execute(
                select(
                    func.coalesce(func.sum(generations.c.copies), 0),
                    func.count(),
                    func.coalesce(func.sum(generations.c.output_tokens), 0),
                ).select_from(generations)
            ).one()
            had_by_runs = judged_run_texts().with_only_columns(run_texts.c.seq)
            quarantined_texts = select(generations.c.seq).where(generations.c.quarantined_run.is_not(None))
            cases, ties, trained, quarantined = connection.execute(
                select(
                    count(),
                    count(failure_cases.c.tie.is_(True)),
                    count(failure_cases.c.seq.in_(had_by_runs)),
                    count(failure_cases.c.seq.in_(quarantined_texts)),
                )
            ).one()
            domains = connection.execute(
                select(generations.c.domain, func.count()).group_by(generations.c.domain)
            ).all()
        return CaseStats(
            int(requests), total, int(tokens), cases, ties, trained, quarantined, {str(d or ""): n for d, n in domains}
        )

    def purge(
        self, keep: int, *, before: datetime | None = None, max_bytes: int | None = None, spare_replay: bool = True
    ) -> Future[int]:
        """Delete all but the newest `keep` generations, with everything that hangs on them; how many went. before: also what
        was recorded before this moment. max_bytes: also the oldest, until the others' `_BYTES` are no more.

        spare_replay: what the replay buffer holds is not counted out, or its reservoirs would hold recent texts alone. At most
        the newest `keep` of it, since clients may name as many domains as they like. Age and size spare nothing.
        """

        def work(connection: Connection) -> int:
            oldest = connection.execute(
                select(generations.c.seq).order_by(generations.c.seq.desc()).offset(keep).limit(1)
            ).scalar()
            gone = 0
            if oldest is not None:
                held = select(replay_buffer.c.seq).distinct().order_by(replay_buffer.c.seq.desc()).limit(keep)
                spared = [generations.c.seq.not_in(held)] if spare_replay else []
                gone += remove(connection, generations.c.seq <= oldest, *spared)
            if before is not None:
                gone += remove(connection, generations.c.created_at < before.astimezone(UTC))
            if max_bytes is not None:
                gone += remove(connection, generations.c.seq <= _too_many_bytes(connection, max_bytes))
            return gone

        return self._db.write(work, urgent=False, scrub=True)


def _too_many_bytes(connection: Connection, most: int) -> int:
    """The newest generation that, together with all later ones, exceeds the byte limit; 0: all fit."""
    so_far = func.sum(_BYTES).over(order_by=generations.c.seq.desc()).label("so_far")
    joined = generations.join(generation_targets, generation_targets.c.seq == generations.c.seq, isouter=True)
    sizes = select(generations.c.seq, so_far).select_from(joined).subquery()
    return connection.execute(select(func.max(sizes.c.seq)).where(sizes.c.so_far > most)).scalar() or 0


def _held_out(who: Provenance) -> Select[tuple[int]]:
    """Query: seq of the newest held-out generation of each prompt."""
    return (
        select(func.max(generations.c.seq))
        .where(of_target(who), generations.c.split == HELD_OUT, generations.c.output_tokens > 0)
        .group_by(generations.c.prompt_hash)
    )


def log_end(connection: Connection) -> int:
    """The newest generation's seq; 0 in an empty log."""
    return connection.execute(select(func.max(generations.c.seq))).scalar() or 0


def remove(connection: Connection, *where: ColumnElement[bool]) -> int:
    """Deletes generations with everything that refers to them; returns their number. Without conditions: all."""
    gone = connection.execute(delete(generations).where(*where)).rowcount
    # A reservoir that lost all its texts starts anew, and its domain's name is deleted with it.
    held = select(replay_buffer.c.slot).where(
        replay_buffer.c.domain == replay_domains.c.domain, replay_buffer.c.kind == replay_domains.c.kind
    )
    connection.execute(delete(replay_domains).where(~held.exists()))
    used = select(generations.c.seq).where(generations.c.grammar == grammars.c.hash)
    connection.execute(delete(grammars).where(~used.exists()))
    return gone


def _counted(connection: Connection, made: Generation) -> bool:
    """Counts a text in its existing row; False if it has none. An undrafted text receives the cases of a drafted copy."""
    same = generations.c.text_key == text_key(made)
    query = select(generations.c.seq).where(same).order_by(generations.c.seq.desc()).limit(1)
    seq = connection.execute(query).scalar()
    if seq is None:
        return False
    connection.execute(update(generations).where(generations.c.seq == seq).values(copies=generations.c.copies + 1))
    unknown = (generations.c.cases.is_(None), generations.c.quarantined_run.is_(None), ~claimed_by_run())
    query = select(generations.c.seq).where(generations.c.seq == seq, *unknown)
    if not undrafted(made) and connection.execute(query).scalar() is not None:
        add_cases(connection, seq, made.cases)
    return True


def _insert(connection: Connection, made: Generation) -> bool:
    """A row of its own; always True."""
    # Texts go as parameters: SQLAlchemy keeps the first statement of a kind, with the values in it, to compile it no more.
    values = values_of(made)
    split = split_of(made.prompt.first_user or values["prompt"].hex())
    if (grammar := made.grammar) is not None:
        known = select(grammars.c.hash).where(grammars.c.hash == values["grammar"])
        if connection.execute(known).scalar() is None:
            connection.execute(insert(grammars), {"hash": values["grammar"], **grammar_values(grammar)})
    if split == TRAIN and undrafted(made):
        values["cases"] = None
    row = connection.execute(insert(generations), {**values, "split": split})
    assert row.inserted_primary_key is not None
    seq = row.inserted_primary_key[0]
    if (targets := made.targets) is not None:
        connection.execute(insert(generation_targets), {"seq": seq, "top": targets.top, "blob": target_bytes(targets)})
    if made.cases:
        connection.execute(insert(failure_cases), [{"seq": seq, **asdict(one)} for one in made.cases])
    return True
