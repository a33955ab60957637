"""Items of /v1/responses: resolves references to earlier ones, turns all into a chat, and stores them with the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import TypeAdapter, ValidationError

from service.api.compatible import past_arguments
from service.api.errors import ItemNotFound, ResponseNotFound
from service.api.openai.responses_schemas import (
    FunctionCallItem,
    FunctionCallOutputItem,
    HostedItem,
    Item,
    MessageItem,
    Output,
    Parts,
    ReasoningItem,
    Reference,
    ResponsesRequest,
)
from service.api.replies import PendingReply
from service.core import BadRequest

ServedItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
KEPT_FIELDS = {"type", "role", "content", "call_id", "name", "arguments", "output"}
"""Fields of an item that chat templates read."""
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def response_name(id: str) -> str:
    """The id under which clients know the answer to a request."""
    return f"resp_{id}"


def conversation(body: ResponsesRequest, pending: PendingReply, not_kept: str) -> list[ServedItem]:
    """The whole input, including items taken from earlier responses. not_kept: the message for a missing response.
    Raises ResponseNotFound, ItemNotFound, and BadRequest if no usable item is left."""
    items: list[ServedItem] = []
    if body.previous_response_id:
        name = body.previous_response_id
        reply = pending.take(name) if name.startswith(response_name("")) else None
        if reply is None:
            raise ResponseNotFound(f"the response of this previous_response_id {not_kept}")
        items += _read(reply.parts)
    given = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in given:
        if isinstance(item, Reference):
            if (part := pending.take_item(item.id)) is None:
                raise ItemNotFound(f"the response of an item_reference {not_kept} (in the AI SDK: store: false)")
            items += _read([part])
        elif not isinstance(item, HostedItem):
            items.append(item)
    if not items:
        raise BadRequest("input contains no supported item", field="input")
    return items


def _read(parts: Sequence[bytes]) -> list[ServedItem]:
    try:
        read = _ITEMS.validate_json(b"[%b]" % b",".join(parts))
    except ValidationError:
        raise BadRequest("the model's earlier answer cannot be used as input", field="input") from None
    return [item for item in read if not isinstance(item, Reference | HostedItem)]


def kept_parts(items: Iterable[ServedItem | Output]) -> list[bytes]:
    """The JSON of each item, in the form that `conversation` reads."""
    return [item.model_dump_json(include=KEPT_FIELDS, exclude_none=True).encode() for item in items]


def turns_of(instructions: str | None, items: Iterable[ServedItem]) -> list[dict[str, object]]:
    """Items in the form chat templates expect. Consecutive reasoning, text and calls of the assistant form one turn."""
    turns: list[dict[str, object]] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    own: dict[str, object] | None = None
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            own = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            turns.append({"role": role, "content": _text(item.content)})
            own = None
            continue
        if own is None:
            own = {"role": "assistant", "content": ""}
            turns.append(own)
        match item:
            case MessageItem():
                own["content"] = f"{own['content']}{_text(item.content)}"
            case ReasoningItem():
                own["reasoning_content"] = "".join(part.text for part in item.content or ())
            case FunctionCallItem():
                function = {"name": item.name, "arguments": past_arguments(item.arguments)}
                calls = own.setdefault("tool_calls", [])
                assert isinstance(calls, list)
                calls.append({"id": item.call_id, "type": "function", "function": function})
    return turns


def _text(parts: Parts) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)
