"""Describes an invalid request in sentences, because pydantic reports one clause per failed validator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi.exceptions import RequestValidationError

from service.api.bodies import NOT_SERVED
from service.api.parts import not_served_as
from service.api.printing import printable
from service.core import BadRequest

MAX_PROBLEMS = 5
KINDS: Mapping[str, str] = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""The required type, by the kind of error. A value of a union may have any of them."""
BOUNDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "missing": lambda said: "is missing",
    "extra_forbidden": lambda said: "is not a known field",
    "greater_than": lambda said: f"must be more than {said['gt']:g}",
    "greater_than_equal": lambda said: f"must be at least {said['ge']:g}",
    "less_than": lambda said: f"must be below {said['lt']:.15g}",
    "less_than_equal": lambda said: f"must be at most {said['le']:.15g}",
    "too_short": lambda said: _counted("at least", said["min_length"], "entries", "entry"),
    "too_long": lambda said: _counted("at most", said["max_length"], "entries", "entry"),
    "string_too_short": lambda said: _counted("at least", said["min_length"], "characters", "character"),
    "string_too_long": lambda said: _counted("at most", said["max_length"], "characters", "character"),
    "string_pattern_mismatch": lambda said: "contains characters that are not allowed",
}


def _counted(bound: str, number: int, many: str, one: str) -> str:
    return f"must have {bound} {number} {one if number == 1 else many}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a body. place: names and indices leading to it that exist in the body. choice: names of the union
    branches on that way, each with its position in the place."""

    place: tuple[object, ...]
    branches: tuple[tuple[int, object], ...]
    kind: str
    said: Mapping[str, Any]
    message: str


def invalid(error: RequestValidationError) -> BadRequest:
    """A validation error as sentences (five at most) that name every wrong field; the first is `param`. If the body
    requests something unsupported, only that is reported."""
    problems = _meant([_problem(item, error.body) for item in error.errors()])
    sentences: dict[str, str] = {}
    for refused in (True, False):
        places = dict.fromkeys(problem.place for problem in problems)
        for place in places:
            here = [problem for problem in problems if problem.place == place]
            name = ".".join(printable(str(part)) for part in place) or "body"
            unserved = [sentence for sentence in (_unserved(one, error.body) for one in here) if sentence]
            if refused:
                sentences.update((sentence, name) for sentence in unserved if sentence not in sentences)
            else:
                sentences[f"{name} {_predicate(here)}"] = name
        if sentences:
            break
    return BadRequest("; ".join(list(sentences)[:MAX_PROBLEMS]), field=next(iter(sentences.values())))


def _problem(item: Mapping[str, Any], body: object) -> Problem:
    source, *path = item["loc"]
    place: list[object] = []
    branches: list[tuple[int, object]] = []
    if source != "body":
        place = [*path] or [source]
    else:
        for i, part in enumerate(path):
            if isinstance(body, dict) and part in body:
                body = cast("dict[object, object]", body)[part]
            elif isinstance(body, list) and isinstance(part, int) and part < len(cast("list[object]", body)):
                body = cast("list[object]", body)[part]
            elif item["type"] != "missing" or i != len(path) - 1:
                branches.append((len(place), part))
                continue
            place.append(part)
    return Problem(tuple(place), tuple(branches), item["type"], item.get("ctx") or {}, item["msg"])


def _meant(problems: Sequence[Problem], known: int = 0) -> list[Problem]:
    """The problems without those of union branches that the client did not mean. For each union, branches are kept
    whose values have the expected types or, if there is none, those that read furthest into the value. known: branches
    already chosen."""
    rest = [problem for problem in problems if len(problem.branches) <= known]
    unions: dict[tuple[object, ...], dict[object, list[Problem]]] = {}
    for problem in problems:
        if len(problem.branches) > known:
            at, branch = problem.branches[known]
            unions.setdefault(problem.place[:at], {}).setdefault(branch, []).append(problem)
    for branches in unions.values():
        reach = [(all(map(_of_its_kind, branch)), min(map(_depth, branch))) for branch in branches.values()]
        for reached, branch in zip(reach, branches.values(), strict=True):
            if reached == max(reach):
                rest += _meant(branch, known + 1)
    return [problem for problem in problems if problem in rest]


def _of_its_kind(problem: Problem) -> bool:
    """Whether a value has the expected type but is wrong."""
    return problem.kind not in KINDS and problem.kind != "literal_error"


def _depth(problem: Problem) -> tuple[int, int]:
    """How deep in the body a problem is."""
    numbers = [part for part in problem.place if isinstance(part, int)]
    return len(problem.place), numbers[-1] if numbers else -1


def _unserved(problem: Problem, body: object) -> str | None:
    """The sentence about an unsupported feature; None for mistakes."""
    if problem.kind == NOT_SERVED:
        return problem.message
    tag: object = None
    if problem.kind == "union_tag_invalid" and problem.said["discriminator"] != "'role'":
        tag, named = problem.said["tag"], problem.place
    elif problem.kind == "literal_error" and problem.place[-1:] == ("type",):
        tag, named = _at(problem.place, body), problem.place[:-1]
    else:
        return None
    names = [part for part in named if isinstance(part, str)]
    return not_served_as(tag, names[-1] if names else "body") if isinstance(tag, str) else None


def _at(place: Sequence[object], body: object) -> object:
    for part in place:
        body = cast("Any", body)[part]
    return body


def _predicate(problems: Sequence[Problem]) -> str:
    """What is wrong with one value; follows its name."""
    kinds = list(dict.fromkeys(KINDS[problem.kind] for problem in problems if problem.kind in KINDS))
    for problem in problems:
        if problem.kind == "literal_error":
            kinds.append(problem.said["expected"])
    others = list(filter(_of_its_kind, problems))
    if not others:
        return f"must be {' or '.join(kinds)}"
    return _other(others[0])


def _other(problem: Problem) -> str:
    said = problem.said
    if problem.kind in BOUNDS:
        return BOUNDS[problem.kind](said)
    if problem.kind == "union_tag_invalid":
        return f"must have one of these as its {_discriminator(said)}: {said['expected_tags']}"
    if problem.kind == "union_tag_not_found":
        return f"must have a {_discriminator(said)}"
    return problem.message.removeprefix("Value error, ")


def _discriminator(said: Mapping[str, Any]) -> str:
    """The name of the field that distinguishes a union's branches."""
    name = str(said["discriminator"]).strip("'")
    return name if name == "role" else "type"
