"""Every architecture mlx-lm ships: the same tokens as mlx-lm in ragged batches and past its window, or refused by name."""

import contextlib
import importlib
import pkgutil
import re
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from service.core import PairError, Prompt, Sampling
from service.engine import strategy as strategies
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.paged_layer import PagedLayer
from service.engine.kv.prefix import PrefixCache
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.kv.recurrent import StateLayer
from service.engine.preflight import check_rows
from service.engine.strategy import CUDA, Strategy, using
from service.models.pair import check_cache
from tests.support.batches import decode, serve
from tests.support.families import IDENTICAL, METAL, NOT_BUILT, RECURRENT, REFUSED, V, build, family_of, noisy_draft
from tests.support.oracle import forced, noisy_copy, tiny_llama

TOKENS, CONTROLLED_TOKENS, FULL = 8, 20, 48
"""Tokens decoded every day, of the families below, and nightly."""
MORE = 8
"""Tokens of the answer when the text comes again."""
CONTROLLED = ("llama", "gemma3_text", "lfm2")
"""One family for each kind of cache (whole, sliding window, recurrent): for these the comparison is shown to detect faults."""
DECODED = (*CONTROLLED, *(name for name in (*tuple(IDENTICAL)[::8], *tuple(RECURRENT)[::4]) if name not in CONTROLLED))
"""Families that decode every day; of the others the check at a start compares rows of unlike length with mlx-lm's."""
PROMPTS = (tuple(range(5, 90, 4)), tuple(range(11, 38, 3)), (60,))
"""Longer than the window, growing past it, and a single token."""


@cache
def installed() -> frozenset[str]:
    """Modules of mlx-lm that define a model, and those that cannot be imported."""
    found: set[str] = set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            names = vars(importlib.import_module(f"mlx_lm.models.{module.name}"))
        except (ImportError, SystemExit):
            found.add(module.name)
        else:
            found |= {module.name} if {"Model", "ModelArgs"} <= names.keys() else set()
    return frozenset(found)


def by_mlx_lm(model: nn.Module, prompt: tuple[int, ...], tokens: int = TOKENS) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


def asked(tokens: int = TOKENS) -> list[Prompt]:
    return [Prompt(prompt, Sampling(max_tokens=tokens)) for prompt in PROMPTS]


def start(model: nn.Module) -> None:
    """The checks a server makes of each model before it serves."""
    check_cache(model, "target")
    check_rows(model, "target")


def without_windows(patch: pytest.MonkeyPatch) -> None:
    """Let every layer see all positions."""
    for kind in (RectangleLayer, PagedLayer):
        make_mask: Any = kind.make_mask

        def whole(
            layer: Any, N: int, return_array: bool = False, window_size: int | None = None, make_mask: Any = make_mask
        ) -> Any:
            window, layer.window = layer.window, None
            try:
                return make_mask(layer, N, return_array)
            finally:
                layer.window = window

        patch.setattr(kind, "make_mask", whole)


def compare(name: str, needs: dict[str, Any], tokens: int, *, controls: bool) -> None:
    """The same tokens; controls: the comparison detects a missing sliding window, and a state that is not rolled back.
    Without them mlx-lm reads the engine's text in one call, where that is the same arithmetic as a call for each token."""
    target = build(name, needs)
    start(target)
    draft = noisy_draft(name, needs, target)
    decoder = Decoder(target, bare(draft), vocabulary=V, k=3, prefill_chunk=16, prefix=PrefixCache(2**24))
    rows = serve(decoder, asked(tokens))
    expected = [
        by_mlx_lm(target, row.prompt.tokens, tokens)
        if controls or name in RECURRENT
        else forced(target, row.prompt.tokens, row.output, row.prompt.sampling)
        for row in rows
    ]
    assert [row.output for row in rows] == expected
    rounds = [round for row in rows for round in row.rounds]
    accepted, drafted = sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)
    assert 0 < accepted < drafted, "accepting or rolling back was not tested"
    if not controls:
        return
    # A row whose layers hold the window alone leaves no earlier blocks than those at its end.
    longer = by_mlx_lm(target, PROMPTS[0], tokens + MORE)
    chat = Prompt((*PROMPTS[0], *longer[:tokens]), Sampling(max_tokens=MORE))
    (later,) = serve(decoder, [chat])
    recurrent = bool(RowCache(target, 1).states)
    assert (later.cached_tokens == 0) == recurrent and later.output == longer[tokens:]
    if any(isinstance(layer, RotatingKVCache) for layer in make_prompt_cache(target)):
        with pytest.MonkeyPatch.context() as patch:
            without_windows(patch)
            blind = decode(target, None, asked(tokens), k=0, vocabulary=V)
        assert any(row.output != tokens for row, tokens in zip(blind, expected, strict=True)), (
            "the window did not matter"
        )
    if recurrent:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateLayer, "truncate", lambda layer, counts: layer.commit())
            blind = decode(target, draft, asked(tokens), k=3, vocabulary=V)
            assert [row.output for row in blind] != expected, "rejected tokens leave no trace"
            with pytest.raises(PairError, match="gives other results in a batch than alone"):
                start(target)


