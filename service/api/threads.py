"""Thread pools for work that would block the event loop or other work.

The tokenizer encodes one text after another, so a burst of long prompts delays everything that shares its threads. Each
kind of work has its own pool; `/metrics` and the page use AnyIO's default threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Threads:
    """At most `count` threads for one kind of work, on each event loop. name: unique."""

    def __init__(self, name: str, count: int) -> None:
        self._count = count
        self._limiter: RunVar[CapacityLimiter] = RunVar(name)

    async def run(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Calls `work` on a thread as soon as one is free. Raises what it raises."""
        limiter = self._limiter.get(None)
        if limiter is None:
            limiter = CapacityLimiter(self._count)
            self._limiter.set(limiter)
        return await to_thread.run_sync(work, *arguments, limiter=limiter)


PARSING = Threads("redraft-parsing", 1)
"""For large bodies."""
ENCODING = Threads("redraft-encoding", 16)
"""For prompts of requests that generate."""
COMPILING = Threads("redraft-compiling", 32)
"""For grammars, each of which may take seconds."""
COUNTING = Threads("redraft-counting", 1)
"""For prompts that are only counted: at most one of them is ahead of a prompt to be answered."""
