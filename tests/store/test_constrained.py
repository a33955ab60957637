"""Answers within a grammar: stored with it, and left out of what is learnt from and measured on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from sqlalchemy import select

from service.core import Generation
from service.store.database import Database
from service.store.generations import Generations
from service.store.tables import grammars
from tests.support.echo_engine import NamedGrammar
from tests.support.store_rows import WHO, generation


def within(made: Generation, grammar: str) -> Generation:
    return replace(made, prompt=replace(made.prompt, constraint=NamedGrammar(grammar)))


def texts(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(select(grammars.c.text).order_by(grammars.c.text)).scalars())


def test_they_are_kept_apart_from_free_answers(database: Database) -> None:
    store = Generations(database)
    free = [generation(first_user=f"question {i}") for i in range(30)]
    store.add(free).result()
    counts, held = store.counts(WHO), store.held_out(WHO, 100)
    assert held
    bound = [within(generation(first_user=f"question {i}"), "g" if i % 2 else "h") for i in range(30)]
    store.add(bound).result()
    assert store.stats().generations == 60
    assert store.counts(WHO) == counts
    assert store.held_out(WHO, 100) == held
    assert store.claimed_names(1) == []
    before = min(made.created_at for made in free) - timedelta(seconds=1)
    assert set(store.names_after(WHO, before, 100)) == {made.id for made in free}
    assert {text.id for text in store.texts_after(WHO, before, 100)} == {made.id for made in free}
    assert [each.rounds for each in store.drafting(WHO, 30)] == [()] * 30
    assert store.by_ids([bound[0].id])[0].output == bound[0].output
    assert texts(database) == ["g", "h"]


def test_the_same_text_with_and_without_a_grammar_is_two_rows(database: Database) -> None:
    store = Generations(database)
    made = generation(output=(1, 2, 3))
    for number, each in enumerate((made, within(made, "g"), within(made, "h"), within(made, "g"))):
        store.add([replace(each, id=f"n{number}")]).result()
    assert (store.stats().requests, store.stats().generations) == (4, 3)


def test_a_grammar_goes_with_its_last_answer(database: Database) -> None:
    store = Generations(database)
    store.add([within(generation(), "old"), within(generation(), "new"), generation()]).result()
    assert texts(database) == ["new", "old"]
    store.purge(2).result()
    assert texts(database) == ["new"]
    store.erase(everything=True).result()
    assert texts(database) == []
