"""Folders and configurations of servers that measurements start."""

from pathlib import Path

import pytest

from service.core import BadRequest
from service.evaluation.server_process import LocalServer, engine_settings, require_unused
from service.settings import EngineSettings, load_settings


def test_what_a_server_left_does_not_pass_for_new(tmp_path: Path) -> None:
    require_unused(tmp_path / "none")
    require_unused(tmp_path)
    (tmp_path / "redraft.db").touch()
    with pytest.raises(BadRequest, match="has a database already"):
        require_unused(tmp_path)


def test_the_user_s_prefix_cache_is_left_alone(tmp_path: Path) -> None:
    engine = engine_settings(EngineSettings(prefix_cache_dir=tmp_path / "prefixes", max_rows=3))
    server = LocalServer(tmp_path / "server", {"engine": engine}, tmp_path / "home")
    made = load_settings(server.config).engine
    assert (made.prefix_cache_dir, made.max_rows) == (None, 3)
