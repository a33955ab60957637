"""The token of a home folder: while a server has no API key, it gives the folder's owner access to recorded text.

A server cannot distinguish requests of this machine's user from those passed on by a proxy or an SSH tunnel. The
ability to read a file that only its owner can read does.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from service.core import StoreError
from service.store.access.keys import PREFIX, SECRET_BYTES
from service.store.permissions import private_folder

FILE = "token"
_TOKEN = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{40,}}")
_READ_BYTES = 200


def read_token(home: Path) -> str | None:
    """The token of a home folder. None if it is missing, or if the file is not a plain file that belongs to this user
    and that no other user can read or write."""
    try:
        # Refuse a link to another file, and a pipe, which would block.
        descriptor = os.open(home / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None
        text = file.read(_READ_BYTES).decode("ascii", "replace").strip()
    return text if _TOKEN.fullmatch(text) else None


def make_token(home: Path) -> str:
    """The token of a home folder; creates one if `read_token` finds none. Servers that start at the same time get the
    same token. Raises StoreError if it cannot be written."""
    try:
        private_folder(home)
        folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            return read_token(home) or _write_token(home)
        finally:
            os.close(folder)
    except OSError as error:
        raise StoreError(f"{home / FILE} cannot be written: {error.strerror or error}") from error


def _write_token(home: Path) -> str:
    token = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    # Created with mode 0600 and renamed, so that the file is never readable for others or incomplete.
    descriptor, scratch = tempfile.mkstemp(prefix=f".{FILE}-", dir=home)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        os.replace(scratch, home / FILE)
    except BaseException:
        os.unlink(scratch)
        raise
    return token
