"""Chromium, and an environment with Playwright, for tests of the page."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "page"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SECONDS = 600
"""Of making the environment, and of a script in it."""


def make_environment(folder: Path) -> Path:
    """The Python of a new environment with what tests/page/requirements.txt names."""
    uv = shutil.which("uv")
    assert uv is not None, "uv is not installed"
    python = folder / "bin" / "python"
    install = [uv, "pip", "install", "-q", "--python", str(python), "-r", str(PAGE / "requirements.txt")]
    for command in ([uv, "venv", "-q", str(folder)], install):
        subprocess.run(command, check=True, timeout=SECONDS)
    return python
