"""The access level that every route requires, and the identification of callers.

A caller presents an API key (`Authorization: Bearer`, or `x-api-key` as Anthropic's clients do), or the page's session
cookie. A server on a loopback address that has never had a key does not require one. Local programs may then do
everything except read and erase recorded texts, which requires the token in the home folder, sent like a key. Requests
forwarded by a proxy are refused.
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
"""Access by method and path. LOCAL: operator actions that neither show nor destroy a client's text. A route that is not
listed here cannot be served (`check_routes`). A path without a route requires a key, so that callers without one cannot
find out which routes exist."""

COOKIE = "redraft_session"
BEARER = re.compile(r"bearer +(\S+)", re.IGNORECASE)


def check_routes(router: APIRouter) -> None:
    """Raises LookupError if a route is not in ROUTES."""
    for route in router.routes:
        if isinstance(route, APIRoute):
            for method in route.methods or ():
                ROUTES[method, route.path]


class Policy:
    """The access level that a request requires, by its method and path."""

    def __init__(self, routes: Mapping[tuple[str, str], Access] = ROUTES) -> None:
        patterns = [(method, _pattern(path), access) for (method, path), access in routes.items()]
        # Exact paths before those with parameters, as in the routers.
        self._patterns = sorted(patterns, key=lambda each: "[" in each[1].pattern)

    def access(self, method: str, path: str) -> Access:
        """The required access; CLIENT for paths without a route."""
        found = (access for name, pattern, access in self._patterns if name == method and pattern.fullmatch(path))
        return next(found, Access.CLIENT)

    def methods(self, path: str) -> list[str]:
        """The methods that routes have for a path."""
        return sorted({method for method, pattern, _ in self._patterns if pattern.fullmatch(path)})


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{[^}]*?(:path)?\}", path)
    texts, kinds = parts[::2], parts[1::2]
    found = "".join(
        re.escape(text) + ("" if i == len(kinds) else ".+" if kinds[i] else "[^/]+") for i, text in enumerate(texts)
    )
    return re.compile(found)


def caller_of(connection: HTTPConnection) -> Caller:
    """The caller of a request, as identified by the guard."""
    return cast("Caller", connection.state.caller)


def still_allowed(connection: HTTPConnection) -> Callable[[], bool]:
    """A check whether the guard would admit this request now: its key may have been revoked, or its session may have ended."""
    return cast("Callable[[], bool]", connection.state.still_allowed)


class Guard:
    """ASGI middleware in front of every route that identifies the caller and checks its access. 401 without a valid
    key; 403 with a key that does not open this route, for pages of other sites, for foreign hosts, and for requests
    forwarded by a proxy to a server without keys.

    `Host` is checked where a request without a key is allowed, that is on a server without keys. A page whose host name
    was made to resolve to this machine has neither a key nor a cookie of this server. Health is not checked, because
    probes call by address. The cookie only counts for requests of the server's own page.
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
                # The router's patterns match before a trailing newline: such a path would be a route there, but not
                # here.
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
        # The token does not help here either: it is for this machine.
        if keyless and wanted > Access.PUBLIC and (header := forwarding_header(scope)) is not None:
            raise Forbidden(
                "this request came through a proxy, and a server without API keys only answers this machine: make "
                "a key first (`redraft keys create NAME`) and send it as `Authorization: Bearer KEY`",
                field=printable(header),
            )
        keys = set(_keys(scope))
        # Invalid keys are ignored: desktop apps also send the token of another service.
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
            raise Unauthorized("this API key is not valid here" if keys else "this server requires an API key")
        if keyless:
            raise Forbidden(
                "this route shows or ends other callers' requests: send the token in the file `token` of the server's home "
                "folder as `Authorization: Bearer TOKEN`, or open the link that `redraft serve` prints",
                field="Authorization",
            )
        raise Forbidden("this route requires an operator's key", field="Authorization")


def _is_health(path: str) -> bool:
    return path == "/health" or path.startswith("/health/")


def _keys(scope: Scope) -> Iterable[str]:
    for name, value in scope["headers"]:
        if name == b"authorization" and (found := BEARER.fullmatch(value.decode("latin-1").strip())):
            yield found[1]
        elif name == b"x-api-key" and value.strip():
            yield value.decode("latin-1").strip()


def _cookie(scope: Scope) -> str | None:
    # Python's own parser drops all cookies after an invalid one, such as those of other programs on this host.
    return HTTPConnection(scope).cookies.get(COOKIE)
