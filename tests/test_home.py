"""The default home folder, and that of an earlier install."""

from pathlib import Path

import pytest

from service.app import start_notices
from service.settings import Settings, default_home, earlier_home, load_settings


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user without any state."""
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_new_install_keeps_its_state_in_the_data_folder(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_home() in (
        user / ".local" / "share" / "redraft",
        user / "Library" / "Application Support" / "redraft",
    )
    assert Settings().database_url.endswith("redraft.db")
    assert "earlier" not in start_notices(Settings())[0]
    monkeypatch.setenv("REDRAFT_HOME", str(user / "elsewhere"))
    assert Settings().home == user / "elsewhere"


def test_a_tilde_is_the_user_s_folder_in_every_path(
    user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REDRAFT_HOME", raising=False)
    file = tmp_path / "settings.toml"
    file.write_text('home = "~/all"\n[store]\nadapters = "~/adapters"\n[engine]\nprefix_cache_dir = "~/prefixes"\n')
    settings = load_settings(file)
    assert (settings.home, settings.adapters_dir) == (user / "all", user / "adapters")
    assert settings.engine.prefix_cache_dir == user / "prefixes"
    monkeypatch.setenv("REDRAFT_HOME", "~/mine")
    assert Settings().home == user / "mine"


def test_an_earlier_home_stays_where_it_is_and_is_named(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = user / ".cache" / "redraft"
    assert earlier_home() == earlier
    earlier.mkdir(parents=True)
    assert Settings().home == earlier
    assert start_notices(Settings())[0].startswith(f"home: {earlier} (from an earlier install")
    monkeypatch.setenv("REDRAFT_HOME", str(user / "elsewhere"))
    assert Settings().home == user / "elsewhere"
    monkeypatch.delenv("REDRAFT_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(user / "cache"))
    assert default_home() != earlier


def test_store_settings_win_over_the_home(user: Path) -> None:
    settings = load_settings(flags={"store.url": f"sqlite:///{user}/here.db", "store.adapters": str(user / "there")})
    assert settings.database_url == f"sqlite:///{user}/here.db"
    assert settings.adapters_dir == user / "there"
    notices = start_notices(settings)
    assert f"in {user}/here.db; adapters in {user}/there" in notices[1]
    assert "store.record = false" in notices[2]
    silent = load_settings(flags={"store.record": False, "training.enabled": False})
    assert start_notices(silent)[1:] == ["recorded: nothing (store.record is false)"]
    for record in ("true", "false"):
        flags = {"engine.prefix_cache_dir": "kept", "store.record": record, "training.enabled": "false"}
        assert any(
            "tokens of prompts and answers, in kept" in each for each in start_notices(load_settings(None, flags))
        )


def test_a_password_in_the_database_s_url_is_not_shown(user: Path) -> None:
    settings = load_settings(flags={"store.url": "postgresql+psycopg://me:secret@db.example/redraft"})
    assert "secret" not in " ".join(start_notices(settings))
