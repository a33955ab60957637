"""Text comes back as it was, whatever is in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.dialects import postgresql

from service.core import AnswerGrammar, RunState, Selection, Trigger
from service.store.columns import FreeText
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.registry.adapters import Adapters
from service.store.registry.lineage import Lineage
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay
from service.store.tables import adapters, grammars
from tests.support.store_rows import ADAPTERS, WHO, generation, promote

ODD = ["a\0b", "\x10", "\x100", "\x10\x10\0", "\0" * 128, "\x7f\u0085\u2028\ufeff", "🦔" * 128, "'; --\\x00 %s :x"]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_texts_are_stored_in_full(database: Database, odd: str) -> None:
    store, runs = Generations(database), Runs(database)
    made = generation(first_user=odd, client=odd, domain=odd)
    store.add([made, generation(first_user="other", client="other", domain="other")]).result()
    assert store.by_ids([made.id]) == [made]
    assert store.stats().domains == {odd: 1, "other": 1}
    bound = generation(output=[1])
    bound = replace(bound, grammar=AnswerGrammar(odd))
    store.add([bound]).result()
    with database.read() as connection:
        assert connection.execute(select(grammars.c.text)).scalars().all() == [odd]
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=9)
    assert run is not None
    assert runs.move(run.id, run.fencing, RunState.FAILED, error=odd).error == odd
    assert Lineage(database).erase(Selection(client=odd)).generations == 1
    assert store.by_ids([made.id]) == []


def test_reservoirs_of_odd_tags_are_told_apart(database: Database) -> None:
    store, replay = Generations(database), Replay(database)
    tags = [odd for odd in ODD if len(odd) <= 128]
    made = [generation(domain=tag) for tag in tags]
    store.add(made).result()
    replay.offer(None, [g.id for g in made], 4, 0)
    assert replay.sizes() == {(tag, ""): 1 for tag in tags}


def test_why_an_adapter_is_broken_is_stored_in_full(database: Database) -> None:
    Generations(database).add([generation()]).result()
    runs = Runs(database)
    run = runs.claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=1)
    assert run is not None
    ref = promote(runs, Adapters(database, ADAPTERS), run)
    Adapters(database, ADAPTERS).mark_broken(ref.id, "a\0b\x10")
    with database.read() as connection:
        assert connection.execute(select(adapters.c.note)).scalar() == "a\0b\x10"


@given(st.text(alphabet="ab\0\x100"), st.text(alphabet="ab\0\x100"))
def test_no_two_texts_become_one(one: str, other: str) -> None:
    column, dialect = FreeText(), postgresql.dialect()
    stored = [column.process_bind_param(each, dialect) for each in (one, other)]
    assert all(each is not None and "\0" not in each for each in stored)
    assert [column.process_result_value(each, dialect) for each in stored] == [one, other]
    assert (stored[0] == stored[1]) == (one == other)