def test_every_installed_family_is_listed_once() -> None:
    tables = (IDENTICAL, RECURRENT, REFUSED, METAL, NOT_BUILT)
    listed = [{name for name in table if "+" not in name} for table in tables]
    assert frozenset().union(*listed) == installed()
    assert sum(map(len, listed)) == len(installed())


@pytest.mark.parametrize("strategy", [strategies.METAL, CUDA], ids=["Metal", "CUDA"])
@pytest.mark.parametrize("name", CONTROLLED)
def test_decodes_as_mlx_lm_does_by_an_accelerators_strategy(name: str, strategy: Strategy) -> None:
    with using(strategy):
        compare(name, (IDENTICAL | RECURRENT)[name], TOKENS, controls=False)


@pytest.mark.nightly
@pytest.mark.parametrize("name", IDENTICAL | RECURRENT)
def test_decodes_as_mlx_lm_does_by_cudas_strategy(name: str) -> None:
    with using(CUDA):
        compare(name, (IDENTICAL | RECURRENT)[name], CONTROLLED_TOKENS, controls=True)


@pytest.mark.parametrize("name", DECODED)
def test_decodes_as_mlx_lm_does(name: str) -> None:
    controls = name in CONTROLLED
    compare(name, (IDENTICAL | RECURRENT)[name], CONTROLLED_TOKENS if controls else TOKENS, controls=controls)


@pytest.mark.parametrize("name", [name for name in IDENTICAL | RECURRENT if name not in DECODED])
def test_is_served(name: str) -> None:
    start(build(name, (IDENTICAL | RECURRENT)[name]))


@pytest.mark.nightly
@pytest.mark.parametrize("name", IDENTICAL | RECURRENT)
def test_decodes_as_mlx_lm_does_at_full_length(name: str) -> None:
    compare(name, (IDENTICAL | RECURRENT)[name], FULL, controls=True)


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    cause, needs = REFUSED[name]
    model = build(name, needs)
    with pytest.raises(PairError, match=rf"^the target \({family_of(name)}\) .*{re.escape(cause)}"):
        start(model)


@pytest.mark.parametrize("name", METAL)
def test_without_metal_its_kernels_are_named(name: str) -> None:
    """With Metal both identical and refused are accepted; which applies has not been checked yet."""
    if mx.metal.is_available():
        with contextlib.suppress(PairError):
            compare(name, METAL[name], FULL, controls=True)
        return
    with pytest.raises(PairError, match=rf"^the target \({name}\) .*does not run on this device: .*No Metal back-end"):
        start(build(name, METAL[name]))


@pytest.mark.parametrize("name", NOT_BUILT)
def test_models_that_cannot_be_built_still_cannot(name: str) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"mlx_lm.models.{name}")


def test_the_draft_may_be_of_another_family() -> None:
    target = build("gemma3_text", {})
    rows = decode(target, tiny_llama(1, vocabulary=V), asked(), k=3, vocabulary=V)
    assert [row.output for row in rows] == [by_mlx_lm(target, prompt) for prompt in PROMPTS]


def test_quantised_weights_decode_as_mlx_lm_does() -> None:
    target = tiny_llama(0, hidden=64)
    draft = noisy_copy(target, 1, 0.2)
    for model in (target, draft):
        nn.quantize(model, group_size=32, bits=4)
        assert isinstance(model.layers[0].self_attn.q_proj, nn.QuantizedLinear)
        start(model)
    rows = decode(target, draft, asked(), k=3, vocabulary=V)
    assert [row.output for row in rows] == [by_mlx_lm(target, prompt) for prompt in PROMPTS]
    assert any(round.accepted for row in rows for round in row.rounds)
