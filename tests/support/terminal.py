"""A process at a terminal of its own."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

TAKE = """
import fcntl, os, signal, sys, termios
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, sys.argv[1:])
"""
"""The process makes its input its terminal, so that Ctrl-C there reaches it. It ignores none of a terminal's signals, as a
command that a shell starts in the foreground: this process may ignore them (in the background of a script, or under nohup)."""
CTRL_C = b"\x03"
LIMIT_SECONDS = 120.0


def at_a_terminal(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    prompt: str = "",
    keys: bytes = b"",
    more: Sequence[tuple[str, Callable[[str], bytes]]] = (),
    limit: float = LIMIT_SECONDS,
) -> tuple[int, str]:
    """The exit status of Python with these arguments, and what the terminal showed. keys: typed once `prompt` is shown. more:
    then what these return for what is shown, once each of these texts is. Raises AssertionError when it has not ended after
    `limit` seconds."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, sys.executable, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "100", **environment},
    )
    os.close(theirs)
    shown, typed, end, left = b"", not keys, time.monotonic() + limit, list(more)
    try:
        while True:
            assert time.monotonic() < end, f"it goes on after {limit:.0f} s: {shown.decode(errors='replace')}"
            if not select.select([ours], [], [], 1.0)[0]:
                # One that comes between the prompt and the read behind it is lost in Python until the next key.
                if typed and keys == CTRL_C:
                    os.write(ours, keys)
                continue
            try:
                piece = os.read(ours, 4096)
            except OSError:  # Linux says so at the end.
                break
            if not piece:
                break
            shown += piece
            if not typed and prompt.encode() in shown:
                os.write(ours, keys)
                typed = True
            if typed and left and left[0][0].encode() in shown:
                os.write(ours, left.pop(0)[1](shown.decode(errors="replace")))
        return process.wait(60), shown.decode()
    finally:
        process.kill()
        os.close(ours)
