"""GET / and /page/{name}: the page's files. They contain no data of this server, so they need no key and are also
served while models load."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

from service.core import NotFound

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SECURITY = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Only this server's own files are loaded or run, and no inline script or style: text mistaken for HTML can do nothing."""


def page_files() -> APIRouter:
    """The routes of the files, which are read once."""
    router = APIRouter()
    files = {path.name: (path.read_bytes(), MEDIA[path.suffix]) for path in FOLDER.iterdir() if path.suffix in MEDIA}

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        """The page."""
        return _answer(*files[INDEX])

    @router.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        """One of its files."""
        if name not in files:
            raise NotFound("the page has no such file")
        return _answer(*files[name])

    return router


def _answer(content: bytes, media: str) -> Response:
    # After an upgrade, the new page must be loaded.
    return Response(content, media_type=media, headers={**SECURITY, "cache-control": "no-cache"})
