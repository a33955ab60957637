"""The prompts of repeated work."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from service.evaluation.prompts import read_prompts
from service.evaluation.repeated_work import EDITS, FILES, FUNCTIONS, SQL, repeated_prompts


def test_no_prompt_comes_twice_and_the_order_is_that_of_the_seed() -> None:
    made = repeated_prompts(400)
    assert len({line.prompt for line in made}) == len({line.id for line in made}) == 400
    assert [line.domain for line in made] == [EDITS, SQL] * 200
    assert made == repeated_prompts(400) and made[:100] == repeated_prompts(100) != repeated_prompts(100, seed=1)
    with pytest.raises(ValueError, match="not 1000"):
        repeated_prompts(1000)


def test_the_files_are_python_and_hold_what_is_to_be_edited() -> None:
    for name, text in FILES.items():
        functions = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
        assert functions >= set(FUNCTIONS[name])


def test_it_writes_a_prompt_file(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "service.evaluation.repeated_work", "20"]
    (tmp_path / "repeated.jsonl").write_text(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert read_prompts(tmp_path / "repeated.jsonl") == repeated_prompts(20)
    assert json.loads((tmp_path / "repeated.jsonl").read_text().splitlines()[0])["domain"] == EDITS
