"""Makes clients' names safe to send back."""

MAX_NAME_CHARS = 64


def printable(name: str) -> str:
    """A client's name for something, made safe to send back: short and encodable."""
    return name[:MAX_NAME_CHARS].encode("unicode_escape").decode("ascii")
