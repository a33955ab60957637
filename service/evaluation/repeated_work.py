"""Prompts of repeated work, no two alike: edits of a few source files, answered with the whole file, and SQL over one schema.

`python -m service.evaluation.repeated_work 240 > repeated.jsonl` writes them as a prompt file (`prompts`).
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict
from itertools import product

from service.evaluation.prompts import PromptLine

EDITS, SQL = "edits", "sql"

FILES = {
    "stack.py": """class Stack:
    def __init__(self, limit):
        self.limit = limit
        self.items = []

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError("the stack is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()
""",
    "prices.py": """TAX = 0.19


def total(items):
    result = 0.0
    for item in items:
        result += item["price"] * item["quantity"]
    return round(result * (1 + TAX), 2)


def discount(amount, percent):
    if percent < 0 or percent > 100:
        raise ValueError("percent must be between 0 and 100")
    return amount * (100 - percent) / 100
""",
    "words.py": """import re


def count(text):
    counts = {}
    for word in re.findall(r"[a-z]+", text.lower()):
        counts[word] = counts.get(word, 0) + 1
    return counts


def longest(text):
    words = re.findall(r"[a-z]+", text.lower())
    return max(words, key=len) if words else None
""",
    "accounts.py": """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
""",
}
"""Source files by name."""
FUNCTIONS = {
    "stack.py": ("push", "pop"),
    "prices.py": ("total", "discount"),
    "words.py": ("count", "longest"),
    "accounts.py": ("deposit", "withdraw"),
}
CHANGES = (
    "Rename {function} to {name}_{function}.",
    "Add a docstring to {function} that mentions {name}.",
    'Print "{name}" at the start of {function}.',
    "Add a parameter {name} with the default None to {function}.",
)
NAMES = ("safe", "checked", "fast", "simple", "verbose", "strict", "legacy", "public")

SCHEMA = """CREATE TABLE customers (id INTEGER, name TEXT, city TEXT, joined DATE);
CREATE TABLE products (id INTEGER, name TEXT, category TEXT, price REAL);
CREATE TABLE orders (id INTEGER, customer_id INTEGER, product_id INTEGER, quantity INTEGER, ordered DATE);"""
QUESTIONS = (
    "Which customers from {city} ordered more than {n} of one product? Give their names.",
    "How many orders of more than {n} pieces came from {city}?",
    "List the names and prices of products that customers from {city} ordered at least {n} times.",
    "What is the total amount that customers from {city} paid for products dearer than {n}?",
    "Who are the {n} customers from {city} with the most orders?",
)
CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Quito", "Delhi")
NUMBERS = (2, 3, 5, 8, 10, 20, 50)


def repeated_prompts(count: int, seed: int = 0) -> list[PromptLine]:
    """`count` distinct prompts, as many of each kind as there are, in an order that is the same for the same seed. Raises
    ValueError for more than there are."""
    edits = [
        f"Here is {file}:\n\n```python\n{text}```\n\n{change.format(function=function, name=name)} Answer with the whole file."
        for file, text in FILES.items()
        for function, change, name in product(FUNCTIONS[file], CHANGES, NAMES)
    ]
    queries = [
        f"{SCHEMA}\n\nWrite one SQL query. {question.format(city=city, n=n)} Answer with the query only."
        for question, city, n in product(QUESTIONS, CITIES, NUMBERS)
    ]
    rng = random.Random(seed)
    rng.shuffle(edits)
    rng.shuffle(queries)
    made = [line for pair in zip(edits, queries, strict=False) for line in zip((EDITS, SQL), pair, strict=True)]
    if count > len(made):
        raise ValueError(f"there are {len(made)} prompts, not {count}")
    return [PromptLine(f"{domain}-{i}", domain, prompt) for i, (domain, prompt) in enumerate(made[:count])]


if __name__ == "__main__":
    for made in repeated_prompts(int(sys.argv[1])):
        print(json.dumps(asdict(made)))
