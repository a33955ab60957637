"""The memory that a pair is expected to take, from shapes alone, against what it takes."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Prompt, Sampling, python_command
from service.engine import device
from service.engine.activations import Activations
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.footprint import plan_memory, row_bytes
from service.engine.kv import budget, rectangles
from service.engine.kv.cache import RowCache
from service.engine.request import Request
from service.models.shapes import model_of
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.tiny_server import write_pair


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    target = tiny_llama(0) if kind == "model" else plain_llama(0)
    return target, noisy_copy(target, 1, 0.1) if kind == "model" else tiny_head(target, 1)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_position_takes_what_is_expected(kind: str) -> None:
    target, draft = pair(kind)
    expected = row_bytes(target, draft).first
    for length, positions in ((100, 128), (230, 256)):
        decoder = Decoder(target, bare(draft), vocabulary=97, k=2, key=mx.random.key(0))
        tokens = tuple(4 + i % 90 for i in range(length))
        decoder.admit(Request("0", Prompt(tokens, Sampling(max_tokens=8)), frozenset(), None))
        decoder.round()
        assert decoder.batch.drafter is not None
        caches = (decoder.batch.cache, decoder.batch.drafter.cache)
        assert sum(array.nbytes for cache in caches for array in cache.arrays()) == positions * expected
    assert row_bytes(target, None).first < expected


def llama(layers: int) -> nn.Module:
    """Random weights: 2 KiB of keys and values of a position in each layer."""
    sizes = {"hidden_size": 64, "num_hidden_layers": layers, "intermediate_size": 128, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    model = model_of({"model_type": "llama", **sizes, **heads, "tie_word_embeddings": True}, mx.float32)
    mx.eval(model.parameters())
    return model


def hybrid(layers: int) -> nn.Module:
    """Random weights: three of four layers have a state of 128 KiB."""
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "full_attention_interval": 4,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    }
    model = model_of({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}, mx.float32)
    mx.eval(model.parameters())
    return model


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="on an accelerator MLX allocates other memory too")
@pytest.mark.parametrize(
    ("kind", "rows", "length"),
    [
        pytest.param(llama, 1, 1500, marks=pytest.mark.nightly),
        (llama, 1, 600),
        (llama, 3, 500),
        pytest.param(hybrid, 1, 600, marks=pytest.mark.nightly),
        (hybrid, 3, 200),
    ],
)
def test_rows_in_rectangles_take_what_is_planned(
    kind: Callable[[int], nn.Module], rows: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, join, growth over several steps and rounds, measured as MLX's peak. Parts are small, so that they matter."""
    for module in (rectangles, budget):
        monkeypatch.setattr(module, "PART", 2**20)
    target, draft = kind(8), kind(4)
    plan = plan_memory(target, draft, 2**30, cache=0, kv_mb=0, prefix_mb=0, chunk=32, proposed=4)
    decoder = Decoder(target, bare(draft), vocabulary=512, k=4, key=mx.random.key(0), prefill_chunk=32)
    decoder.memory.limit(plan.budget)
    decoder.admit(_request("warm", 40, 4))
    while decoder.unfinished:
        decoder.round()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for number in range(rows):
        decoder.admit(_request(str(number), length, length // 4))
    while decoder.unfinished:
        decoder.preempt([])
        decoder.round()
    measured = mx.get_peak_memory() - before
    planned = plan.activations + plan.budget.bytes_of([length + length // 4] * rows)
    # A CPU computes one of the two chunks of a burst at a time.
    least = 0.6 if kind is llama else 0.4
    assert least * planned < measured <= 1.05 * planned, (measured / 2**20, planned / 2**20)


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="on an accelerator MLX allocates other memory too")
def test_recurrent_states_that_a_call_computes_one_after_another_are_planned() -> None:
    """All states of a layer are held until its output is computed from them."""
    model = hybrid(4)
    activations = Activations.of(model)
    assert activations.states == 8 * 64 * 64 * 4 and Activations.of(llama(4)).states == 0
    cache = RowCache(model, 1)
    for tokens in (64, 128):
        mx.eval(model(mx.zeros((1, 1), dtype=mx.int32), cache=cache.layers), cache.arrays())
        cache.commit(1)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        model(mx.ones((1, tokens), dtype=mx.int32), cache=cache.layers)
        mx.eval(cache.arrays())
        cache.commit(tokens)
        measured, planned = mx.get_peak_memory() - before, activations.peak_bytes(tokens)
        assert 0.8 * planned < measured <= 1.05 * planned, (tokens, measured / 2**20, planned / 2**20)


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="rows are in rectangles on a CPU")
def test_a_batch_grows_a_part_of_the_layers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is waited for between parts; a batch that is one part waits for nothing."""
    model = llama(4)
    for part, waits in ((1, 3), (2**40, 0)):
        monkeypatch.setattr(rectangles, "PART", part)
        cache = RowCache(model, 1)
        mx.eval(model(mx.zeros((1, 8), dtype=mx.int32), cache=cache.layers))
        cache.commit(8)
        with device.counting() as counts:
            cache.make_room(600)
        assert counts.waits == waits
        assert {array.shape[2] for array in cache.arrays()} == {640 if waits else 128}


def _request(name: str, length: int, answer: int) -> Request:
    tokens = tuple(4 + (7 * i + len(name)) % 500 for i in range(length))
    return Request(name, Prompt(tokens, Sampling(max_tokens=answer)), frozenset(), None)


SCRIPT = """
import sys
from pathlib import Path
from service.engine.footprint import weight_bytes
from service.models.pair import load_pair, unread_pair
import mlx.core as mx
folders = [Path(word) for word in sys.argv[1:]]
expected, before = weight_bytes(*unread_pair(*folders)), mx.get_active_memory()
loaded = load_pair(*folders)
print(expected, before, weight_bytes(loaded.target.model, loaded.draft.model), mx.get_active_memory() - before)
"""


@pytest.mark.skipif(mx.default_device().type != mx.cpu, reason="on an accelerator MLX allocates other memory too")
def test_weights_take_what_is_expected(tmp_path: Path) -> None:
    """Embeddings that both have count once. In a process of its own, where nothing else is allocated."""
    folders = [str(folder) for folder in write_pair(tmp_path)]
    done = subprocess.run(python_command("-c", SCRIPT, *folders), capture_output=True, check=True, text=True)
    expected, read, loaded, taken = map(int, done.stdout.split())
    assert loaded == expected and 0.95 * expected < taken < 1.1 * expected, done.stdout
    assert read < 0.75 * expected, "no more than embeddings"
