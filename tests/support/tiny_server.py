"""A real server on a tiny random pair, for tests that need the whole application: in a process of its own, or in this one."""

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from service.connections import web_config
from service.core import BARE_DRAFT, AdapterRef, RunState, Selection, Trigger
from service.evaluation.prompts import PromptLine
from service.evaluation.server_process import LocalServer
from service.learning import lora
from service.models.pair import load_model, load_pair
from service.server import FATAL_EXIT, Application, Server
from service.settings import load_settings
from service.store.artifacts import publish
from service.store.database import upgrade
from service.store.stores import open_stores
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.store_rows import generation, url_of
from tests.support.typed import leaves

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }} {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def write_pair(root: Path) -> tuple[Path, Path]:
    """Target and draft folders with one byte-level tokenizer."""
    alphabet = ["</s>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    target = tiny_llama(0, vocabulary=len(alphabet))
    folders: list[Path] = []
    for name, model in (("target", target), ("draft", noisy_copy(target, 1, 0.3))):
        folder = root / name
        folder.mkdir(parents=True)
        tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("</s>", "<s>")])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
        args = model.args
        config = {name: getattr(args, name) for name in ("model_type", "hidden_size", "num_hidden_layers")}
        config |= {name: getattr(args, name) for name in ("intermediate_size", "num_attention_heads", "vocab_size")}
        config |= {name: getattr(args, name) for name in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")}
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
        mx.save_safetensors(str(folder / "model.safetensors"), dict(leaves(model.parameters())))
        folders.append(folder)
    return folders[0], folders[1]


def settings_of(pair: tuple[Path, Path], **sections: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """A tiny server's settings, with `sections` added."""
    tree: dict[str, dict[str, object]] = {
        "models": {"target": str(pair[0]), "draft": str(pair[1])},
        "engine": {"max_rows": 8, "prefill_chunk": 32, "adaptive": False},
        "training": {"tick_seconds": 0.2, "enabled": False, "niceness": 0, "epochs": 2, "rank": 4},
        "gate": {"min_prompts": 2, "min_tokens": 20},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return tree


def tiny_server(root: Path, pair: tuple[Path, Path], **sections: Mapping[str, object]) -> LocalServer:
    return LocalServer(root / "state", settings_of(pair, **sections), root / "home")


class InProcessServer(LocalServer):
    """The same server on threads of this process, which saves the seconds that the imports of a new process take.

    Not for tests of a process: of its output, exit status, signals, or the BLAS threads that it gives to a child.
    """

    _application: Application | None = None

    def start(self) -> None:
        """Returns when it is ready. Raises the error if it cannot serve."""
        self._client = httpx.Client(base_url=self.url, trust_env=False, timeout=60.0)
        self._fatal: list[str] = []
        self._application = application = Application(load_settings(self.config), on_fatal=self._fatal.append)
        web = application.settings.server
        config = web_config(
            application, idle_seconds=web.idle_seconds, arrival_seconds=web.arrival_seconds, port=self.port
        )
        self._web = Server(config, on_listening=lambda: None, drain=application.drain)
        self._thread = threading.Thread(target=self._web.run, daemon=True)
        self._thread.start()
        end = time.monotonic() + 60.0
        while not self._web.started:
            assert self._thread.is_alive() and time.monotonic() < end, "it does not listen"
            time.sleep(0.01)
        application.start()
        if application.token is not None:
            # `request` speaks for the user who runs the server.
            self._client.headers["authorization"] = f"Bearer {application.token}"

    @property
    def owned(self) -> dict[str, str]:
        """Headers of the user who runs the server, as long as there is no key."""
        assert self._application is not None and self._application.token is not None
        return {"authorization": f"Bearer {self._application.token}"}

    def terminate(self) -> None:
        """Do what the signal handler does; returns at once."""
        self._web.should_exit = True

    def stop(self) -> int | None:
        """Shut down in order. Returns the exit status that a process would have."""
        application, self._application = self._application, None
        if self._client is not None:
            self._client.close()
        if application is None:
            return None
        try:
            self.terminate()
            self._thread.join(60.0)
        finally:
            application.stop()
        return FATAL_EXIT if self._fatal or self._thread.is_alive() else 0


def in_process_server(root: Path, pair: tuple[Path, Path], **sections: Mapping[str, object]) -> InProcessServer:
    server = InProcessServer(root / "state", settings_of(pair, **sections), root / "home")
    database = server.folder / "redraft.db"
    if not database.exists():
        database.write_bytes(migrated())
    return server


@cache
def migrated() -> bytes:
    """A database without rows: each server would migrate its own for 0.2 s."""
    with tempfile.TemporaryDirectory() as folder:
        upgrade(url_of(Path(folder) / "empty.db"))
        return (Path(folder) / "empty.db").read_bytes()


def prompts(count: int, seed: int = 0) -> Iterator[PromptLine]:
    rng = random.Random(seed)
    for i in range(count):
        yield PromptLine(str(i), "letters", "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(4, 40))) + "x")


def generate(server: LocalServer, text: str, **body: object) -> dict[str, Any]:
    asked = {"prompt": text, "max_tokens": 16, "return_tokens": True, **body}
    answer = server.request("POST", "/generate", asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def register_adapters(server: LocalServer, pair: tuple[Path, Path], count: int) -> list[AdapterRef]:
    """Write adapters with random weights to the database of a server that is not running. The last one is active and the
    others are retired, so all of them can be activated."""
    who = load_pair(*pair).provenance
    stores = open_stores(load_settings(server.config), create=True)
    made: list[AdapterRef] = []
    # A run cannot be claimed without a case.
    stores.generations.add([generation(who=who)]).result(60)
    run = stores.runs.claim(trigger=Trigger.MANUAL, who=who, parent=BARE_DRAFT, limit=1)
    assert run is not None
    for i in range(count):
        model = load_model(pair[1]).model
        shape = lora.wrap(model, rank=4, scale=2.0, seed=i)
        mx.random.seed(i)
        noisy = [
            (name, 0.05 * mx.random.normal(a.shape))
            for name, a in leaves(model.trainable_parameters())
            if name.endswith("lora_b")
        ]
        model.load_weights(noisy, strict=False)
        final = stores.adapters.root / f"made-{i}"
        scratch = server.folder / f"made-{i}.part"
        lora.save(model, shape, scratch, draft=who.draft, target=who.target)
        digest = publish(scratch, final)
        ref = stores.adapters.add(
            run_id=run.id,
            fencing=run.fencing,
            folder=final,
            sha256=digest,
            rank=shape.rank,
            scale=shape.scale,
            keys=shape.keys,
            draft=who.draft,
            parent=BARE_DRAFT,
        )
        stores.adapters.activate(ref.id, who.target, who.draft)
        made.append(ref)
    stores.runs.move(run.id, run.fencing, RunState.ENDED)
    stores.lineage.erase(Selection(everything=True))
    stores.close()
    return made
