"""Threads of Anthropic's SDKs: a request that continues a message sends only what is new (`thread`)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from service.api.anthropic.schemas import BlockAnswer, Message, MessagesRequest, ThreadContinue, ThreadHead
from service.api.errors import ThreadNotFound
from service.api.replies import PendingReply
from service.core import BadRequest

_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


def message_name(id: str) -> str:
    """The id under which clients know the answer to a request."""
    return f"msg_{id}"


def continued(body: MessagesRequest, pending: PendingReply, not_kept: str) -> MessagesRequest:
    """The request extended by its thread's earlier messages, and by the thread's system prompt and tools if it has
    none. not_kept: the message for a missing one. Raises ThreadNotFound."""
    if not isinstance(body.thread, ThreadContinue):
        return body
    name = body.thread.previous_message_id
    reply = pending.take(name) if name.startswith(message_name("")) else None
    if reply is None:
        raise ThreadNotFound(f"the message of this previous_message_id {not_kept}")
    try:
        head = ThreadHead.model_validate_json(reply.parts[0])
        before = _MESSAGES.validate_json(b"[%b]" % b",".join(reply.parts[1:]))
    except ValidationError:
        raise BadRequest("the model's earlier answer cannot be used as input", field="thread") from None
    return body.model_copy(
        update={
            "messages": [*before, *body.messages],
            "system": body.system or head.system,
            "tools": body.tools or head.tools,
        }
    )


def kept_parts(body: MessagesRequest, content: Sequence[BlockAnswer]) -> list[bytes]:
    """A conversation and its answer, in the form that `continued` reads."""
    head = ThreadHead(system=body.system, tools=body.tools)
    answer = _MESSAGES.validate_python([{"role": "assistant", "content": [block.model_dump() for block in content]}])
    parts = [head, *body.messages, *answer]
    return [part.model_dump_json(by_alias=True, exclude_none=True).encode() for part in parts]
