"""Commands that delete ask first, say what goes, and refuse where nobody can be asked."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.cli import console
from service.core import Access, AdapterState, Trigger
from service.settings import load_settings
from service.store.stores import Stores, open_stores
from tests.support.command_line import Redraft, one_sentence
from tests.support.echo_engine import TOKEN, EchoServer
from tests.support.store_rows import ADAPTERS, WHO, case, generation, promote


@dataclass
class Log:
    """A database with three generations, of which one adapter learnt the first."""

    config: Path
    stores: Stores

    @property
    def generations(self) -> int:
        return self.stores.generations.stats().generations

    @property
    def open_keys(self) -> list[str]:
        return [key.name for key in self.stores.keys.all() if key.revoked_at is None]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    config = tmp_path / "settings.toml"
    config.write_text(f"home = '{tmp_path / 'home'}'\n[store]\nadapters = '{ADAPTERS}'\n")
    stores = open_stores(load_settings(config), create=True)
    stores.generations.add([generation(id="learnt", cases=[case(0)])]).result(60)
    run = stores.runs.claim(trigger=Trigger.MANUAL, who=WHO, parent=0, limit=9)
    assert run is not None
    promote(stores.runs, stores.adapters, run)
    stores.generations.add(
        [generation(id=f"other {i}", client="bob", tokens=(7, i), first_user=f"{i}") for i in range(2)]
    ).result(60)
    stores.keys.create("ada", Access.CLIENT)
    yield Log(config, stores)
    stores.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "at_terminal", lambda: True)


ERASURES = [
    (
        ("data", "erase", "--everything"),
        "delete 3 recorded generations with their failure cases (adapters that learnt them: 1)?",
    ),
    (("data", "erase", "--client", "bob"), "delete 2 recorded generations with their failure cases?"),
    (("data", "erase", "--keep", "1"), "delete 2 recorded generations with their failure cases, all but the newest 1?"),
    (
        ("data", "erase", "--id", "learnt", "--retire-adapters"),
        "delete 1 recorded generations with their failure cases (adapters that learnt them: 1), and retire every adapter",
    ),
    (("keys", "revoke", "ada"), "revoke the key of ada (client, made "),
]


@pytest.mark.parametrize(
    ("words", "question"), ERASURES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_without_a_terminal_nothing_goes_without_yes(
    words: tuple[str, ...], question: str, log: Log, redraft: Redraft
) -> None:
    done = redraft(*words, "--config", log.config, stdin="y\n")
    one_sentence(done)
    assert done.status == 1 and done.err.startswith(f"redraft: {question}"), done.err
    assert done.err.endswith("There is no terminal for a confirmation: pass --yes\n")
    assert (log.generations, log.open_keys) == (3, ["ada"])
    assert redraft(*words, "--yes", "--config", log.config).status == 0
    assert (log.generations, log.open_keys) != (3, ["ada"])


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize(
    ("words", "question"), ERASURES, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_at_a_terminal_it_is_asked(words: tuple[str, ...], question: str, log: Log, redraft: Redraft) -> None:
    for answer in ("n\n", "\n", ""):
        done = redraft(*words, "--config", log.config, stdin=answer)
        assert done.status == 1 and done.out.startswith(question) and "[y/N]: " in done.out
        assert (log.generations, log.open_keys) == (3, ["ada"])
    assert redraft(*words, "-y", "--config", log.config, stdin="").out.count("[y/N]") == 0
    assert (log.generations, log.open_keys) != (3, ["ada"])


def test_a_key_that_is_not_there_or_revoked_is_no_question(log: Log, redraft: Redraft) -> None:
    assert redraft("keys", "revoke", "nobody", "--config", log.config).err == "redraft: there is no key named nobody\n"
    for _ in range(2):
        assert redraft("keys", "revoke", "ada", "--yes", "--config", log.config).status == 0
    assert redraft("keys", "revoke", "ada", "--config", log.config).status == 0


def test_files_of_an_adapter_are_named_before_they_go(redraft: Redraft, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EchoServer()
    kept = next(ref for ref in server.operator.known if ref.state is not AdapterState.ACTIVE)
    with server.served() as url:
        refused = redraft("adapters", "remove", kept.id, "--url", url)
        one_sentence(refused)
        about = f"{kept.state}, of run {kept.run}, made {kept.created_at:%Y-%m-%d}"
        assert (
            refused.err.startswith(f"redraft: delete the files of adapter {kept.id} ({about}")
            and f"at {url}?" in refused.err
        )
        assert redraft("adapters", "remove", kept.id, "--yes", "--url", url).status == 0
        unknown = redraft("adapters", "remove", 99, "--url", url)
        one_sentence(unknown)
        assert "there is no adapter 99" in unknown.err


def test_another_machine_s_server_erases_its_own_log(
    log: Log, redraft: Redraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_API_KEY", TOKEN)
    server = EchoServer(allowed_hosts=("0.0.0.0",))
    with server.served() as served:
        # As another address than a loopback one, it counts as another machine.
        url = served.replace("127.0.0.1", "0.0.0.0")
        asked = ("data", "erase", "--client", "bob", "--url", url, "--config", log.config)
        refused = redraft(*asked)
        one_sentence(refused)
        assert refused.err.startswith(f"redraft: erase the recorded generations of client bob at {url}?")
        assert server.operator.erased == []
        done = redraft(*asked, "--yes", "--retire-adapters")
        assert done.out.startswith("2 generations deleted\n")
        ((selection, retired),) = server.operator.erased
        assert (selection.client, selection.ids, retired) == ("bob", None, True)
        everything = redraft("data", "erase", "--everything", "--url", url)
        assert everything.err.startswith(f"redraft: erase all that is recorded at {url}?")
        assert redraft("data", "erase", "--keep", "1", "--yes", "--url", url).status == 2
    assert log.generations == 3


def test_a_question_cannot_act_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "at_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    ask: Callable[[str, bool], None] = console.require_consent
    ask("erase \x1b[2J?", False)
    assert "\x1b" not in capsys.readouterr().out
