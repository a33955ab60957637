"""Quantised keys and values are refused by name, wherever they can be requested."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.models.llama import Model as Llama

from service.api.ignored import paths_of
from service.api.schemas import GenerateRequest
from service.core import BadRequest, PairError
from service.engine.kv.cache import RowCache
from service.models.pair import check_cache
from service.settings import load_settings
from tests.support.oracle import tiny_llama


class Quantising(Llama):
    def make_cache(self) -> list[Any]:
        return [KVCache(), QuantizedKVCache(group_size=32, bits=8)]


def test_a_model_that_brings_its_own() -> None:
    model: nn.Module = Quantising(tiny_llama(0).args)
    with pytest.raises(
        PairError, match=r"^the target \(llama\) keeps a QuantizedKVCache in layer 1, which cannot be rolled"
    ):
        check_cache(model, "target")
    with pytest.raises(PairError, match="QuantizedKVCache cannot be rolled back"):
        RowCache(model, 1)


def by_file(folder: Path, environment: pytest.MonkeyPatch) -> None:
    (folder / "redraft.toml").write_text("[engine]\nkv_bits = 8\n")
    load_settings(folder / "redraft.toml")


def by_environment(folder: Path, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("REDRAFT_ENGINE__KV_BITS", "8")
    load_settings()


def by_flag(folder: Path, environment: pytest.MonkeyPatch) -> None:
    load_settings(flags={"engine.kv_bits": 8})


@pytest.mark.parametrize("ask", [by_file, by_environment, by_flag])
def test_mlx_lms_setting(
    ask: Callable[[Path, pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadRequest, match=r"engine\.kv_bits: Extra inputs are not permitted"):
        ask(tmp_path, monkeypatch)


def test_a_request_that_names_it() -> None:
    body = GenerateRequest.model_validate_json(json.dumps({"prompt": "hello", "kv_bits": 8}))
    assert paths_of(body).unknown == ["kv_bits"]
