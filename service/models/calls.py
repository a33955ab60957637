"""Grammars of answers that call tools, by the model's tool call format."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_lm.tool_parsers import json_tools, qwen3_coder

from service.core import BadRequest, Grammar, GrammarKind
from service.models.call_syntax import ToolParser, json_calls
from service.models.grammar import JSON_STYLE
from service.models.tagged_calls import QWEN
from service.models.tokens import TokenTable
from service.models.xml_calls import XmlCalls

Tools = Sequence[Mapping[str, Any]]
"""Functions in OpenAI's shape."""


class CallFormat(Protocol):
    """How a model writes tool calls."""

    def rules(self, tools: Tools, style: Mapping[str, Any], end: str, bound: Collection[str]) -> list[str]:
        """Lark rules `call_0`, `call_1` and so on: calls of these tools, without the surrounding markers.

        Arguments satisfy the schemas of the tools named by `bound`. style: how JSON is written. end: the text of the marker
        after a call. Raises BadRequest for a tool whose schema the format cannot express.
        """
        ...

    def parse(self, text: str, tools: Any) -> Any:
        """The calls in the text between two markers, as mlx-lm's parsers return them."""
        ...


class JsonCalls:
    """A JSON object of name and arguments: mlx-lm's json_tools."""

    def rules(self, tools: Tools, style: Mapping[str, Any], end: str, bound: Collection[str]) -> list[str]:
        """See CallFormat. Arguments of tools that are not bound are any object."""
        rules: list[str] = []
        for i, tool in enumerate(tools):
            function = tool["function"]
            parameters = function.get("parameters") if function["name"] in bound else None
            # Each schema is a separate document, within which its references are resolved.
            schema = {**(parameters or {"type": "object"}), "x-guidance": style}
            before = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
            rules += [
                f'call_{i}: "\\n" {before} arguments_{i} "}}" "\\n"',
                f"arguments_{i}: %json {json.dumps(schema)}",
            ]
        return rules

    def parse(self, text: str, tools: Any) -> Any:
        """See CallFormat."""
        return json_calls(text)


FORMATS: Mapping[ToolParser | None, CallFormat] = {
    json_tools.parse_tool_call: JsonCalls(),
    qwen3_coder.parse_tool_call: XmlCalls(
        call="\n<function={}>\n",
        parameter="<parameter={}>\n",
        value_end="\n</parameter>",
        separator="\n",
        call_end="</function>\n",
        lenient=QWEN.parse,
    ),
}
"""The formats that have a grammar, by mlx-lm's parser."""


@dataclass(frozen=True)
class Markers:
    """The texts around a call, and both in Lark's form: special tokens by id, other text as strings."""

    start_text: str
    end_text: str
    start: tuple[str, ...]
    end: tuple[str, ...]

    @staticmethod
    def of(start: str, end: str, table: TokenTable, vocabulary: int) -> Markers:
        """Markers with these texts. vocabulary: width of the target's logits, which may lack special tokens of the table."""
        special = {name: id for name, id in table.special.items() if id < vocabulary}
        return Markers(start, end, _marker(start, special), _marker(end, special))


def _marker(text: str, special: Mapping[str, int]) -> tuple[str, ...]:
    # By id, because a name must look like `<name>` in Lark, which Mistral's `[TOOL_CALLS]` does not.
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = re.split(f"({names})", text) if names else [text]
    return tuple(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def forced_calls(
    format: CallFormat, markers: Markers, tools: Tools, *, several: bool, otherwise: Grammar | None = None
) -> str:
    """The Lark grammar of one call or several of these tools, with valid arguments, or of JSON under the schema of `otherwise`.

    Raises BadRequest if `otherwise` is not JSON, or the format cannot express a tool's schema.
    """
    names = [tool["function"]["name"] for tool in tools]
    rules = [f"call: {' '.join(markers.start)} body", *_bodies(format, markers, tools, names)]
    calls = 'call ("\\n" call)*' if several else "call"
    if otherwise is None:
        return "\n".join([f"start: {calls}", *rules])
    if otherwise.kind is not GrammarKind.JSON_SCHEMA:
        raise BadRequest("tools go with JSON alone: set tool_choice to none", field=otherwise.field)
    schema = {**json.loads(otherwise.source), "x-guidance": JSON_STYLE}
    return "\n".join([f"start: {calls} | answer", *rules, f"answer: %json {json.dumps(schema)}"])


def free_calls(format: CallFormat, markers: Markers, tools: Tools, strict: Collection[str]) -> str:
    """The Lark grammar of any text that may contain calls. Arguments are valid for the tools named by `strict`.

    Raises BadRequest if the format cannot express the schema of one of them.
    """
    # The reader finds a marker in the answer's text, so a call also begins where ordinary tokens spell the marker out. The lazy
    # rule ends the text as soon as the marker is complete. A special token is not text: TEXT ends before it.
    spelled = json.dumps(markers.start_text)
    opened = ["spelled"] if markers.start == (spelled,) else ["spelled", f"TEXT {' '.join(markers.start)}"]
    rules = [f"call: ({' | '.join(opened)}) body", f"spelled[lazy]: TEXT {spelled}"]
    bodies = _bodies(format, markers, tools, strict)
    return "\n".join(["start: call* TEXT", "TEXT: /(.|\\n)*/", *rules, *bodies])


def _bodies(format: CallFormat, markers: Markers, tools: Tools, bound: Collection[str]) -> list[str]:
    """Rules for what follows a call's opening marker."""
    calls = " | ".join(f"call_{i}" for i in range(len(tools)))
    return [f"body: ({calls}) {' '.join(markers.end)}", *format.rules(tools, JSON_STYLE, markers.end_text, bound)]
