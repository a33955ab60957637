"""The signals that end a server or a trainer."""

from __future__ import annotations

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGINT unless this process was started with SIGINT ignored.

    A shell without job control, such as one running a script, ignores SIGINT for its background commands, so that Ctrl-C in the
    script's terminal does not end them. Installing a handler would undo that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return (signal.SIGINT, signal.SIGTERM)
