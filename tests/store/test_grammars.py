"""Answers that had to follow a grammar: stored with it once, and texts like all others."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import select

from service.core import AnswerGrammar, Generation, Selection, Trigger
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts
from service.store.registry.lineage import Lineage
from service.store.registry.runs import Runs
from service.store.tables import grammars
from tests.support.store_rows import HELD_OUT_TEXT, WHO, case, generation

REASONING = AnswerGrammar("g", 5, (6, 7))


def bound(made: Generation, grammar: AnswerGrammar | str) -> Generation:
    return replace(made, grammar=AnswerGrammar(grammar) if isinstance(grammar, str) else grammar)


def texts(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(select(grammars.c.text).order_by(grammars.c.text)).scalars())


def test_they_are_learnt_from_and_measured_on_like_free_answers(database: Database) -> None:
    store = Generations(database)
    learnt, held = bound(generation(cases=[case(0)]), "g"), bound(generation(first_user=HELD_OUT_TEXT), REASONING)
    store.add([learnt, held]).result()
    assert TrainingTexts(database).untrained(WHO).cases == 1
    assert store.held_out(WHO, 9) == [held], "with all that its masks are made of"
    assert [text.id for text in store.held_out_texts(WHO, 9)] == [held.id]
    assert set(store.names_after(WHO, 0, 9)) == {learnt.id, held.id}
    assert {text.id for text in store.texts_after(WHO, 0, 9)} == {learnt.id, held.id}
    run = Runs(database).claim(trigger=Trigger.CASES, who=WHO, parent=0, limit=9)
    assert run is not None and TrainingTexts(database).claimed(run.id) == [learnt]


def test_the_same_text_with_and_without_a_grammar_is_two_rows(database: Database) -> None:
    store = Generations(database)
    made = generation(output=(1, 2, 3))
    again = [
        made,
        bound(made, "g"),
        bound(made, "h"),
        bound(made, "g"),
        bound(made, REASONING),
        bound(made, replace(REASONING, opening=None)),
        bound(made, REASONING),
    ]
    for number, each in enumerate(again):
        store.add([replace(each, id=f"n{number}")]).result()
    assert (store.stats().requests, store.stats().generations) == (7, 5)
    assert [store.by_ids([f"n{i}"])[0].grammar for i in (0, 1, 2, 4, 5)] == [again[i].grammar for i in (0, 1, 2, 4, 5)]
    assert texts(database) == ["g", "g", "g", "h"]


def test_a_grammar_goes_with_its_last_answer(database: Database) -> None:
    store = Generations(database)
    store.add([bound(generation(), "old"), bound(generation(), "new"), generation()]).result()
    assert texts(database) == ["new", "old"]
    store.purge(2).result()
    assert texts(database) == ["new"]
    Lineage(database).erase(Selection(everything=True))
    assert texts(database) == []
