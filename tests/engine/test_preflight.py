"""The start-up check: models with rounding differences are served, models with structural faults are refused."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from service.core import PairError
from service.engine.kv.layer import RowLayer
from service.engine.kv.paged_layer import PagedLayer
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.preflight import FACTOR, check_rows, largest_difference
from service.engine.strategy import CPU, CUDA, Strategy, using
from tests.support.families import IDENTICAL, RECURRENT, build
from tests.support.faults import KINDS, Fault, plant
from tests.support.oracle import tiny_llama
from tests.support.rounding import shape_dependent

HALF = {"bfloat16": mx.bfloat16, "float16": mx.float16}
Rounded = Callable[[Any], Any]
ROUNDED: dict[str, Rounded] = {"same bits in any shape": lambda model: model, "shapes round apart": shape_dependent}
"""A CPU gives half precision the same bits in calls of any shape; on an accelerator they differ."""

DENSE = ("llama", "gemma3_text", "qwen3", "olmo2", "gpt_neox", "cohere2", "phi3", "starcoder2", "minicpm3", "lfm2")
"""At least one of each kind of cache and attention with half-precision kernels on a CPU (no experts)."""

FAULTS = [Fault(kind, layer, row) for kind in KINDS for layer, row in ((None, None), (None, 1), (0, 2))][:20]
"""In all layers and all rows, in all layers of one row, in one layer of another."""


@cache
def model(name: str, dtype: str, rounded: str) -> Any:
    made = tiny_llama(1, layers=12, hidden=64) if name == "deep" else build(name, (IDENTICAL | RECURRENT)[name])
    made.set_dtype(HALF[dtype])
    return ROUNDED[rounded](made)


def refused(model: Any, fault: Fault) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        plant(fault, patch)
        try:
            check_rows(model, "target")
        except PairError as error:
            reason = str(error)
        else:
            return False
    assert "gives other results in a batch than alone" in reason
    return True


def test_half_precision_is_served() -> None:
    """Rounding that grows through 32 layers; a fixed tolerance relative to the logits' range refused it once."""
    made = tiny_llama(0, layers=32)
    made.set_dtype(mx.bfloat16)
    found = largest_difference(shape_dependent(made), "target")
    assert found is not None and found.rounding > 0.01, "shapes that round alike prove nothing"
    assert found.gap <= FACTOR * found.rounding


@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_healthy_models_are_served(name: str, dtype: str, rounded: str) -> None:
    check_rows(model(name, dtype, rounded), "target")


def test_healthy_models_are_served_where_rows_are_in_pages() -> None:
    with using(CUDA):
        check_rows(tiny_llama(0), "target")


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [pytest.param(fault, tuple(HALF)[i % 2], id=fault.kind) for i, fault in enumerate(FAULTS[::3])],
)
def test_structural_faults_are_refused(dtype: str, fault: Fault) -> None:
    assert refused(model("llama", dtype, "shapes round apart"), fault)


@pytest.mark.parametrize("fault", FAULTS[::4], ids=lambda fault: fault.kind)
def test_structural_faults_are_refused_where_rows_are_in_pages(fault: Fault) -> None:
    with using(CUDA):
        assert refused(model("llama", "bfloat16", "shapes round apart"), fault)


@pytest.mark.parametrize(("kind", "strategy"), [(RectangleLayer, CPU), (PagedLayer, CUDA)], ids=["CPU", "CUDA"])
def test_a_row_that_turns_nan_is_refused(kind: type[RowLayer], strategy: Strategy) -> None:
    update = kind.update_and_fetch

    def broken(layer: RowLayer, keys: mx.array, values: mx.array) -> Any:
        if len(layer.lengths.host) > 1:
            values = mx.where(mx.arange(values.shape[0])[:, None, None, None] == 1, mx.nan, values)
        return update(layer, keys, values)

    with using(strategy), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "update_and_fetch", broken)
        with pytest.raises(PairError, match=r"gives other results in a batch than alone \(row 1"):
            check_rows(model("llama", "bfloat16", "same bits in any shape"), "target")


def healthy() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Fifty families and Llamas of several widths, depths and seeds, with this machine's and with shape-dependent rounding."""
    for rounded, change in ROUNDED.items():
        for name in DENSE:
            for dtype in HALF:
                yield f"{name}, {dtype}, {rounded}", lambda n=name, d=dtype, r=rounded: model(n, d, r)
        for layers, hidden, dtype in (
            (2, 32, "bfloat16"),
            (8, 64, "float16"),
            (32, 64, "bfloat16"),
            (32, 128, "bfloat16"),
            (48, 64, "float16"),
        ):

            def made(layers: int = layers, hidden: int = hidden, dtype: str = dtype, change: Rounded = change) -> Any:
                llama = tiny_llama(layers + hidden, layers=layers, hidden=hidden, vocabulary=211)
                llama.set_dtype(HALF[dtype])
                return change(llama)

            yield f"{layers} layers of {hidden}, {dtype}, {rounded}", made


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_fifty_healthy_models_of_fifty_are_served() -> None:
    cases = list(healthy())
    assert len(cases) == 50
    worst: dict[str, float] = {}
    for name, make in cases:
        check_rows(make(), "target")
        found = largest_difference(make(), "target")
        worst[name] = found.ratio if found is not None else 0.0
    print("largest ratios:", sorted(worst.items(), key=lambda item: -item[1])[:5])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama", "deep"])
@pytest.mark.parametrize("dtype", HALF)
def test_twenty_faults_of_twenty_are_refused(dtype: str, name: str) -> None:
    assert len(FAULTS) == 20
    assert [fault for fault in FAULTS if not refused(model(name, dtype, "shapes round apart"), fault)] == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", HALF)
def test_the_bundled_models_are_served_in_half_precision(dtype: str) -> None:
    from service.cli.models import model_folders
    from service.models.pair import load_pair
    from service.settings import Settings

    folders = model_folders(Settings())
    pair = load_pair(folders.target, folders.draft)
    assert pair.draft is not None
    for loaded in (pair.target, pair.draft):
        loaded.model.set_dtype(HALF[dtype])
        check_rows(loaded.model, "target")
