"""Request rate limits by key."""

from __future__ import annotations

import math
import time

from limits import RateLimitItem, parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.errors import GENERATING, RateLimited, answer
from service.core import Caller
from service.metrics import Metrics

COUNTING = "/v1/messages/count_tokens"


class RateLimit:
    """ASGI middleware behind the guard: 429 with Retry-After for requests to routes that generate beyond `rate` per
    key, or per address if no key is required. Token counting has a separate count, because clients do it before they
    generate. rate: in the notation of the library limits, such as "60/minute"."""

    def __init__(self, app: ASGIApp, rate: str, metrics: Metrics) -> None:
        self._app = app
        self._rate: RateLimitItem = parse(rate)
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else None
        if path in GENERATING or path == COUNTING:
            caller: Caller = scope["state"]["caller"]
            name = ("key", caller.key) if caller.key is not None else ("address", (scope["client"] or ("",))[0])
            name = (*name, "count") if path == COUNTING else name
            if not await self._limiter.hit(self._rate, *name):
                window = await self._limiter.get_window_stats(self._rate, *name)
                wait = max(math.ceil(window.reset_time - time.time()), 1)
                error = RateLimited(f"more requests than {self._rate} with this key", retry_after=wait)
                if path in GENERATING:
                    self._metrics.request_refused(error.code)
                await answer(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
