"""Files and folders private to this user, because they hold recorded text."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def private_folder(path: Path) -> None:
    """Creates a folder and its missing parents, private to this user (0700). An existing folder is left unchanged."""
    if not path.exists():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_private(*paths: Path) -> None:
    """Removes permissions of group and others from existing files and folders: older releases used the umask."""
    for path in paths:
        try:
            mode = path.stat().st_mode
            if mode & 0o077:
                path.chmod(mode & 0o700)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("other users may read %s, which holds recorded text: %s", path, error.strerror or error)
