"""Clients' own names, as they may be sent back."""

MAX_NAME_CHARS = 64


def printable(name: str) -> str:
    """A client's own name for something, made safe to send back: short, and encodable whatever it was."""
    return name[:MAX_NAME_CHARS].encode("unicode_escape").decode("ascii")
