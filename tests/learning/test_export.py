"""`redraft adapters export`: mlx-lm loads the result and computes the same as this engine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import yaml
from mlx_lm import load as load_with_mlx_lm
from mlx_lm.generate import speculative_generate_step

from service.cli import main
from service.core import BARE_DRAFT, AdapterRef, Prompt, Sampling, Selection, Trigger, Verdict
from service.engine.adapters import load
from service.learning import lora
from service.models.fingerprint import folder_sha256
from service.models.pair import load_model, load_pair
from service.settings import load_settings
from service.store.artifacts import publish
from service.store.registry.adapters import EvaluationKind
from service.store.stores import open_stores
from tests.support.batches import decode
from tests.support.eagle_models import tiny_head
from tests.support.hub_cache import cache_model
from tests.support.hub_server import Hub
from tests.support.logged_texts import VOCABULARY, served
from tests.support.model_folders import save_model
from tests.support.oracle import naive, tiny_llama
from tests.support.typed import leaves

PROBE = mx.array([[1, 5, 9, 2, 77, 30], [8, 8, 0, 96, 41, 12]])
PROMPT = [4, 19, 60, 33, 7]
K = 3


@dataclass(frozen=True)
class Installation:
    """A database with one adapter, the draft it belongs to, and the settings that name both."""

    root: Path
    config: Path
    draft: Path
    ref: AdapterRef

    def version(self) -> nn.Module:
        """The draft with its adapter, as the engine serves it."""
        base = load_model(self.draft)
        return load(base.model, self.ref, base.fingerprint).model


def write_draft(folder: Path, *, seed: int, bits: int | None) -> Path:
    model = tiny_llama(seed, hidden=64)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    save_model(model, folder)
    if bits is not None:
        config = json.loads((folder / "config.json").read_text())
        quantised = {"quantization": {"group_size": 32, "bits": bits}}
        (folder / "config.json").write_text(json.dumps(config | quantised))
    return folder


def build(root: Path, bits: int | None) -> Installation:
    target, draft = save_model(tiny_llama(1, hidden=64), root / "target"), write_draft(root / "d", seed=2, bits=bits)
    config = root / "settings.toml"
    lines = [f"home = {json.dumps(str(root / 'home'))}", "[models]"]
    lines += [f"target = {json.dumps(str(target))}", f"draft = {json.dumps(str(draft))}"]
    config.write_text("\n".join(lines) + "\n")
    pair = load_pair(target, draft)
    assert pair.draft is not None
    who, model = pair.provenance, pair.draft.model
    logged = served(pair.target.model, model, [Sampling(max_tokens=8)] * 12, k=2)

    shape = lora.wrap(model, rank=4, scale=2.0, seed=0)
    noise = [
        (name, 0.1 * mx.random.normal(array.shape, key=mx.random.key(i)))
        for i, (name, array) in enumerate(leaves(model.trainable_parameters()))
    ]
    model.load_weights(noise, strict=False)
    lora.save(model, shape, root / "made.part", draft=who.draft, target=who.target)
    digest = publish(root / "made.part", root / "home" / "adapters" / "made")

    stores = open_stores(load_settings(config), create=True)
    texts = [
        replace(g, id=f"g{i}", provenance=who, prompt=replace(g.prompt, first_user=f"question {i}"))
        for i, g in enumerate(logged)
    ]
    stores.generations.add(texts).result()
    run = stores.runs.claim(trigger=Trigger.MANUAL, who=who, parent=BARE_DRAFT, limit=100)
    assert run is not None
    ref = stores.adapters.add(
        run_id=run.id,
        fencing=run.fencing,
        folder=root / "home" / "adapters" / "made",
        sha256=digest,
        rank=shape.rank,
        scale=shape.scale,
        keys=shape.keys,
        draft=who.draft,
        parent=BARE_DRAFT,
    )
    stores.close()
    return Installation(root, config, draft, ref)


@pytest.fixture(scope="module")
def installations(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], Installation]:
    """installations(bits) -> one with a draft quantised so; each is built once."""
    return cache(lambda bits: build(tmp_path_factory.mktemp("installation"), bits))


@pytest.fixture(params=[None, 4], ids=["float", "four bits"])
def bits(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture
def installation(installations: Callable[[int | None], Installation], bits: int | None) -> Installation:
    """Shared by the tests, which must not change it."""
    return installations(bits)


@pytest.fixture
def plain_installation(
    installations: Callable[[int | None], Installation], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Tests may change it; it is restored afterwards."""
    installation = installations(None)
    saved = tmp_path_factory.mktemp("saved") / "installation"
    shutil.copytree(installation.root, saved)
    yield installation
    shutil.rmtree(installation.root)
    saved.rename(installation.root)


