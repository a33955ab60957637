"""The log of this process, as a server would write it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

from service.logs import formatter
from tests.support.waiting import until


class Lines:
    """What is logged meanwhile."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Of JSON."""
        return [json.loads(line) for line in self.text.splitlines()]

    def requests(self, count: int) -> list[dict[str, Any]]:
        """The lines of so many requests: they are written when the responses were sent, or later."""
        until(lambda: sum(line["event"] == "request" for line in self.objects) >= count)
        found = [line for line in self.objects if line["event"] == "request"]
        assert len(found) == count
        return found


@contextmanager
def logged(form: Literal["text", "json"], level: int = logging.INFO) -> Generator[Lines]:
    lines, root = Lines(), logging.getLogger()
    handler, before = logging.StreamHandler(lines.stream), root.level
    handler.setFormatter(formatter(form))
    # The client's lines, which name paths.
    handler.addFilter(lambda record: record.name.partition(".")[0] not in {"httpx", "httpcore"})
    root.addHandler(handler)
    root.setLevel(level)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
