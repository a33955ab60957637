"""Frames of server-sent events."""

from __future__ import annotations

_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Characters at which clients that split lines like Python would cut a frame; JSON escapes all others."""


def frame(data: str, event: str | None = None) -> bytes:
    """A frame of JSON. event: its type, if any."""
    kind = "" if event is None else f"event: {event}\n"
    return f"{kind}data: {data.translate(_LINE_ENDS)}\n\n".encode()
