"""What the code may not do, found in its syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICE = Path(__file__).parents[1] / "service"
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_ARGUMENTS = {"trust_remote_code", "allow_pickle"}


def executed(source: str) -> Iterator[str]:
    """What in it could run data as code."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (name.name for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                yield name
            case ast.keyword(arg=str(name), value=ast.Constant(value=True)) if name in FORBIDDEN_ARGUMENTS:
                yield name
            case ast.Call(func=ast.Attribute(attr="load"), args=[_, *_], keywords=keywords) if any(
                keyword.arg == "weights_only" for keyword in keywords
            ):
                yield "torch.load"
            case _:
                pass


@pytest.mark.promise(29)
def test_data_never_becomes_code() -> None:
    found = {
        str(path.relative_to(SERVICE)): names
        for path in SERVICE.rglob("*.py")
        if (names := list(executed(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "eval(text)",
        "load(path, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_the_check_sees_what_it_forbids(source: str) -> None:
    assert list(executed(source))
