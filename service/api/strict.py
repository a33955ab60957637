"""Strict parsing of requests: JSON that every parser reads the same way, numbers made of digits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Never, cast

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BeforeValidator

from service.api.errors import ContextExceeded
from service.api.printing import printable
from service.api.threads import PARSING
from service.core import BadRequest

LARGE_BYTES = 2**16
"""A body of more bytes is parsed on a thread."""
ENTRIES = ("messages", "input", "prompt")
"""Fields whose entries each take at least one token of the context."""
MAX_DEPTH = 128
"""Maximum nesting of objects and arrays in a body: pydantic can write about 250 in an answer, grammars allow 128."""


def parse_json(raw: bytes) -> object:
    """UTF-8 JSON with unique keys, finite numbers and complete characters. Raises BadRequest on anything else."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant)
        _check_depth(value)
        if b"\\u" in raw:
            # An escape may be half of a surrogate pair, which UTF-8 cannot encode.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise BadRequest("the body holds half of a surrogate pair", field="body") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8", field="body") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", field="body") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise BadRequest(f"the body is not JSON: {error.msg} at {place}", field="body") from None
    except ValueError:
        raise BadRequest("the body holds a number with too many digits", field="body") from None


def _check_depth(value: object) -> None:
    """Raises RecursionError beyond MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for many in inner for one in many]
        if not level:
            return
    raise RecursionError


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for key, value in pairs:
        if key in seen:
            raise BadRequest("the same key is given twice", field=printable(key))
        seen[key] = value
    return seen


def _constant(name: str) -> Never:
    raise BadRequest(f"{name} is not JSON", field="body")


def _numeral(value: object) -> object:
    """Pydantic alone would accept 1_000, and spaces and newlines around a number."""
    if isinstance(value, str) and re.search(r"[\s_]", value):
        raise ValueError("has spaces or underscores among its digits")
    return value


NUMERAL = BeforeValidator(_numeral)
"""For numbers in paths and queries; comes last, so that the schema keeps the bounds."""


def check_entries(body: object, max_context: int) -> None:
    """Raises ContextExceeded for more messages, parts of one, or token ids than the context has tokens, before they are
    validated one by one, which takes the event loop's time."""
    given = cast("dict[str, object]", body) if isinstance(body, dict) else {}
    for name in ENTRIES:
        entries = given.get(name)
        if not isinstance(entries, list):
            continue
        # Several prompts do not share a context.
        parts = [_parts(entry) for entry in cast("list[object]", entries)]
        count = max([len(parts) if name != "prompt" or _is_number(entries[:1]) else 0, *parts])
        if count > max_context:
            reason = f"{count} entries cannot fit in a context of {max_context} tokens"
            raise ContextExceeded(f"{name} is too long: {reason}", name, prompt_tokens=count, limit=max_context)


def _parts(entry: object) -> int:
    parts = cast("dict[str, object]", entry).get("content") if isinstance(entry, dict) else entry
    return len(cast("list[object]", parts)) if isinstance(parts, list) else 0


def _is_number(first: list[object]) -> bool:
    return bool(first) and isinstance(first[0], int)


class StrictRequest(Request):
    """A request whose JSON is parsed by parse_json, once."""

    _parsed: object = None
    _read: bool = False

    async def json(self) -> object:
        """The parsed body. Raises BadRequest."""
        if not self._read:
            raw = await self.body()
            self._parsed = parse_json(raw) if len(raw) <= LARGE_BYTES else await PARSING.run(parse_json, raw)
            self._read = True
        return self._parsed


class StrictRoute(APIRoute):
    """A route that refuses input it would otherwise ignore: repeated query parameters, unknown ones (except of GET), an
    unexpected body, and a body that is not application/json."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind these checks."""
        handle = super().get_route_handler()
        takes_body = self.body_field is not None
        known = {parameter.alias for parameter in self.dependant.query_params}

        async def strict(request: Request) -> Response:
            changes = request.method in {"POST", "PUT", "DELETE"}
            for name in request.query_params:
                if name in known and len(request.query_params.getlist(name)) > 1:
                    raise BadRequest("the same query parameter is given twice", field=printable(name))
                if name not in known and changes:
                    raise BadRequest("this route has no such query parameter", field=printable(name))
            if not changes:
                return await handle(request)
            request = StrictRequest(request.scope, request.receive)
            if takes_body:
                media = request.headers.get("content-type", "").split(";")[0].strip().lower()
                if media != "application/json":
                    raise HTTPException(415, "the body must be application/json")
                body, most = await request.json(), getattr(request.app.state, "max_context", None)
                if most is not None:
                    check_entries(body, most)
            elif await request.body() not in (b"", b"{}"):
                raise BadRequest("this route takes no body", field="body")
            return await handle(request)

        return strict
