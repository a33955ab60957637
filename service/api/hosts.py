"""Checks which requests may reach the routes: those addressed to this server by one of its names and not sent by
another site's page.

A server on a loopback address may require no key, so a browser on the same machine must not become a way in. A page of
another site can post to a loopback port without a preflight (a form, a simple `fetch`), and DNS rebinding can make its
own host name resolve to this machine. Browsers put the name they called in `Host` and the page's origin in `Origin`,
and pages cannot change either.
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
"""Origins of applications that show their own pages, such as `app://obsidian.md` and `vscode-webview://...`. No web
site has one; Tauri's on Windows is a name that always resolves to the local machine."""
_OWN_SCHEME = re.compile(OWN_SCHEME)
_OTHER_SITES = {"cross-site", "same-site"}
"""Values of Sec-Fetch-Site for requests of pages that this server did not send (another port is the same site)."""


_FORWARDING = re.compile(
    r"via|cdn-loop|(.*-)?forwarded(-.*)?|x-(original|envoy|appengine|azure)-.*|(cf|cloudfront|fastly|fly|tailscale)-.*|"
    r"(.*-)?(client|connecting|originating|proxy-?user|real|remote|user)-?(ip|addr|address)"
)
"""Headers that proxies add to forwarded requests (RFC 9110, RFC 7239, and those of proxies and CDNs). Programs that
call a server directly send none of them."""


class Authority(NamedTuple):
    """Host and port as in `Host` and `Origin`; port is empty for the scheme's default."""

    host: str
    port: str


def parse_authority(text: str, scheme: str = "http") -> Authority | None:
    """The parts of "name", "name:port" or "[v6]:port"; None for anything else.

    Names compare case-insensitively and without the trailing dot of a fully qualified name, addresses by value, and the
    default port of `scheme` like no port.
    """
    matched = _AUTHORITY.fullmatch(text.strip().lower())
    if matched is None:
        return None
    port = matched[2] or ""
    return Authority(normalise_host(matched[1]), "" if port == _DEFAULT_PORTS.get(scheme) else port)


def normalise_host(host: str) -> str:
    """A host name or address in canonical form; brackets around an IPv6 address are optional."""
    name = host.lower().removesuffix(".")
    try:
        return str(ip_address(name.removeprefix("[").removesuffix("]")))
    except ValueError:
        return name


class Hosts:
    """The names of this server, and the origins of pages that may call it. allowed_hosts: names or addresses without
    ports. cors_origins: of pages other than the server's own."""

    def __init__(self, allowed_hosts: Collection[str], cors_origins: Collection[str] = ()) -> None:
        self._allowed = frozenset(normalise_host(host) for host in allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in cors_origins)

    def check_host(self, scope: Scope) -> None:
        """Raises Forbidden if `Host` is not a name of this server."""
        hosts = _values(scope, b"host")
        host = parse_authority(hosts[0]) if len(hosts) == 1 else None
        if host is None or host.host not in self._allowed:
            raise Forbidden(
                "the Host header does not name this server: add the name that clients use to server.allowed_hosts",
                field="Host",
            )

    def check_origin(self, scope: Scope, *, with_key: bool = False) -> None:
        """Raises Forbidden for requests of other sites' pages, except those in `cors_origins`: an `Origin` must equal
        this server's name and port in `Host`. The same holds for requests that a browser marks as cross-site
        (`Sec-Fetch-Site`), which covers those without an `Origin`. Other clients send neither header. with_key: the
        request has a key, which also admits applications whose origins have their own scheme."""
        origins, hosts = _values(scope, b"origin"), _values(scope, b"host")
        if origins and all(self._is_allowed(origin.strip().lower(), with_key=with_key) for origin in origins):
            return
        if any(not _same_origin(origin, "".join(hosts)) for origin in origins):
            raise Forbidden(
                "pages of other sites may not call this server: Origin must be the server's own name and port, with the "
                "name in server.allowed_hosts, or be in server.cors_origins",
                field="Origin",
            )
        if _is_link(scope):
            return
        if any(site.strip().lower() in _OTHER_SITES for site in _values(scope, b"sec-fetch-site")):
            raise Forbidden(
                "pages of other sites may not call this server: its names are those in server.allowed_hosts",
                field="Sec-Fetch-Site",
            )

    def _is_allowed(self, origin: str, *, with_key: bool) -> bool:
        return origin in self._origins or (with_key and _OWN_SCHEME.fullmatch(origin) is not None)

    def own_page(self, scope: Scope) -> bool:
        """Whether a request may come from the server's own page, which alone may use its cookie. Browsers send `Origin`
        with requests that change something."""
        origins, hosts = _values(scope, b"origin"), _values(scope, b"host")
        if not origins:
            return scope["method"] in {"GET", "HEAD"}
        return all(_same_origin(origin, "".join(hosts)) for origin in origins)


def forwarding_header(scope: Scope) -> str | None:
    """The name of the first header that only proxies add, or None. Not every proxy adds one: nginx by default and SSH
    tunnels do not."""
    names = (name.decode("latin-1").lower().replace("_", "-") for name, _ in scope["headers"])
    return next((name for name in names if _FORWARDING.fullmatch(name)), None)


def _is_link(scope: Scope) -> bool:
    """Whether the request follows a link to the page, which contains no data by itself."""
    return scope["path"] == "/" and scope["method"] == "GET" and _values(scope, b"sec-fetch-mode") == ["navigate"]


def _same_origin(origin: str, host: str) -> bool:
    scheme, separator, authority = origin.strip().lower().partition("://")
    if not separator or scheme not in _DEFAULT_PORTS:
        return False  # "null": a sandboxed frame, a local file
    page = parse_authority(authority, scheme)
    return page is not None and page == parse_authority(host, scheme)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]
