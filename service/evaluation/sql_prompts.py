"""Prompts made from templates: short questions about small tables, to be answered in SQL.

Traffic and held-out prompts share neither tables, questions nor values, so that a gain on the second is not memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from service.evaluation.prompts import PromptLine

DOMAIN = "tables"

_TASK = "Write one SQL query that answers the question. Answer with the query only."

_TRAFFIC_TABLES = (
    ("employees", ("name", "department", "salary", "city")),
    ("orders", ("customer", "product", "quantity", "price")),
    ("students", ("name", "grade", "school", "age")),
    ("flights", ("origin", "destination", "airline", "duration")),
    ("books", ("title", "author", "year", "pages")),
    ("players", ("name", "team", "position", "points")),
    ("houses", ("street", "rooms", "owner", "price")),
    ("movies", ("title", "director", "rating", "year")),
)
_HELD_OUT_TABLES = (
    ("patients", ("name", "doctor", "weight", "ward")),
    ("vehicles", ("model", "maker", "mileage", "colour")),
    ("songs", ("title", "singer", "length", "album")),
    ("farms", ("farmer", "crop", "acres", "county")),
    ("courses", ("subject", "teacher", "credits", "room")),
    ("ships", ("captain", "harbour", "tonnage", "flag")),
)
_TRAFFIC_QUESTIONS = (
    "What is the {a} of every row where {b} is {v}?",
    "Show the {a} and {b} of all rows with {c} greater than {n}.",
    "How many rows have {a} equal to {v}?",
    "What is the highest {c} for each {a}?",
    "List all distinct values of {a}.",
    "Which {a} has the lowest {c}?",
    "What is the average {c} when {b} is {v}?",
    "Count the rows for each {b}.",
)
_HELD_OUT_QUESTIONS = (
    "Give me the {a} for those whose {b} is {v}.",
    "Find every {a} with {c} below {n}.",
    "Return the total {c} per {b}.",
    "Sort the rows by {c} and show {a}.",
    "Tell me the number of different {a} values.",
    "Who or what has {b} {v} and {c} above {n}?",
)
_TRAFFIC_VALUES = ("Smith", "London", "Blue", "North", "Alpha", "Rome", "Green", "Central", "Lima", "Gold")
_HELD_OUT_VALUES = ("Oslo", "Carter", "Amber", "South", "Delta", "Quartz", "Naples")


def _prompts(
    tables: Sequence[tuple[str, tuple[str, ...]]],
    questions: Sequence[str],
    values: Sequence[str],
    count: int,
    seed: int,
    prefix: str,
) -> list[PromptLine]:
    rng = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        table, columns = rng.choice(tables)
        a, b, c = rng.sample(columns, 3)
        question = rng.choice(questions).format(a=a, b=b, c=c, v=rng.choice(values), n=rng.randrange(2, 500))
        made[f"{_TASK}\nTable: {table} ({', '.join(columns)})\nQuestion: {question}"] = None
    return [PromptLine(f"{prefix}-{i}", DOMAIN, prompt) for i, prompt in enumerate(made)]


def traffic_prompts(count: int, seed: int = 0) -> list[PromptLine]:
    """`count` distinct prompts to serve and learn from; the same for the same seed."""
    return _prompts(_TRAFFIC_TABLES, _TRAFFIC_QUESTIONS, _TRAFFIC_VALUES, count, seed, "traffic")


def held_out_prompts(count: int, seed: int = 0) -> list[PromptLine]:
    """`count` distinct prompts to measure on; the same for the same seed."""
    return _prompts(_HELD_OUT_TABLES, _HELD_OUT_QUESTIONS, _HELD_OUT_VALUES, count, seed, "held-out")
