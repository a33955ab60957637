"""How models write tool calls: how a call begins, and how the text between its markers is parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from service.core import ToolCall
from service.models.answer import Unfinished
from service.models.tagged_calls import TAGGED

ToolParser = Callable[[str, Any], Any]
"""mlx-lm's parser: takes the text between the markers of a call, and the tools; returns one call or several, as
dictionaries."""

SPACE = re.compile(r"\s*")
NAME = re.compile(r"[\w.:/-]+")
QUOTED = re.compile(r"\"[^\"\n]*\"?|'[^'\n]*'?|[^\s\"'<>]+")
END = re.compile(r"\Z")
_GLM = [[SPACE, NAME, SPACE, "<arg_key>"], [SPACE, NAME, SPACE, "{"], [SPACE, "{"], [SPACE, NAME, SPACE, END]]
BEGINNINGS: Mapping[str, Sequence[Sequence[str | re.Pattern[str]]]] = {
    "json_tools": [[SPACE, "{", SPACE, '"'], [SPACE, "[", SPACE, "{", SPACE, '"']],
    "qwen3_coder": [[SPACE, "<function", SPACE, "="]],
    "minimax_m2": [[SPACE, "<invoke", SPACE, "name", SPACE, "="]],
    "minicpm5": [[SPACE, QUOTED, SPACE, ">"]],
    "muse_spark": [[SPACE, "<atem:invoke"]],
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": [[SPACE, NAME, SPACE, "<longcat_arg_key>"], [SPACE, "{"], [SPACE, NAME, SPACE, END]],
    "kimi_k2": [[SPACE, "<|tool_call_begin|>"], [SPACE, NAME, SPACE, "<|tool_call_argument_begin|>"]],
    "kimi_k3": [[SPACE, "<|open|>call"]],
    "function_gemma": [[SPACE, "call:"]],
    "gemma4": [[SPACE, "call:"]],
    "pythonic": [[SPACE, "[", SPACE, NAME, SPACE, "("]],
    "mistral": [[SPACE, "[", SPACE, "{"], [SPACE, NAME, SPACE, "[ARGS]"], [SPACE, NAME, SPACE, "[CALL_ID]"]],
}
"""What may follow the marker of a call, by mlx-lm's parser: alternatives, each a sequence of texts and patterns. If anything
else follows, the marker is only mentioned. Formats not listed here may begin with anything."""
ARGUMENTS = ("arguments", "parameters", "args", "input")
"""The keys under which models write the arguments of a call."""
MISTRAL_HEADER = re.compile(
    r"\s*(?:\[TOOL_CALLS\]\s*)?(?P<name>[\w.:/-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*"
)


@dataclass(frozen=True)
class CallSyntax:
    """answer.CallSyntax. name: of mlx-lm's parser."""

    name: str
    start: str
    end: str
    parser: ToolParser

    def may_begin(self, text: str) -> bool:
        """See answer.CallSyntax."""
        return self.name not in BEGINNINGS or any(_begins(text, parts) for parts in BEGINNINGS[self.name])

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], str]:
        """See answer.CallSyntax."""
        if not self.may_begin(text):
            raise ValueError("no call begins like this")
        rest = ""
        if self.name == "mistral":
            parsed, rest = _mistral_calls(text)
        elif text.lstrip().startswith("{"):
            # Formats that put names before arguments are sometimes written as JSON too.
            parsed = json_calls(text)
        else:
            parsed = self.parser(text, tools)
        calls = [tool_call(each) for each in (cast("list[Any]", parsed) if isinstance(parsed, list) else [parsed])]
        if not calls:
            raise ValueError("no call")
        if self.name not in TAGGED and self.parser is not json_calls:
            for call in calls:
                _check_written(call, text)
        return calls, rest


def syntax_of(tokenizer: TokenizerWrapper, parser: ToolParser | None = None) -> CallSyntax:
    """How a model writes tool calls. parser: this server's parser for the format, if any."""
    given = cast("ToolParser", tokenizer.tool_parser)
    name = given.__module__.rpartition(".")[2]
    if parser is None:
        parser = TAGGED[name].parse if name in TAGGED else given
    return CallSyntax(name, tokenizer.tool_call_start or "", tokenizer.tool_call_end or "", parser)


def json_calls(text: str, tools: Any = None) -> list[Any]:
    """Consecutive JSON objects, or lists of them. Raises Unfinished if the text ends inside a string."""
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                raise Unfinished(error.msg) from error
            raise
        found += cast("list[Any]", value) if isinstance(value, list) else [value]
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


def tool_call(parsed: Any) -> ToolCall:
    """Raises ValueError, TypeError or KeyError for anything that is not a call."""
    if isinstance(parsed.get("function"), dict):
        parsed = {"id": parsed.get("id"), **parsed["function"]}
    name, id = parsed["name"], parsed.get("id")
    given = [_arguments(parsed[key]) for key in ARGUMENTS if parsed.get(key) is not None]
    if not name or not isinstance(name, str) or any(other != given[0] for other in given):
        raise ValueError("not a tool call")
    if not given and parsed.keys() - {"name", "id", "type", *ARGUMENTS}:
        raise ValueError("a call without arguments that has other keys than its name")
    text = json.dumps(given[0] if given else {}, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair cannot be sent, and raises here.
    (name + text).encode()
    return ToolCall(name, text, id if isinstance(id, str) and id else None)


def _arguments(given: Any) -> dict[str, Any]:
    """Arguments, which some models write as text. Raises ValueError if they are not an object."""
    if isinstance(given, str):
        given = json.loads(given.strip() or "{}")
        given = {} if given is None else given
    if not isinstance(given, dict):
        raise ValueError("arguments must be an object")
    return cast("dict[str, Any]", given)


def _check_written(call: ToolCall, text: str) -> None:
    """Raises ValueError if the name of the call or of an argument does not occur in the text: some parsers invent them."""
    for name in (call.name, *json.loads(call.arguments)):
        if name not in text and json.dumps(name)[1:-1] not in text:
            raise ValueError("the model did not write this call")


def _mistral_calls(text: str) -> tuple[list[Any], str]:
    """The calls at the beginning of a text, and the rest of it."""
    decoder = json.JSONDecoder()
    start = len(text) - len(text.lstrip())
    if text.startswith("[", start) and not text.startswith("[TOOL_CALLS]", start):
        found, at = decoder.raw_decode(text, start)
        return found, text[at:]
    found, at = list[Any](), 0
    while (header := MISTRAL_HEADER.match(text, at)) is not None:
        arguments, at = decoder.raw_decode(text, header.end())
        found.append({"name": header["name"], "id": header["id"], "arguments": arguments})
    return found, text[at:]


def _begins(text: str, parts: Sequence[str | re.Pattern[str]]) -> bool:
    """Whether a text begins with these parts, as far as it goes."""
    at = 0
    for part in parts:
        if isinstance(part, str):
            if not part.startswith(text[at : at + len(part)]):
                return False
            at += len(part)
        elif (found := part.match(text, at)) is not None:
            at = found.end()
        elif at < len(text):
            return False
        if at >= len(text):
            return True
    return True
