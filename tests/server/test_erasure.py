"""A canary: a text that a whole server was asked, and has wherever it keeps texts, is nowhere once it is erased."""

import json
import logging
import random
import re
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core import RunState
from service.engine.drafters.lookup import NGramIndex
from service.learning.make.target_text import TargetText
from service.learning.practice_text import Kind, Piece, PracticeText
from service.learning.targets import TargetCache
from service.store.log.generations import TRAIN, split_of
from tests.support.heap import holders
from tests.support.scraped import scraped
from tests.support.tiny_server import InProcessServer, in_process_server, write_pair
from tests.support.waiting import until

PRIVACY = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
ASK = """
import json, sys, urllib.request
method, url, body, headers = json.loads(sys.stdin.read())
headers |= {"content-type": "application/json"}
request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
print(urllib.request.urlopen(request).read().decode())
"""
"""Asked in a process of its own, which leaves nothing of a request in this one."""


def ask(server: InProcessServer, method: str, path: str, **body: object) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", ASK],
        input=json.dumps([method, server.url + path, body, server.owned]),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout)


class Canary:
    """A text that exists as long as somebody reads it here."""

    START, LENGTH = 30, 1100

    def __init__(self) -> None:
        self.seed = next(seed for seed in range(99) if split_of(self._text(seed)) == TRAIN)
        self.output: list[int] = []
        """Of the answer, each number inverted."""

    @property
    def text(self) -> str:
        """Longer than what the prefix cache keeps in files at least."""
        return self._text(self.seed)

    def _text(self, seed: int) -> str:
        """Of few letters, with an end of its own: no two tokens in a row at its end, or of a random answer, came before in the
        text itself, where they would be looked up."""
        rng = random.Random(seed)
        return "".join(rng.choice("abcdefgh") for _ in range(self.LENGTH)) + "ZY"

    def words(self) -> str:
        return self.text[: self.START]

    def tokens(self, encode: Callable[[str], tuple[int, ...]]) -> list[list[int]]:
        """Eight tokens of the prompt, and of the answer: as many as a look-up matches."""
        prompt, answer = list(encode(self.text)), [~token for token in self.output]
        return [prompt[300:308], answer[12:20]]


@contextmanager
def logged_to(path: Path) -> Generator[None]:
    """What the server would write into its log, and more."""
    root = logging.getLogger()
    handler, before = logging.FileHandler(path), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


@contextmanager
def locked(database: Path) -> Generator[None]:
    other = sqlite3.connect(database, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def looked_up(server: InProcessServer) -> float:
    """Tokens drafted by look-ups so far."""
    return scraped(server.request("GET", "/metrics").text)['redraft:source_num_draft_tokens_total{source="lookup"}']


def on_disk(root: Path, needles: list[bytes]) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    }


def ask_within_a_grammar(server: InProcessServer, canary: Canary, model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [canary.words()]}}, "required": ["a"]}
    ask(
        server,
        "POST",
        "/v1/chat/completions",
        model=model,
        messages=[{"role": "user", "content": "say it"}],
        user="mallory",
        stop=[canary.words()],
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}},
        },
        chat_template_kwargs={"note": canary.words()},
    )


def ask_in_parts(server: InProcessServer, canary: Canary) -> None:
    """A response that is continued, and a thread."""
    body: dict[str, Any] = {"max_output_tokens": 8, "user": "mallory"}
    first = ask(server, "POST", "/v1/responses", input=canary.words(), **body)["id"]
    ask(server, "POST", "/v1/responses", input="more", previous_response_id=first, **body)
    said = [{"role": "user", "content": f"{canary.words()}!"}]
    more: dict[str, Any] = {"thread": {"type": "create"}, "metadata": {"user_id": "mallory"}, "max_tokens": 8}
    ask(server, "POST", "/v1/messages", messages=said, **more)


def learn(server: InProcessServer, root: Path) -> list[int]:
    """A run of a real child over what was recorded, as if the draft had failed everywhere and the target's probabilities had
    not been logged: the child computes them, and keeps them in files. Its adapter."""
    with sqlite3.connect(root / "state" / "redraft.db") as connection:
        connection.execute("DELETE FROM generation_targets")
        connection.execute("UPDATE generations SET cases = 1")
    connection.close()
    run = ask(server, "POST", "/train")["id"]
    until(lambda: RunState(server.get(f"/train/{run}")["state"]).over)
    (adapter,) = server.get("/adapters")["adapters"]
    assert (adapter["run"], adapter["erased_texts"]) == (run, None)
    assert (root / "home" / "training.log").stat().st_size
    return [adapter["id"]]


def taught_by(client: str, root: Path) -> int:
    """Texts of this client that the run learnt from, the canary and the answer within a grammar among them."""
    query = "SELECT count(*) FROM run_texts JOIN generations USING (seq) WHERE client = ?"
    with sqlite3.connect(root / "state" / "redraft.db") as connection:
        (count,) = connection.execute(query, (client,)).fetchone()
    connection.close()
    assert count >= 2
    return count


