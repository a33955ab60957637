"""Which requests may reach the routes: those addressed to this server by a name of its own, and not sent by another
site's page.

A server on a loopback address may ask for no key, so a browser on the same machine must not become a way in. A page of another
site can post to a loopback port without asking first (a form, a `fetch` without preflight), and by DNS rebinding its own host
name can be made to resolve to this machine. Browsers put the name they called in `Host` and the page's origin in `Origin`, and
pages cannot change either.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import NamedTuple

from starlette.types import Scope

from service.api.errors import Forbidden

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]/:@?#\s]+)(?::(\d{1,5}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}
OWN_SCHEME = r"(?i:(?!https?:)[a-z][a-z0-9+.-]*://[^\s*]*|https?://tauri\.localhost)"
"""Origins of applications that show pages of their own, such as `app://obsidian.md` and `vscode-webview://...`. No web site has
one; Tauri's on Windows is a name that always resolves to the machine that asks."""
_OWN_SCHEME = re.compile(OWN_SCHEME)
_OTHER_SITES = {"cross-site", "same-site"}
"""Values of Sec-Fetch-Site for requests of pages that this server did not send (another port is the same site)."""


_FORWARDING = re.compile(
    r"via|cdn-loop|(.*-)?forwarded(-.*)?|x-(original|envoy|appengine|azure)-.*|(cf|cloudfront|fastly|fly|tailscale)-.*|"
    r"(.*-)?(client|connecting|originating|proxy-?user|real|remote|user)-?(ip|addr|address)"
)
"""Names of headers that proxies add to what they pass on (RFC 9110, RFC 7239, and those of proxies and CDNs). Programs that
call a server directly send none of them."""


class Authority(NamedTuple):
    """A host and a port as `Host` and `Origin` carry them; port is empty where it is the scheme's default."""

    host: str
    port: str


def parse_authority(text: str, scheme: str = "http") -> Authority | None:
    """The parts of "name", "name:port" or "[v6]:port"; None for anything else.

    Names compare without case and without the dot of a fully qualified name, addresses by value, and the default port of
    `scheme` like no port.
    """
    matched = _AUTHORITY.fullmatch(text.strip().lower())
    if matched is None:
        return None
    port = matched[2] or ""
    return Authority(normalise_host(matched[1]), "" if port == _DEFAULT_PORTS.get(scheme) else port)


def normalise_host(host: str) -> str:
    """A host name or address in the one form that is compared; brackets around an IPv6 address are optional."""
    name = host.lower().removesuffix(".")
    try:
        return str(ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return name


class Hosts:
    """The names of this server, and the origins of pages that may call it. allowed_hosts: names or addresses without ports.
    cors_origins: of pages besides our own."""

    def __init__(self, allowed_hosts: Collection[str], cors_origins: Collection[str] = ()) -> None:
        self._allowed = frozenset(normalise_host(host) for host in allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in cors_origins)

    def check_host(self, scope: Scope) -> None:
        """Raises Forbidden where `Host` is no name of this server."""
        hosts = _values(scope, b"host")
        host = parse_authority(hosts[0]) if len(hosts) == 1 else None
        if host is None or host.host not in self._allowed:
            raise Forbidden(
                "the Host header names no host of this server: add the name that clients use to server.allowed_hosts",
                field="Host",
            )

    def check_origin(self, scope: Scope, *, with_key: bool = False) -> None:
        """Raises Forbidden for requests of other sites' pages, but for those of `cors_origins`: an `Origin` must be this very
        server, the same name and port as `Host`. So must one that a browser marks as another site's (`Sec-Fetch-Site`), which
        covers what it sends without an `Origin`. Clients that are no browsers send neither header. with_key: the request has a
        key, with which applications whose origins are of their own scheme may call too."""
        origins, hosts = _values(scope, b"origin"), _values(scope, b"host")
        if origins and all(self._is_allowed(origin.strip().lower(), with_key=with_key) for origin in origins):
            return
        if any(not _same_origin(origin, "".join(hosts)) for origin in origins):
            raise Forbidden(
                "pages of other sites may not call this server: Origin must be its own name and port, and the name one "
                "of server.allowed_hosts, or one of server.cors_origins",
                field="Origin",
            )
        if _is_link(scope):
            return
        if any(site.strip().lower() in _OTHER_SITES for site in _values(scope, b"sec-fetch-site")):
            raise Forbidden(
                "pages of other sites may not call this server, whose names are those of server.allowed_hosts",
                field="Sec-Fetch-Site",
            )

    def _is_allowed(self, origin: str, *, with_key: bool) -> bool:
        return origin in self._origins or (with_key and _OWN_SCHEME.fullmatch(origin) is not None)

    def own_page(self, scope: Scope) -> bool:
        """Whether a request may be our own page's, which alone may use its cookie: what changes something says so by its
        `Origin`, which browsers send with it."""
        origins, hosts = _values(scope, b"origin"), _values(scope, b"host")
        if not origins:
            return scope["method"] in {"GET", "HEAD"}
        return all(_same_origin(origin, "".join(hosts)) for origin in origins)


def forwarding_header(scope: Scope) -> str | None:
    """The name of the first header that only proxies add, whatever its value; None without one. Not every proxy adds one: nginx
    does not by default, and neither do SSH tunnels."""
    names = (name.decode("latin-1").lower().replace("_", "-") for name, _ in scope["headers"])
    return next((name for name in names if _FORWARDING.fullmatch(name)), None)


def _is_link(scope: Scope) -> bool:
    """Whether somebody has followed a link to our page, which holds nothing by itself."""
    return scope["path"] == "/" and scope["method"] == "GET" and _values(scope, b"sec-fetch-mode") == ["navigate"]


def _same_origin(origin: str, host: str) -> bool:
    scheme, separator, authority = origin.strip().lower().partition("://")
    if not separator or scheme not in _DEFAULT_PORTS:
        return False  # "null": a sandboxed frame, a local file
    page = parse_authority(authority, scheme)
    return page is not None and page == parse_authority(host, scheme)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