Export = Callable[..., tuple[int, str]]


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    """export(installation, folder, *flags, version=…) -> exit status and stderr."""

    def run(installation: Installation, folder: Path, *flags: str, version: int | None = None) -> tuple[int, str]:
        chosen = str(installation.ref.id if version is None else version)
        words = ["redraft", "adapters", "export", chosen, str(folder), "--config", str(installation.config), *flags]
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        if not ended.value.code:
            assert captured.out == f"adapter {chosen} written to {folder}\n"
        return int(ended.value.code or 0), captured.err

    return run


def loaded(folder: Path, adapter_path: str | None = None) -> nn.Module:
    return load_with_mlx_lm(str(folder), adapter_path=adapter_path)[0]


def distance(one: nn.Module, other: nn.Module) -> float:
    return float(np.abs(np.array(one(PROBE)) - np.array(other(PROBE))).mean())


def guessed(target: nn.Module, draft: nn.Module, tokens: int) -> tuple[list[int], list[bool]]:
    """mlx-lm's own speculative decoding: the output, and which of its tokens the draft proposed."""
    steps = speculative_generate_step(mx.array(PROMPT), target, draft, num_draft_tokens=K, max_tokens=tokens)
    out = [(int(token), bool(from_draft)) for token, _, from_draft in steps]
    return [token for token, _ in out], [from_draft for _, from_draft in out]


def ours(target: nn.Module, draft: nn.Module, tokens: int) -> list[bool]:
    sampling = Sampling(max_tokens=tokens)
    (row,) = decode(target, draft, [Prompt(tuple(PROMPT), sampling)], k=K, vocabulary=VOCABULARY)
    return [i < r.accepted for r in row.rounds for i in range(r.emitted)]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_mlx_lm_loads_the_adapter_and_computes_what_is_served(
    tmp_path: Path, installation: Installation, export: Export
) -> None:
    out = tmp_path / "new" / "adapter"
    assert export(installation, out) == (0, "")
    assert folder_sha256(out) == installation.ref.sha256
    theirs, served_here, bare = (
        loaded(installation.draft, adapter_path=str(out)),
        installation.version(),
        loaded(installation.draft),
    )
    assert np.allclose(np.array(theirs(PROBE)), np.array(served_here(PROBE)), atol=1e-4)
    assert distance(served_here, bare) > 0.1, "the adapter does something"


def test_mlx_lm_drafts_with_the_fused_model(
    tmp_path: Path, installation: Installation, export: Export, bits: int | None
) -> None:
    out = tmp_path / "new" / "fused"
    assert export(installation, out, "--fuse")[0] == 0
    fused, served_here, bare = loaded(out), installation.version(), loaded(installation.draft)
    names = {name for name, _ in leaves(fused.parameters())}
    assert names == {name for name, _ in leaves(bare.parameters())}, "a plain model, no LoRA layers"
    if bits is None:
        assert np.allclose(np.array(fused(PROBE)), np.array(served_here(PROBE)), atol=1e-4)
    else:
        # Folded layers are quantised again, so outputs are near those of the served draft, much nearer than the bare draft's.
        assert 0 < distance(fused, served_here) < 0.3 * distance(bare, served_here)
        assert any(isinstance(module, nn.QuantizedLinear) for _, module in fused.named_modules())

    # The target here is the draft with its adapter, so nearly all proposals of the fused model are accepted.
    text, with_adapter = guessed(served_here, fused, 48)
    assert text == naive(served_here, PROMPT, Sampling(max_tokens=48))
    assert with_adapter == ours(served_here, fused, 48), "mlx-lm accepts the same tokens as this engine"
    text_of_bare, without = guessed(served_here, bare, 48)
    assert text_of_bare == text
    assert sum(without) < sum(with_adapter) - 6
    if bits is None:
        assert sum(with_adapter) == 48 * K // (K + 1)


def test_the_fused_folder_can_be_served_as_a_draft_here(
    tmp_path: Path, installation: Installation, export: Export
) -> None:
    out = tmp_path / "fused"
    assert export(installation, out, "--fuse")[0] == 0
    pair = load_pair(installation.root / "target", out)
    assert pair.draft is not None
    assert pair.provenance.draft != installation.ref.draft, (
        "another draft: adapters of the bare one do not belong on it"
    )


