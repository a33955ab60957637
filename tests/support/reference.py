"""docs/reference.md from the code: every setting, route and command. `just docs` writes it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from fastapi import FastAPI
from pydantic.fields import FieldInfo

from service import settings
from service.api import Doors, Limits, ModelNames, build_api
from service.api.access import ROUTES
from service.cli.root import app
from service.metrics import Metrics
from service.settings import Section, Settings
from tests.support.echo_engine import EchoEngine, OpenHouse

FILE = Path(__file__).resolve().parent.parent.parent / "docs" / "reference.md"

HEAD = """\
# Reference: settings, routes, commands

Written from the code by `just docs`; do not edit. Metrics and the lines of the log: [metrics.md](metrics.md).
"""

SETTINGS = """\
## Settings

In a TOML file (`--config`), as `[section]` and `name = value`; in the environment, as `REDRAFT_SECTION__NAME`; or as a flag of
a command. A flag goes before the environment, and that before the file. `redraft config show` shows every value and where it
comes from.
"""

ROUTES_HEAD = """\
## Routes

Who may call: every client without a key ("public"), any key ("client"), or an operator's key ("operator"). What a server
without keys allows: [operations.md](operations.md#without-keys). The fields of the bodies are in `GET /openapi.json`.
"""

COMMANDS = """\
## Commands

What each does in full, and examples, are in its `--help`.

| exit status | what |
| --- | --- |
| 0 | It is done. `serve` and `trainer` end with it after SIGTERM or Ctrl-C. |
| 1 | It failed (the last line on stderr says why), the answer to a question was no, or what it checks is not so. |
| 2 | The words of the command line are wrong. |
| 70 | `serve`: the engine died or hung. Whoever supervises the process starts it again. |
| 128 + n | Signal n ended it: 130 after Ctrl-C, 143 after SIGTERM (of a server: the second one). |
"""

NOT_DESCRIBED = {
    ("GET", "/"): "The page.",
    ("GET", "/page/{name}"): "One of its files.",
    ("GET", "/health"): "The same as /health/ready.",
    ("GET", "/openapi.json"): "The schema of every route.",
}
"""Routes that the schema leaves out."""


def build() -> FastAPI:
    """The application with every route; it serves nothing."""
    nothing: Any = None
    limits = Limits(max_body_bytes=1024, request_timeout=1.0, keepalive_seconds=1.0, max_tokens=1, max_context=1)
    return build_api(
        service=EchoEngine(),
        encoder=nothing,
        operator=nothing,
        metrics=Metrics(3),
        limits=limits,
        models=ModelNames("m"),
        doors=Doors(OpenHouse(), ()),
        overview=nothing,
        feed=nothing,
    )


def reference() -> str:
    """The whole document."""
    parts = [HEAD, SETTINGS, *_settings(), ROUTES_HEAD, _routes(), COMMANDS, *_commands()]
    return "\n".join(parts)


def docstrings() -> dict[tuple[str, str], str]:
    """What stands below each field of the classes in service/settings.py, by class and field."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(settings)).body:
        if isinstance(node, ast.ClassDef):
            for field, below in zip(node.body, node.body[1:], strict=False):
                match field, below:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(text))),
                    ):
                        found[node.name, name] = " ".join(text.split())
                    case _:
                        pass
    return found


def _settings() -> Iterator[str]:
    texts = docstrings()
    yield _table(("setting", "type", "default", "what"), [_setting("home", Settings, texts)])
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield f"### {section}\n\n{inspect.getdoc(kind)}\n"
            rows = [_setting(name, kind, texts, f"{section}.") for name in kind.model_fields]
            yield _table(("setting", "type", "default", "what"), rows)


def _setting(
    name: str, owner: type[Section | Settings], texts: dict[tuple[str, str], str], prefix: str = ""
) -> list[str]:
    field = owner.model_fields[name]
    return [f"`{prefix}{name}`", _type(field), _default(field), texts[owner.__name__, name]]


def _type(field: FieldInfo) -> str:
    """The type as TOML has it, with its bounds."""
    names = {"Path": "path", "SecretStr": "secret string", "str": "string", "NoneType": ""}

    def name(kind: Any) -> str:
        if typing.get_origin(kind) is typing.Literal:
            return " or ".join(json.dumps(value) for value in typing.get_args(kind))
        if typing.get_origin(kind) is list:
            return f"list of {name(typing.get_args(kind)[0])}s"
        if typing.get_origin(kind) is typing.Annotated:
            return name(typing.get_args(kind)[0])
        if inner := typing.get_args(kind):
            return " or ".join(filter(None, map(name, inner)))
        return names.get(kind.__name__, str(kind.__name__))

    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [
        f"{text} {getattr(rule, sign):g}"
        for rule in field.metadata
        for sign, text in signs.items()
        if hasattr(rule, sign)
    ]
    return ", ".join([name(field.annotation), *bounds])


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "the user's data folder"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"


def _routes() -> str:
    paths = build().openapi()["paths"]
    rows: list[list[str]] = []
    for (method, path), access in ROUTES.items():
        shown = NOT_DESCRIBED.get((method, path))
        if shown is None:
            shown = paths[path.replace(":path}", "}")][method.lower()]["description"]
        rows.append([f"`{method} {path.replace(':path}', '}')}`", access.role, _flat(shown)])
    return _table(("route", "who", "what"), rows)


def _commands() -> Iterator[str]:
    for path, command in commands(typer.main.get_command(app)):
        context = command.make_context("", [], resilient_parsing=True)
        pieces = [f"### redraft {' '.join(path)}\n\n{_sentence(command.help or '')}\n"]
        rows = [
            [f"`{record[0]}`", record[1]]
            for parameter in command.params
            if "--help" not in parameter.opts and (record := _record(parameter, context)) is not None
        ]
        yield "\n".join([*pieces, _table(("option", "what"), rows)] if rows else pieces)


def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
    """A parameter's name and help, as `--help` shows them; None where it does not."""
    found = None if parameter.hidden else parameter.get_help_record(context)
    return None if found is None else (found[0], _flat(found[1]))


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below `group` with its words, in the order of `--help`."""
    children: dict[str, Any] = getattr(group, "commands", {})
    if not children:
        yield path, group
    for name, child in children.items():
        yield from commands(child, (*path, name))


def _sentence(text: str) -> str:
    """The first sentence."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", _flat(text), maxsplit=1)[0]


def _flat(text: str) -> str:
    return " ".join(text.split())


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *([cell.strip().replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
