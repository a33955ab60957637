"""Processes that make one draft together: real ones, over MLX's ring."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from service.learning.ranks import Ranks
from service.learning.trainer import number
from service.learning.writing import ANSWER, FORCED
from tests.support.model_folders import save_model
from tests.support.oracle import tiny_llama

LENGTH, ROWS = 40, 4


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def make(folder: Path, ranks: int, *words: str) -> list[str]:
    """`redraft make-draft` in so many processes; what each said. Its draft is in folder/draft."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "service.cli", "make-draft", "--target", str(folder.parent / "target")]
    command += ["--out", str(folder / "draft"), "--layers", "0,2", "--length", str(LENGTH), "--held-out", "2", *words]
    alone = os.environ | {"REDRAFT_HOME": str(folder / "home")}
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    launched = alone | {"MLX_HOSTFILE": str(hosts)}
    running = [
        subprocess.Popen(
            command,
            env=alone if ranks == 1 else launched | {"MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [each.communicate(timeout=60)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * ranks, said
    return said


def keep(path: Path, tokens: np.ndarray) -> None:
    """Texts as make-draft keeps them, all but their first token written."""
    role = np.full(tokens.shape, ANSWER, dtype=np.uint8)
    role[:, 0] = FORCED
    np.savez(path, tokens=tokens.astype(np.int32), role=role, temperature=np.zeros(len(tokens)))


def weights(draft: Path) -> dict[str, mx.array]:
    found = mx.load(str(draft / "model.safetensors"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("kind", "began"), [("layers", "0"), pytest.param("eagle", "2", marks=pytest.mark.nightly)])
def test_two_processes_learn_what_one_learns_from_both_their_texts(tmp_path: Path, kind: str, began: str) -> None:
    """began: the target's layer that the draft's first one was taken from."""
    save_model(tiny_llama(1, layers=3), tmp_path / "target")
    tokens = np.random.default_rng(0).integers(2, 97, (2 * ROWS, LENGTH))
    for name, texts in (("both", tokens), ("shared-0", tokens[:ROWS]), ("shared-1", tokens[ROWS:])):
        keep(tmp_path / f"{name}.npz", texts)
    words = ("--kind", kind, "--epochs", "12", "--vocabulary", "0", "--learning-rate", "1e-3")
    alone = make(tmp_path / "one", 1, *words, "--batch", str(2 * ROWS), "--text", str(tmp_path / "both.npz"))
    said = make(tmp_path / "two", 2, *words, "--batch", str(ROWS), "--text", str(tmp_path / "shared.npz"))

    one, two = weights(tmp_path / "one" / "draft"), weights(tmp_path / "two" / "draft")
    target = weights(tmp_path / "target")
    origins = {name: name.replace(".layers.0.", f".layers.{began}.") for name in one if ".layers.0." in name}
    moved = max(
        number(mx.abs(one[name] - target[origin]).max()) for name, origin in origins.items() if origin in target
    )
    apart = max(number(mx.abs(one[name] - two[name]).max()) for name in one)
    assert moved > 5e-3
    assert apart < moved / 100
    # The first alone measures and writes.
    assert "agrees with the target" in alone[0]
    assert ["agrees with the target" in each for each in said] == [True, False]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["draft", "hosts.json"]


def test_each_process_writes_its_own_share(tmp_path: Path) -> None:
    save_model(tiny_llama(1, layers=3), tmp_path / "target")
    words = ("--tokens", str(4 * ROWS * LENGTH), "--rows", str(ROWS), "--epochs", "1", "--batch", str(ROWS))
    make(tmp_path / "two", 2, *words, "--text", str(tmp_path / "text.npz"))
    shares = [np.load(tmp_path / f"text-{rank}.npz")["tokens"] for rank in range(2)]
    assert [share.shape for share in shares] == [(2 * ROWS, LENGTH)] * 2
    rows = {tuple(row) for share in shares for row in share.tolist()}
    assert len(rows) == 4 * ROWS


def test_a_process_of_its_own_sends_nothing() -> None:
    alone = Ranks.join()
    gradients = {"weight": mx.ones(3)}
    assert (alone.index, alone.count, alone.first) == (0, 1, True)
    assert alone.gather(7) == [7]
    assert alone.mean(mx.array(1.0), gradients)[1] is gradients
