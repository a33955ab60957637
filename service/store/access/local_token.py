"""The token of a home folder: while a server has no API key, it opens what was recorded to the user who owns the folder.

A server cannot tell a request of this machine's user from one that a proxy or an SSH tunnel passes on. Reading a file that only
its owner can read can tell them apart.
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
    """The token of a home folder. None where there is none, or where the file is not a plain file that this user owns and no
    other user can read or write."""
    try:
        # Neither a link to another file nor a pipe, which would block.
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
    """The token of a home folder; a new one where `read_token` finds none. Servers that start at the same time get the same.
    Raises StoreError where it cannot be written."""
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
    # Created with mode 0600 and renamed: at no time is the file readable for others, or incomplete.
    descriptor, scratch = tempfile.mkstemp(prefix=f".{FILE}-", dir=home)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
        os.replace(scratch, home / FILE)
    except BaseException:
        os.unlink(scratch)
        raise
    return token
