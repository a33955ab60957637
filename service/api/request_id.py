"""Every response names its request by the id that the client sent in `x-request-id`, or by a new one. Anthropic's
clients expect it in `request-id`."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.error_shapes import is_anthropic

HEADER = b"x-request-id"
ANTHROPIC_HEADER = b"request-id"
USABLE = re.compile(rb"[\x21-\x7e]{1,128}")
STATE = "request_id"
"""In the state of the scope."""


def id_of(scope: Scope) -> str:
    """The request's id, behind RequestId."""
    return scope["state"][STATE]


class RequestId:
    """ASGI middleware that adds `x-request-id`, and `request-id` on Anthropic's routes: the client's own id if it is
    printable and short."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == HEADER), b"")
        id = sent if USABLE.fullmatch(sent) else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})[STATE] = id.decode()
        named_by = [HEADER, ANTHROPIC_HEADER] if is_anthropic(scope["path"]) else [HEADER]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *((name, id) for name in named_by)]}
            await send(message)

        await self._app(scope, receive, named)
