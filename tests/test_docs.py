"""The documents name every setting, metric, route and command, and their links are valid."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import typer
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_settings import BaseSettings

from service.cli.root import app
from service.metrics import METRICS
from service.settings import Settings, load_settings
from tests.support.reference import FILE, build, commands, docstrings, reference

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCS}
DEFAULTS = (ROOT / "configs" / "default.toml").read_text(encoding="utf-8")

UNSET = {
    "gate.max_tokens",
    "engine.prefix_cache_mb",
    "engine.prefix_cache_dir",
    "models.draft",
    "models.revision",
    "engine.prefill_chunk",
    "engine.max_gap_ms",
    "store.url",
    "store.adapters",
    "store.max_days",
    "store.max_mb",
    "server.api_key",
    "server.operator_key",
    "server.rate_limit",
    "server.ssl_certfile",
    "server.ssl_keyfile",
}
"""Settings without a value by default, which TOML cannot write; the file names them in comments."""


def leaves(settings: BaseSettings | BaseModel, path: str = "") -> dict[str, object]:
    """Every setting by its dotted name, but the home folder, which the environment decides."""
    found: dict[str, object] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            found |= leaves(value, f"{path}{name}.")
        elif f"{path}{name}" != "home":
            found[f"{path}{name}"] = value
    return found


def written() -> dict[str, object]:
    return {
        f"{section}.{name}": value for section, tree in tomllib.loads(DEFAULTS).items() for name, value in tree.items()
    }


def test_the_default_file_holds_every_setting_with_its_default() -> None:
    settings = leaves(Settings())
    assert {name for name, value in settings.items() if value is None} == UNSET
    assert written() == {name: value for name, value in settings.items() if name not in UNSET}
    section = ""
    commented: set[str] = set()
    for line in DEFAULTS.splitlines():
        if found := re.match(r"\[(\w+)\]", line):
            section = found[1]
        elif found := re.match(r"# (\w+) = ", line):
            commented.add(f"{section}.{found[1]}")
    assert commented == UNSET
    assert leaves(load_settings(ROOT / "configs" / "default.toml")) == settings


@pytest.mark.promise(32)
def test_every_metric_is_in_the_table_with_its_kind() -> None:
    rows = re.findall(r"^\| `redraft:(\w+)` \| (\w+) \|", TEXT["docs/metrics.md"], re.MULTILINE)
    assert sorted(rows) == sorted((item.name, item.kind) for item in METRICS)


def test_every_metric_s_labels_are_in_the_table() -> None:
    for item in METRICS:
        (row,) = [line for line in TEXT["docs/metrics.md"].splitlines() if f"`redraft:{item.name}`" in line]
        assert tuple(re.findall(r"`(\w+)`", row.split("|")[3])) == item.labels, row


def routes() -> set[tuple[str, str]]:
    api = build()
    found = {
        (method, route.path)
        for route in api.routes
        if isinstance(route, APIRoute)
        for method in cast("set[str]", route.methods)
    }
    schema = {(method.upper(), path) for path, item in api.openapi()["paths"].items() for method in item}
    return found | schema


@pytest.mark.promise(32)
def test_every_route_is_in_the_readme_and_no_other() -> None:
    named = set(re.findall(r"\b(GET|POST|PUT|DELETE|PATCH) (/[\w/{}]*)", TEXT["README.md"]))
    assert len(routes()) >= 8
    assert named == routes()


def command_names() -> list[tuple[str, ...]]:
    return [path for path, _ in commands(typer.main.get_command(app))]


@pytest.mark.promise(32)
def test_every_command_is_in_the_readme_and_no_other() -> None:
    named: set[tuple[str, ...]] = set()
    tops = {path[0] for path in command_names()}
    flat = " ".join(TEXT["README.md"].split())
    for top, rest in re.findall(r"redraft ([a-z][\w-]*)(?: ([a-z][\w|-]*))?", flat):
        if top in tops:
            groups = {path[0] for path in command_names() if len(path) > 1}
            named |= {(top, name) for name in rest.split("|")} if top in groups else {(top,)}
    assert named == set(command_names())


@pytest.mark.parametrize("name", TEXT)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT[name])
    for link in links:
        if not link.startswith(("https://", "http://", "#")):
            assert ((ROOT / name).parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("name", TEXT)
def test_files_that_are_named_exist(name: str) -> None:
    for path in re.findall(r"\b((?:docs|configs|tests|service|migrations|benchmarks)/[\w./-]+\.\w+)", TEXT[name]):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|cu|cuh))`", TEXT[name]):
        assert any((ROOT / root / path).exists() for root in ("", "service")), path


@pytest.mark.parametrize("name", [*TEXT, "configs/default.toml"])
def test_nothing_speaks_of_one_machine_s_folders(name: str) -> None:
    text = TEXT.get(name, DEFAULTS)
    assert not re.findall(r"(?<![\w.])/(?:home|Users|root|work|tmp|mnt|opt|usr|var|private)/[\w.-]+", text)


def test_the_way_of_a_failure_case_names_functions_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `([\w/]+\.py)` \|", TEXT["docs/structure.md"], re.MULTILINE)
    assert [int(number) for number, *_ in rows] == list(range(1, 13)), "twelve at most, or it is no way to follow"
    for _, function, file in rows:
        assert f"def {function}(" in (ROOT / "service" / file).read_text(encoding="utf-8"), (file, function)


@pytest.mark.promise(32)
def test_the_reference_is_what_the_code_says() -> None:
    assert FILE.read_text(encoding="utf-8") == reference(), "run `just docs`"


def test_every_setting_has_a_docstring() -> None:
    sections = [type(value) for _, value in Settings() if isinstance(value, BaseModel)]
    named = {(kind.__name__, name) for kind in sections for name in kind.model_fields}
    assert len(named) >= 70
    assert named - docstrings().keys() == set()


def texts_of_the_code() -> Iterator[str]:
    """Every string in service/ but docstrings, with "..." for the values in it."""
    for path in (ROOT / "service").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            match node:
                case ast.JoinedStr(values=values):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in values)
                case ast.Constant(value=str(text)) if id(node) not in alone:
                    yield re.sub(r"%(?:\.\d+)?[dsrf]", "...", text)
                case _:
                    pass


def test_every_message_in_troubleshooting_is_one_of_the_code() -> None:
    text = TEXT["docs/troubleshooting.md"]
    quoted = {each for each in re.findall(r"`([^`]+)`", text) if is_message(each)}
    assert len(quoted) >= 80
    known = list(texts_of_the_code())
    assert [each for each in sorted(quoted) if not any(each.strip() in code for code in known)] == []


def is_message(quoted: str) -> bool:
    """Whether it is a sentence, or part of one, and no command, setting or request."""
    return " " in quoted and not re.match(r"redraft |hf |\S+ = |\{|Authorization|--|[A-Z]+ /", quoted)
