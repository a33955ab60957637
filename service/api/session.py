"""GET, POST and DELETE /session: the page exchanges a key for a cookie, so that it need not store the key."""

from __future__ import annotations

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Request, Response

from service.api.access import COOKIE, caller_of
from service.api.errors import Unauthorized
from service.api.schemas import LoginRequest, SessionAnswer
from service.api.strict import StrictRoute
from service.core import Access, Doorkeeper


def session_routes(doorkeeper: Doorkeeper, threads: CapacityLimiter) -> APIRouter:
    """Routes of the page's session. threads: for blocking calls."""
    router = APIRouter(route_class=StrictRoute)

    @router.get("/session")
    async def session(request: Request) -> SessionAnswer:
        """The caller, and whether a key is required."""
        caller = caller_of(request)
        asks = doorkeeper.without_key.access is Access.PUBLIC
        return SessionAnswer(role=caller.access.role, key=caller.key, asks_for_key=asks)

    @router.post("/session", status_code=204)
    async def log_in(body: LoginRequest, request: Request, response: Response) -> None:
        """Open a session with a key. Its cookie expires after 12 hours, or with the key."""
        secret = await to_thread.run_sync(doorkeeper.log_in, body.key, limiter=threads)
        if secret is None:
            raise Unauthorized("this API key is not valid here")
        # Cookies are sent to every port of a host: other servers there may see this one, but cannot use it (Origin).
        response.set_cookie(
            COOKIE, secret, httponly=True, samesite="strict", secure=request.url.scheme == "https", path="/"
        )

    @router.delete("/session", status_code=204)
    async def log_out(request: Request, response: Response) -> None:
        """End the session."""
        if (secret := request.cookies.get(COOKIE)) is not None:
            await to_thread.run_sync(doorkeeper.log_out, secret, limiter=threads)
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")

    return router
