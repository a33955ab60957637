"""A model's own sampling defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.core import Sampling
from service.models.generation_config import sampling_defaults


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            Sampling(0.6, 0.95, 20, 0.1),
        ),
        ({"do_sample": True}, Sampling(1.0)),
        ({"temperature": 0.7, "eos_token_id": 2}, Sampling(0.7)),
        ({"do_sample": False, "temperature": 0.7}, Sampling()),
        ({"eos_token_id": [1, 2]}, Sampling()),
        ({"do_sample": True, "temperature": -1, "top_p": 0, "top_k": "x", "min_p": True}, Sampling(1.0)),
        ({"temperature": None}, Sampling()),
        ({"do_sample": True, "repetition_penalty": 1.1}, Sampling(1.0, repetition_penalty=1.1)),
        # Hugging Face penalises greedy decoding too.
        ({"repetition_penalty": 1.05, "do_sample": False, "temperature": 0.7}, Sampling(repetition_penalty=1.05)),
        ({"repetition_penalty": 1.05}, Sampling(repetition_penalty=1.05)),
        ({"repetition_penalty": 1}, Sampling()),
        ({"repetition_penalty": 0}, Sampling()),
        ({"repetition_penalty": "1.1"}, Sampling()),
        ([], Sampling()),
    ],
)
def test_what_the_file_says(tmp_path: Path, config: object, wanted: Sampling) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(tmp_path) == wanted


@pytest.mark.parametrize("content", [None, "{", b"\xff"])
def test_without_a_file_that_can_be_read_it_is_greedy(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert sampling_defaults(tmp_path) == Sampling()
