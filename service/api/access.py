"""What every route asks for, and who calls.

A caller shows an API key (`Authorization: Bearer`, or `x-api-key` as Anthropic's clients do), or the page's session cookie. As
long as a server on a loopback address has never had a key, it asks for none. Programs on this machine may then do everything
but read and erase recorded texts, which takes the token of the home folder, shown like a key; requests that a proxy has passed
on may do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.errors import GENERATING, Forbidden, Unauthorized, answer
from service.api.hosts import Hosts, forwarding_header
from service.api.printing import printable
from service.core import Access, Caller, Doorkeeper, NotFound, RedraftError
from service.metrics import Metrics

ROUTES: Mapping[tuple[str, str], Access] = {
    ("GET", "/"): Access.PUBLIC,
    ("GET", "/page/{name}"): Access.PUBLIC,
    ("GET", "/health"): Access.PUBLIC,
    ("GET", "/health/live"): Access.PUBLIC,
    ("GET", "/health/ready"): Access.PUBLIC,
    ("GET", "/openapi.json"): Access.PUBLIC,
    ("GET", "/session"): Access.PUBLIC,
    ("POST", "/session"): Access.PUBLIC,
    ("DELETE", "/session"): Access.PUBLIC,
    ("POST", "/generate"): Access.CLIENT,
    ("POST", "/v1/chat/completions"): Access.CLIENT,
    ("POST", "/v1/completions"): Access.CLIENT,
    ("POST", "/v1/responses"): Access.CLIENT,
    ("GET", "/v1/responses/{id}"): Access.CLIENT,
    ("DELETE", "/v1/responses/{id}"): Access.CLIENT,
    ("POST", "/v1/messages"): Access.CLIENT,
    ("POST", "/v1/messages/count_tokens"): Access.CLIENT,
    ("GET", "/v1/models"): Access.CLIENT,
    ("GET", "/v1/models/{id:path}"): Access.CLIENT,
    ("GET", "/metrics"): Access.LOCAL,
    ("POST", "/train"): Access.LOCAL,
    ("GET", "/train/{id}"): Access.LOCAL,
    ("GET", "/learning"): Access.LOCAL,
    ("GET", "/gains"): Access.LOCAL,
    ("GET", "/practice"): Access.LOCAL,
    ("PUT", "/practice"): Access.LOCAL,
    ("GET", "/runs"): Access.LOCAL,
    ("GET", "/runs/{id}"): Access.LOCAL,
    ("DELETE", "/runs/{id}"): Access.LOCAL,
    ("GET", "/requests"): Access.OPERATOR,
    ("DELETE", "/requests/{id}"): Access.OPERATOR,
    ("GET", "/adapters"): Access.LOCAL,
    ("DELETE", "/adapters/{id}/files"): Access.LOCAL,
    ("POST", "/adapters/{id}/activate"): Access.LOCAL,
    ("POST", "/adapters/rollback"): Access.LOCAL,
    ("DELETE", "/generations"): Access.OPERATOR,
    ("GET", "/events"): Access.LOCAL,
    ("GET", "/history"): Access.LOCAL,
    ("GET", "/cases"): Access.OPERATOR,
}
"""By method and path. LOCAL: what an operator may do that neither shows nor destroys a client's text. A route that is not
here cannot be served (`check_routes`); a path that no route has asks for a key, so that nobody without one learns which there
are."""

COOKIE = "redraft_session"
BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


def check_routes(router: APIRouter) -> None:
    """Raises LookupError where a route is not in ROUTES."""
    for route in router.routes:
        if isinstance(route, APIRoute):
            for method in route.methods or ():
                ROUTES[method, route.path]


class Policy:
    """What a request asks for, by its method and path."""

    def __init__(self, routes: Mapping[tuple[str, str], Access] = ROUTES) -> None:
        patterns = [(method, _pattern(path), access) for (method, path), access in routes.items()]
        # Exact paths before those with parameters, as in the routers.
        self._patterns = sorted(patterns, key=lambda each: "[" in each[1].pattern)

    def access(self, method: str, path: str) -> Access:
        """CLIENT for what no route has."""
        found = (access for name, pattern, access in self._patterns if name == method and pattern.fullmatch(path))
        return next(found, Access.CLIENT)

    def methods(self, path: str) -> list[str]:
        """Those that routes have for a path."""
        return sorted({method for method, pattern, _ in self._patterns if pattern.fullmatch(path)})


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{[^}]*?(:path)?\}", path)
    texts, kinds = parts[::2], parts[1::2]
    found = "".join(
        re.escape(text) + ("" if i == len(kinds) else ".+" if kinds[i] else "[^/]+") for i, text in enumerate(texts)
    )
    return re.compile(found)


def caller_of(connection: HTTPConnection) -> Caller:
    """Who sent a request, as the guard found."""
    return cast("Caller", connection.state.caller)


def still_allowed(connection: HTTPConnection) -> Callable[[], bool]:
    """Whether the guard would let this request in now: its key may be revoked since, its session over."""
    return cast("Callable[[], bool]", connection.state.still_allowed)


class Guard:
    """ASGI middleware in front of every route: who calls, from where, and whether that is enough. 401 without a key that opens
    anything, 403 with one that does not open this route, for pages of other sites, for hosts that are not this server's, and
    for requests that a proxy has passed on to a server without keys.

    `Host` is checked where a request without a key may do something: on a server without keys. A page whose name was made to
    resolve to this machine has neither a key nor a cookie of this server. Health is for probes, which call by address. The
    cookie counts for requests of our own page alone.
    """

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper, hosts: Hosts, metrics: Metrics) -> None:
        self._app = app
        self._doorkeeper = doorkeeper
        self._hosts = hosts
        self._metrics = metrics
        self._policy = Policy()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            if scope["path"].endswith("\n"):
                # The router's patterns match before a line's end: such a path would be a route there and none here.
                await answer(NotFound("no such path"), scope)(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state["still_allowed"] = lambda: self._allows(scope)
            try:
                state["caller"] = self._check(scope)
            except RedraftError as error:
                if scope["path"] in GENERATING and scope["method"] == "POST":
                    self._metrics.request_refused(error.code)
                await answer(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        try:
            self._check(scope)
        except RedraftError:
            return False
        return True

    def _check(self, scope: Scope) -> Caller:
        """Raises Unauthorized, Forbidden."""
        wanted = self._policy.access(scope["method"], scope["path"])
        keyless = self._doorkeeper.without_key.access > Access.PUBLIC
        # The token opens nothing here either: it is for this machine.
        if keyless and wanted > Access.PUBLIC and (header := forwarding_header(scope)) is not None:
            raise Forbidden(
                "this request came through a proxy, and a server without API keys answers this machine alone: make a key first "
                "(`redraft keys create NAME`) and send it as `Authorization: Bearer KEY`",
                field=printable(header),
            )
        keys = set(_keys(scope))
        # A key that opens nothing does not count: desktop apps send a token of another service beside ours.
        callers = {caller for key in keys if (caller := self._doorkeeper.by_key(key)) is not None}
        if len(callers) > 1:
            raise Unauthorized("the request carries two different keys")
        caller = next(iter(callers), None)
        if caller is None and keyless and not _is_health(scope["path"]):
            self._hosts.check_host(scope)
        self._hosts.check_origin(scope, with_key=caller is not None)
        if caller is None:
            session = _cookie(scope) if self._hosts.own_page(scope) else None
            caller = self._doorkeeper.by_session(session) if session is not None else None
            caller = caller or self._doorkeeper.without_key
        if caller.access >= wanted:
            return caller
        if caller.access is Access.PUBLIC:
            raise Unauthorized("this API key opens nothing here" if keys else "this server asks for an API key")
        if keyless:
            raise Forbidden(
                "this route shows or ends what others have asked: send the token in the file `token` of the server's home "
                "folder as `Authorization: Bearer TOKEN`, or open the link that `redraft serve` prints",
                field="Authorization",
            )
        raise Forbidden("this route wants an operator's key", field="Authorization")


def _is_health(path: str) -> bool:
    return path == "/health" or path.startswith("/health/")


def _keys(scope: Scope) -> Iterable[str]:
    for name, value in scope["headers"]:
        if name == b"authorization" and (found := BEARER.fullmatch(value.decode("latin-1").strip())):
            yield found[1]
        elif name == b"x-api-key" and value.strip():
            yield value.decode("latin-1").strip()


def _cookie(scope: Scope) -> str | None:
    # Python's own parser drops all cookies for one that it does not know, such as those of other programs on this host.
    return HTTPConnection(scope).cookies.get(COOKIE)
