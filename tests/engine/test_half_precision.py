"""In bfloat16 and float16 outputs are the target's own up to ties of rounding (see evaluation/ties.py)."""

import random
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from service.core import PairError, Prompt, Sampling
from service.engine.preflight import check_rows
from service.evaluation.ties import RATE, Text, TieReport, measure_ties
from tests.support.engine_text import generate
from tests.support.families import IDENTICAL, RECURRENT, V, build, noisy_draft
from tests.support.faults import KINDS, Fault, plant
from tests.support.rounding import shape_dependent

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}
FAMILIES = ("llama", "gemma3_text", "lfm2")
"""One for each kind of cache: full attention, sliding windows, recurrent states."""
K = 3


def asked(count: int, tokens: int, seed: int = 0) -> list[Prompt]:
    """Prompts of different lengths: greedy, seeded, and seeded with filters in turn; some repeat themselves."""
    rng, made = random.Random(seed), list[Prompt]()
    for i in range(count):
        drawn: dict[str, Any] = {"temperature": rng.choice([0.7, 1.0]), "seed": rng.randrange(2**62)} if i % 3 else {}
        filters: dict[str, Any] = rng.choice([{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}]) if i % 3 == 2 else {}
        piece = tuple(rng.randrange(4, V) for _ in range(rng.choice([1, 4, 25])))
        made.append(Prompt(piece * rng.choice([1, 3]), Sampling(max_tokens=tokens, **drawn, **filters)))
    return made


@cache
def pair(name: str, dtype: str) -> tuple[Any, Any]:
    """A target and a draft whose rounding depends on the shape of the call, as on an accelerator."""
    target = build(name, (IDENTICAL | RECURRENT)[name])
    draft = noisy_draft(name, (IDENTICAL | RECURRENT)[name], target)
    for model in (target, draft):
        model.set_dtype(HALF[dtype])
        shape_dependent(model)
    return target, draft


def texts(name: str, dtype: str, *, count: int, tokens: int, lookup: bool = False, plain: bool = True) -> list[Text]:
    """Outputs without a draft, with a draft, and with look-ups, in ragged batches."""
    target, draft = pair(name, dtype)
    prompts = asked(count, tokens)
    made = generate(target, draft, prompts, vocabulary=V, k=K, rows=4)
    if plain:
        made += generate(target, None, prompts, vocabulary=V, k=0, rows=4)
    if lookup:
        made += generate(target, draft, prompts, vocabulary=V, k=K, rows=3, lookup=4)
    return made


def report(name: str, dtype: str, made: list[Text]) -> TieReport:
    return measure_ties(pair(name, dtype)[0], made, k=K)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "bfloat16"),
        pytest.param("llama", "float16", marks=pytest.mark.nightly),
        ("gemma3_text", "bfloat16"),
        ("lfm2", "float16"),
    ],
)
@pytest.mark.promise(1)
def test_all_differences_are_ties_and_no_more_than_the_target_s_own(name: str, dtype: str) -> None:
    """Each kind of cache in one precision; the nightly tests run all of them in both, with more tokens."""
    found = report(name, dtype, texts(name, dtype, count=4, tokens=20, lookup=name == "llama"))
    assert found.rounding > 0.0, "shapes that round alike prove nothing"
    assert found.lossless(), found


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("position one on", "bfloat16"),
        ("stale key", "float16"),
        pytest.param("mask hides the token before", "bfloat16", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.promise(1)
def test_planted_faults_are_no_ties(kind: str, dtype: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(Fault(kind, None, None), patch)
        made = texts("llama", dtype, count=6, tokens=24, plain=False)
    found = report("llama", dtype, made)
    assert found.differences > 0, "by their number alone, faults would pass as rounding"
    assert not found.lossless()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.promise(1)
def test_the_rate_of_ties_over_thousands_of_tokens(dtype: str) -> None:
    found = [report(name, dtype, texts(name, dtype, count=40, tokens=64, lookup=True)) for name in FAMILIES]
    assert [each for each in found if each.differences] == []
    assert sum(each.ties for each in found) <= RATE * sum(each.own_ties for each in found), found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", IDENTICAL | RECURRENT)
def test_every_family_is_lossless_up_to_ties(name: str, dtype: str) -> None:
    try:
        check_rows(pair(name, dtype)[0], "target")
    except PairError as error:
        if "does not run on this device" in str(error):
            pytest.skip("no kernels for experts in half precision on a CPU")
        raise
    found = report(name, dtype, texts(name, dtype, count=6, tokens=32))
    assert found.lossless(), found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF)
def test_every_planted_fault_is_no_tie(dtype: str, kind: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(Fault(kind, None, None), patch)
        made = texts("llama", dtype, count=12, tokens=32)
    assert not report("llama", dtype, made).lossless()
