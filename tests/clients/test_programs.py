"""Frameworks and programs that people use, at night: `just clients --all`."""

import shutil

import pytest

from tests.clients.__main__ import FRAMEWORKS, NPM, environments, main


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_frameworks_get_through_their_scripts() -> None:
    assert main(list(environments(FRAMEWORKS))) == 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(shutil.which("npm") is None, reason="no Node.js on this machine (Debian: apt install nodejs npm)")
def test_codex_claude_code_and_the_libraries_for_node_get_through_their_scripts() -> None:
    assert main(list(environments(NPM))) == 0