@pytest.mark.parametrize("flags", [(), ("--fuse",)], ids=["adapter", "fused"])
class TestRefusals:
    """Refusals: one sentence, exit status 1, and no folder."""

    @pytest.mark.parametrize("version", [99, BARE_DRAFT])
    def test_unknown_versions(
        self, tmp_path: Path, plain_installation: Installation, export: Export, flags: tuple[str, ...], version: int
    ) -> None:
        assert export(plain_installation, tmp_path / "out", *flags, version=version) == (
            1,
            f"redraft: no adapter {version}\n",
        )
        assert not (tmp_path / "out").exists()

    def test_an_existing_folder_is_left_alone(
        self, tmp_path: Path, plain_installation: Installation, export: Export, flags: tuple[str, ...]
    ) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "adapters.safetensors").write_text("mine")
        status, err = export(plain_installation, tmp_path / "out", *flags)
        assert status == 1
        assert err == f"redraft: {tmp_path / 'out'} already exists\n"
        assert files(tmp_path / "out") == {"adapters.safetensors": b"mine"}

    def test_missing_files(
        self, tmp_path: Path, plain_installation: Installation, export: Export, flags: tuple[str, ...]
    ) -> None:
        for file in plain_installation.ref.folder.iterdir():
            file.unlink()
        plain_installation.ref.folder.rmdir()
        status, err = export(plain_installation, tmp_path / "out", *flags)
        assert status == 1
        assert err.startswith("redraft: adapter 1: ")
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_altered_files(
        self, tmp_path: Path, plain_installation: Installation, export: Export, flags: tuple[str, ...]
    ) -> None:
        file = plain_installation.ref.folder / "adapters.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 0x01  # a value, not the header
        file.write_bytes(content)
        status, err = export(plain_installation, tmp_path / "out", *flags)
        assert status == 1
        assert err.startswith("redraft: adapter 1: its files are ")
        assert not (tmp_path / "out").exists()

    def test_a_home_without_a_database(
        self, tmp_path: Path, plain_installation: Installation, export: Export, flags: tuple[str, ...]
    ) -> None:
        for file in (plain_installation.root / "home").glob("redraft.db*"):
            file.unlink()
        status, err = export(plain_installation, tmp_path / "out", *flags)
        assert status == 1
        assert err.startswith("redraft: ")
        assert err.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_fusing_needs_the_draft_that_was_trained(
    tmp_path: Path, plain_installation: Installation, export: Export
) -> None:
    other = write_draft(tmp_path / "other", seed=5, bits=None)
    text = plain_installation.config.read_text()
    for draft, message in ((str(other), "adapter 1: it was trained on another draft model"), ("none", "name no draft")):
        plain_installation.config.write_text(text.replace(json.dumps(str(plain_installation.draft)), json.dumps(draft)))
        status, err = export(plain_installation, tmp_path / "out", "--fuse")
        assert status == 1
        assert message in err
        assert not (tmp_path / "out").exists()


def test_a_head_is_not_exported_for_mlx_lm(tmp_path: Path, plain_installation: Installation, export: Export) -> None:
    head = save_model(tiny_head(tiny_llama(1, hidden=64), 2), tmp_path / "head")
    text = plain_installation.config.read_text()
    plain_installation.config.write_text(text.replace(json.dumps(str(plain_installation.draft)), json.dumps(str(head))))
    status, err = export(plain_installation, tmp_path / "out", "--fuse")
    assert status == 1
    assert "mlx-lm cannot draft with a head that reads hidden states" in err
    assert not (tmp_path / "out").exists()


