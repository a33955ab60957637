"""How connections are served: idle ones are kept for the next request, half-sent requests are given up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

TOO_SLOW = "the request did not arrive in time"


def web_config(
    app: ASGIApp,
    *,
    idle_seconds: int,
    arrival_seconds: float,
    host: str = "127.0.0.1",
    port: int = 0,
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
) -> uvicorn.Config:
    """Uvicorn's settings for an ASGI application without a lifespan. idle_seconds: how long a connection without a request is
    kept, which its `Keep-Alive` header says. arrival_seconds: see `bounded_protocol`."""
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=bounded_protocol(arrival_seconds),
        ws="none",
        host=host,
        port=port,
        lifespan="off",
        log_config=None,
        access_log=False,
        headers=[("keep-alive", f"timeout={idle_seconds}")],
        timeout_keep_alive=idle_seconds,
        timeout_graceful_shutdown=5,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
    )


def bounded_protocol(arrival_seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol, which closes a connection when the head of a request is not complete `arrival_seconds` after its
    first byte, or the rest of a body that long after its answer. The body of a request that has no answer yet is BodyLimit's
    business. A connection without any byte is closed after uvicorn's `timeout_keep_alive`, like one after an answer."""

    class BoundedProtocol(H11Protocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop)
            self._arrival: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._keep_for_a_while()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._unset_keepalive_if_required()
            self._end_arrival()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_arrival()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch_arrival()

        def _watch_arrival(self) -> None:
            """Lets time run while a request is half here and none is being answered."""
            cycle = cast("RequestResponseCycle | None", self.cycle)
            answering = cycle is not None and not cycle.response_complete
            if answering or self.transport.is_closing():
                self._end_arrival()
                return
            if self.timeout_keep_alive_task is None and self._between_requests():
                # The rest of a body came after its answer, which uvicorn takes for the start of a request.
                self._keep_for_a_while()
            if self.timeout_keep_alive_task is not None:
                self._end_arrival()
            elif self._arrival is None:
                self._arrival = self.loop.call_later(arrival_seconds, self._refuse_slow)

        def _between_requests(self) -> bool:
            conn = self.conn
            return conn.our_state is h11.IDLE and conn.their_state is h11.IDLE and not conn.trailing_data[0]

        def _keep_for_a_while(self) -> None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

        def _end_arrival(self) -> None:
            if self._arrival is not None:
                self._arrival.cancel()
                self._arrival = None

        def _refuse_slow(self) -> None:
            self._arrival = None
            if self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE:
                headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
                for event in (
                    h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
                    h11.Data(data=TOO_SLOW.encode()),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return BoundedProtocol
