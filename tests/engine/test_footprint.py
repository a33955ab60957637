"""The memory that a pair is expected to take, from shapes alone, against what it takes."""

import subprocess
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Prompt, Sampling, python_command
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.footprint import row_bytes
from service.engine.request import Request
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