IN_TURN = """
import contextlib, io, json, sys
from service.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv, status = ["redraft", *words], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
Push = Callable[..., list[tuple[int, str, str]]]


@pytest.fixture
def push(plain_installation: Installation, tmp_path: Path) -> Push:
    """push(address, words, ...) -> of each `redraft adapters push`, its status, output and errors. In a process of their own:
    the hub's library reads its address when it is imported."""

    def run(address: str, *commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
        found = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        config = ("--config", str(plain_installation.config))
        asked = json.dumps([("adapters", "push", *config, *words) for words in commands])
        command = [sys.executable, "-c", IN_TURN, asked]
        done = subprocess.run(command, env=os.environ | found, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    return run


def test_an_adapter_is_pushed_with_a_card_and_loads_from_there(
    plain_installation: Installation, push: Push, tmp_path: Path
) -> None:
    hub, ref = Hub(), plain_installation.ref
    stores = open_stores(load_settings(plain_installation.config))
    stores.adapters.record_evaluation(ref.id, EvaluationKind.GATE, Verdict(True, "better", 40, 4000, 0.1, 0.05, 0.15))
    learnt_from = stores.runs.texts(ref.run or 0)
    stores.close()
    with hub.served() as address:
        ((status, out, err),) = push(address, ("me/it", "--adapter", str(ref.id), "--base-model", "org/draft"))
    assert status == 0, err
    assert out == f"adapter {ref.id} is at {address}/me/it\n"
    (asked,) = hub.repositories
    assert (asked["organization"], asked["name"], asked["visibility"]) == ("me", "it", "private")
    assert sorted(hub.files) == ["README.md", "adapter_config.json", "adapters.safetensors"]
    head, text = hub.files["README.md"].decode().removeprefix("---\n").split("\n---\n", 1)
    card = yaml.safe_load(head)
    assert (card["base_model"], card["base_model_relation"], card["library_name"]) == ("org/draft", "adapter", "mlx")
    assert (
        "+10.0% tokens per second over the adapter or draft that served before (90 % interval +5.0% to +15.0%)" in text
    )
    assert learnt_from > 0 and f"on {learnt_from} recorded texts" in text and str(plain_installation.root) not in text
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    assert distance(loaded(plain_installation.draft, str(tmp_path)), plain_installation.version()) < 1e-5


def test_nothing_becomes_public_unasked_and_nothing_revoked_is_pushed(
    plain_installation: Installation, push: Push
) -> None:
    asked = ("me/it", "--adapter", "1", "--base-model", "org/draft")
    hub = Hub(public=True)
    with hub.served() as address:
        (unasked, _, reason), (status, _, err) = push(address, asked, (*asked, "--public"))
        assert unasked != 0 and "already exists and is public" in " ".join(reason.split())
        assert status == 0, err
        assert hub.commits == 1
        stores = open_stores(load_settings(plain_installation.config))
        stores.adapters.activate(1, plain_installation.ref.target or "", plain_installation.ref.draft)
        stores.lineage.erase(Selection(everything=True), retire_adapters=True)
        stores.close()
        ((status, _, err),) = push(address, (*asked, "--public"))
    assert status != 0 and "adapter 1 is revoked" in " ".join(err.split())
    assert hub.commits == 1


def test_the_card_names_no_draft_but_the_adapters_own(
    plain_installation: Installation, push: Push, tmp_path: Path
) -> None:
    cache, hub = tmp_path / "hf" / "hub", Hub()
    cache_model(cache, "org/other", write_draft(tmp_path / "other", seed=3, bits=None))
    cache_model(cache, "org/own", plain_installation.draft)
    settings = plain_installation.config.read_text()

    def asked(draft: str) -> tuple[str, ...]:
        config = tmp_path / f"{Path(draft).name}.toml"
        config.write_text(settings.replace(json.dumps(str(plain_installation.draft)), json.dumps(draft)))
        return "me/it", "--adapter", "1", "--config", str(config)

    with hub.served() as address:
        found = push(address, asked("org/absent"), asked("org/other"), asked("org/own"))
    absent, other, own = ((status, " ".join(err.split())) for status, _, err in found)
    assert absent[0] != 0 and "org/absent is not on this disk" in absent[1]
    assert other[0] != 0 and "adapter 1 was trained for another draft than org/other" in other[1]
    assert own[0] == 0, own
    assert len(hub.repositories) == hub.commits == 1, "nothing is made for those that are refused"
    assert yaml.safe_load(hub.files["README.md"].decode().split("---\n")[1])["base_model"] == "org/own"


def test_a_push_that_is_refused_says_why(push: Push) -> None:
    refused = {
        ("me/it", "--adapter", "1"): "has no name on the hub: give --base-model",
        ("me/it", "--base-model", "org/draft"): "no adapter is active",
        ("not a name", "--adapter", "1", "--base-model", "org/draft"): "is not a valid repository name",
        ("me/it", "--adapter", "1", "--base-model", "org/draft"): "the hub refused the upload",
    }
    with Hub(refusal=403).served() as address:
        found = push(address, *refused)
    for (status, _, err), reason in zip(found, refused.values(), strict=True):
        assert status != 0 and reason in " ".join(err.split())
        assert "Traceback" not in err