def keep_targets(server: InProcessServer, root: Path) -> list[int]:
    """What a child leaves in files, without a child. No adapter."""
    application = server._application
    assert application is not None
    generations = application.stores.generations
    who = application._serving.provenance  # pyright: ignore[reportOptionalMemberAccess]
    for made in generations.by_ids(generations.names_after(who, 0, 9)):
        assert made.targets is not None
        TargetCache(root / "home" / "targets", who.target).store(made, made.targets)
        tokens = np.array([[*made.prompt.tokens, *made.output]], dtype=np.int32)
        text = TargetText(tokens, np.zeros(tokens.shape, dtype=np.uint8), np.zeros(1))
        PracticeText(root / "home" / "practice", who.target).save(Piece(1, Kind.LOG, text), 1, len(made.output))
    return []


@pytest.mark.parametrize(
    "learns", [keep_targets, pytest.param(learn, marks=pytest.mark.nightly)], ids=["without a child", "with a child"]
)
@pytest.mark.promise(30)
def test_an_erased_text_is_nowhere(tmp_path: Path, learns: Callable[[InProcessServer, Path], list[int]]) -> None:
    canary, root = Canary(), tmp_path / "server"
    server = in_process_server(
        root,
        write_pair(tmp_path / "models"),
        engine={"adaptive": True, "num_lookup_tokens": 8, "prefix_cache_dir": str(root / "prefixes"), "max_rows": 2},
        training={"replay": 0.0},
    )
    root.mkdir(exist_ok=True)
    with logged_to(root / "server.log"):
        server.start()
        try:
            check(server, canary, root, learns)
        finally:
            status = server.stop()
        assert status == 0
        # What was written at the end.
        assert on_disk(root, [canary.words().encode()]) == set()


def check(
    server: InProcessServer, canary: Canary, root: Path, learns: Callable[[InProcessServer, Path], list[int]]
) -> None:
    prefixes, application = root / "prefixes", server._application
    assert application is not None and application._serving is not None
    encode = application._serving.tokenizer.encode
    decoder = application.engine_thread._engine.decoder  # pyright: ignore[reportOptionalMemberAccess]

    def secrets() -> tuple[list[list[int]], list[str]]:
        return canary.tokens(encode), [canary.words()]

    def needles() -> list[bytes]:
        return [canary.words().encode(), *(array("I", each).tobytes() for each in canary.tokens(encode))]

    def found_by_look_up() -> bool:
        assert decoder.lookup is not None
        return decoder.lookup.find([~token for token in canary.output[:20]], NGramIndex()) is not None

    def the_same(client: str) -> dict[str, Any]:
        body = {"prompt": canary.text, "max_tokens": 24, "temperature": 1.0, "seed": 5, "chat_template": False}
        return ask(server, "POST", "/generate", client=client, return_tokens=True, **body)

    assert application._supervisor is not None
    described = re.findall(r"^\|.*\| `(\w+)` \|$", PRIVACY.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"rows", "child", *application._supervisor._eraser._forget} == set(described), (
        "docs/privacy.md names every place"
    )

    # The canary goes wherever a text can go.
    canary.output = [~token for token in the_same("mallory")["tokens"]]
    ask_within_a_grammar(server, canary, application.settings.models.target)
    ask_in_parts(server, canary)
    for number in range(4):
        ask(server, "POST", "/generate", prompt=f"question {number}", max_tokens=16, client="ada")
    until(lambda: application.stores.generations.stats().generations == 9)
    until(lambda: list(prefixes.iterdir()))
    adapters = learns(server, root)
    assert list((root / "home" / "targets").rglob("*.npz"))
    practised = "home/practice" in "\n".join(on_disk(root, needles()))
    assert practised or learns is not keep_targets
    held = "\n".join(holders(secrets))
    for where in ("prefix.Node", "prefix_files.File", "Lookup", "OrderedDict"):
        assert where in held, f"the test does not reach {where}"
    assert found_by_look_up()
    assert application.replies.size
    assert "state/redraft.db" in on_disk(root, needles()) or "state/redraft.db-wal" in on_disk(root, needles())

    taught = taught_by("mallory", root) if adapters else 0
    erased = ask(server, "DELETE", "/generations", client="mallory")
    assert erased == {"generations": 5, "adapters": adapters, "revoked": []}
    assert [each["erased_texts"] for each in server.get("/adapters")["adapters"]] == [taught for _ in adapters]
    assert application.replies.size == 0
    assert list(prefixes.iterdir()) == []
    assert [file for place in ("targets", "practice") for file in (root / "home" / place).rglob("*.npz")] == []
    assert not found_by_look_up()
    assert on_disk(root, needles()) == set()
    assert (root / "server.log").stat().st_size
    assert canary.words() not in server.request("GET", "/metrics").text
    assert holders(secrets) == []

    # Whoever asks the same afterwards gets nothing of it.
    before = looked_up(server)
    again = the_same("ada")
    assert [~token for token in again["tokens"]] == canary.output, "what a look-up would have proposed"
    assert again["timings"]["cache_n"] == 0
    assert looked_up(server) == before
    ask(server, "DELETE", "/generations", everything=True)

    # Nor does what could not be written yet come back, once it can.
    with ThreadPoolExecutor(1) as eraser:
        with locked(root / "state" / "redraft.db"):
            the_same("mallory")
            erasing = eraser.submit(ask, server, "DELETE", "/generations", client="mallory")
            time.sleep(0.5)
            assert not erasing.done()
        erasing.result(60)
    assert application.recorder.flush(10)
    assert application.stores.generations.stats().generations == 0
