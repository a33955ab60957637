"""Files and folders for this user alone: they hold recorded text."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def private_folder(path: Path) -> None:
    """Create a folder, and what is missing above it, for this user alone (0700). One that exists is left as it is."""
    if not path.exists():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_private(*paths: Path) -> None:
    """Take group's and others' permissions from those files and folders that exist: older releases wrote by the umask."""
    for path in paths:
        try:
            mode = path.stat().st_mode
            if mode & 0o077:
                path.chmod(mode & 0o700)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("others may read %s, which holds recorded text: %s", path, error.strerror or error)
