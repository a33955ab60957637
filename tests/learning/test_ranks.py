"""Several processes that train one draft together over MLX's ring backend."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from service.cli import main
from service.learning.make.draft import Recipe, training_text
from service.learning.make.target_text import ANSWER, FORCED
from service.learning.ranks import Ranks
from service.learning.train import number
from service.models.pair import load_model
from tests.support.model_folders import save_model
from tests.support.oracle import tiny_llama

LENGTH, ROWS = 40, 4


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


IN_TURN = """
import json, sys
from service.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["redraft", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def command(out: Path, *words: str) -> list[str]:
    """The arguments of `redraft make-draft` for the target in the folder above `out`'s own."""
    target = out.parent.parent / "target"
    settings = ("--layers", "0,2", "--length", str(LENGTH), "--held-out", "2")
    return ["make-draft", "--target", str(target), "--out", str(out), *settings, *words]


def launch(folder: Path, ranks: int, script: str, *words: str) -> list[str]:
    """The script in several processes, as mlx.launch starts them. Returns the output of each."""
    folder.mkdir()
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    env = os.environ | {"REDRAFT_HOME": str(folder / "home"), "MLX_HOSTFILE": str(hosts)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words],
            env=env | {"MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [each.communicate(timeout=120)[0] for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait(30)
    assert [each.returncode for each in running] == [0] * ranks, outputs
    return outputs


def keep(path: Path, tokens: np.ndarray) -> None:
    """Texts in make-draft's format, whose tokens but the first are written ones."""
    role = np.full(tokens.shape, ANSWER, dtype=np.uint8)
    role[:, 0] = FORCED
    np.savez(path, tokens=tokens.astype(np.int32), role=role, temperature=np.zeros(len(tokens)))


def weights(draft: Path) -> dict[str, mx.array]:
    found = mx.load(str(draft / "model.safetensors"))
    assert isinstance(found, dict)
    return found


LEARN = ("--epochs", "12", "--vocabulary", "0", "--learning-rate", "1e-3")
WRITE = ("--tokens", str(4 * ROWS * LENGTH), "--rows", str(ROWS), "--epochs", "1", "--batch", str(ROWS))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and texts: of both processes, and of each."""
    root = tmp_path_factory.mktemp("ranks")
    save_model(tiny_llama(1, layers=3), root / "target")
    tokens = np.random.default_rng(0).integers(2, 97, (2 * ROWS, LENGTH))
    for name, texts in (("both", tokens), ("shared-0", tokens[:ROWS]), ("shared-1", tokens[ROWS:])):
        keep(root / f"{name}.npz", texts)
    return root


@pytest.fixture(scope="module")
def launched(root: Path) -> Callable[[str], list[str]]:
    """launched(kind) -> the output of two processes that learn from the shared texts into two-KIND/draft, and then write
    their own texts into KIND-0.npz and KIND-1.npz."""

    @cache
    def run(kind: str) -> list[str]:
        folder = root / f"two-{kind}"
        learn = ("--kind", kind, *LEARN, "--batch", str(ROWS), "--text", str(root / "shared.npz"))
        write = (*WRITE, "--text", str(root / f"{kind}.npz"))
        commands = command(folder / "draft", *learn), command(folder / "other", *write)
        return launch(folder, 2, IN_TURN, json.dumps(commands))

    return run


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "began"), [("layers", "0"), ("eagle", "2")])
def test_two_processes_train_like_one_on_all_texts(
    root: Path,
    launched: Callable[[str], list[str]],
    kind: str,
    began: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """began: the target layer from which the draft's first layer was copied."""
    outputs = launched(kind)
    here = root / f"one-{kind}"
    here.mkdir()
    words = ("--kind", kind, *LEARN, "--batch", str(2 * ROWS), "--text", str(root / "both.npz"))
    monkeypatch.setenv("REDRAFT_HOME", str(here / "home"))
    monkeypatch.setattr(sys, "argv", ["redraft", *command(here / "draft", *words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code

    one, two = weights(here / "draft"), weights(root / f"two-{kind}" / "draft")
    target = weights(root / "target")
    origins = {name: name.replace(".layers.0.", f".layers.{began}.") for name in one if ".layers.0." in name}
    moved = max(
        number(mx.abs(one[name] - target[origin]).max()) for name, origin in origins.items() if origin in target
    )
    apart = max(number(mx.abs(one[name] - two[name]).max()) for name in one)
    assert moved > 5e-3
    assert apart < moved / 100
    # Only the first process measures and writes.
    assert "agrees with the target" in capsys.readouterr().out
    assert [each.count("agrees with the target") for each in outputs] == [2, 0]
    assert sorted(path.name for path in (root / f"two-{kind}").iterdir()) == ["draft", "hosts.json", "other"]


def assert_own(shares: list[np.ndarray]) -> None:
    assert [share.shape for share in shares] == [(2 * ROWS, LENGTH)] * 2
    rows = {tuple(row) for share in shares for row in share.tolist()}
    assert len(rows) == 4 * ROWS


@pytest.mark.nightly
def test_each_process_writes_its_own_texts(root: Path, launched: Callable[[str], list[str]]) -> None:
    launched("layers")
    assert_own([np.load(root / f"layers-{rank}.npz")["tokens"] for rank in range(2)])


def test_each_rank_writes_its_own_texts(root: Path) -> None:
    recipe = Recipe(layers=(0, 2), tokens=4 * ROWS * LENGTH, length=LENGTH, rows=ROWS)
    target = load_model(root / "target")
    for rank in range(2):
        training_text(target, recipe, root / "here.npz", Ranks(rank, 2), lambda stage, done, of, note: None)
    assert_own([np.load(root / f"here-{rank}.npz")["tokens"] for rank in range(2)])


JOINED = """
import mlx.core as mx
from service.learning.ranks import Ranks
ranks = Ranks.join()
mean, gradients = ranks.mean(mx.array(1.0 + ranks.index), {"weight": mx.full((3,), 4.0 * ranks.index)})
print(ranks.index, ranks.count, ranks.gather(7 + ranks.index), mean.item(), gradients["weight"].tolist())
"""


def test_processes_gather_and_average(tmp_path: Path) -> None:
    outputs = launch(tmp_path / "ring", 2, JOINED)
    assert outputs == [f"{rank} 2 [7, 8] 1.5 [2.0, 2.0, 2.0]\n" for rank in range(2)]


def test_a_single_process_sends_nothing() -> None:
    alone = Ranks.join()
    gradients = {"weight": mx.ones(3)}
    assert (alone.index, alone.count, alone.first) == (0, 1, True)
    assert alone.gather(7) == [7]
    assert alone.mean(mx.array(1.0), gradients)[1] is gradients
