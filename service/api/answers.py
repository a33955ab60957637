"""The answers to a request as they grow: text, reasoning and tool calls in the order the model wrote them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from operator import attrgetter

from fastapi import Request, Response

from service.api.errors import answer as error_response
from service.api.exchange import Exchange
from service.core import (
    AnswerReader,
    Delta,
    Finished,
    FinishReason,
    Piece,
    PieceKind,
    PromptLogprobs,
    RedraftError,
    Timings,
    TokenLogprobs,
    ToolCall,
)

CLIENT_GONE = 499
"""nginx's status for a client that disconnected; no client sees it."""


class EndReason(StrEnum):
    """Why an answer ended, in OpenAI's terms."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(slots=True)
class Answer:
    """One answer so far. reader: None if the text is not split."""

    reader: AnswerReader | None
    pieces: list[Piece] = field(default_factory=list[Piece])
    """As they came, in order."""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    """Its tool calls, each with an id."""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    tokens: int = 0
    """Output tokens so far."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of its prompt, if requested; available before anything else."""
    finished: Finished | None = None
    begun: bool = False
    """Its first token has arrived, or its end without any."""
    enough: bool = False
    """It was ended after its first call; later output is ignored."""

    @property
    def text(self) -> str:
        """All text."""
        return self._joined(PieceKind.TEXT)

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return self._joined(PieceKind.REASONING)

    def _joined(self, kind: PieceKind) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind is kind)

    @property
    def items(self) -> list[Piece]:
        """The pieces with adjacent ones of the same kind joined: texts, reasonings and calls."""
        joined: list[Piece] = []
        for kind, group in groupby(self.pieces, key=attrgetter("kind")):
            pieces = list(group)
            joined += pieces if kind is PieceKind.CALL else [Piece(kind, "".join(piece.text for piece in pieces))]
        return joined

    @property
    def timings(self) -> Timings:
        """Timings of the finished answer."""
        assert self.finished is not None
        return self.finished.timings

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self.finished is None else self.finished.stopped_by

    @property
    def reason(self) -> EndReason:
        """Why it ended."""
        assert self.finished is not None
        if self.finished.finish is FinishReason.LENGTH and not self.enough:
            return EndReason.LENGTH
        if self.calls:
            return EndReason.TOOL_CALLS
        # A cancelled answer is incomplete, for which these routes only have one value.
        return EndReason.STOP if self.finished.finish is FinishReason.STOP else EndReason.LENGTH

    def add(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Appends pieces. Returns them as they are to be sent, each call with a unique id."""
        sent: list[Piece] = []
        for piece in pieces:
            new = piece
            if piece.call is not None:
                call = piece.call
                if call.id is None or any(call.id == other.id for other in self.calls):
                    call = replace(call, id=f"call_{uuid.uuid4().hex[:24]}")
                self.calls.append(call)
                new = replace(piece, call=call)
            sent.append(new)
        self.pieces += sent
        return sent


@dataclass(frozen=True, slots=True)
class Part:
    """What one event added to an answer. first: it contains the first token, whose text may still be withheld, or the
    end of an empty answer. ended: it was the last one."""

    index: int
    pieces: Sequence[Piece]
    logprobs: Sequence[TokenLogprobs]
    first: bool
    ended: bool


async def read_parts(
    exchange: Exchange, answers: Sequence[Answer], patience: float | None, *, one_call: bool = False
) -> AsyncIterator[Part | None]:
    """Yields the additions to the answers, event by event, after storing them there. patience: for streams, None is
    yielded after this many seconds without an addition, even if a withheld text grew. one_call: an answer ends after
    its first tool call. Raises like Exchange.events."""
    added_at = time.monotonic()
    async for event in exchange.events(patience):
        if event is None:
            yield None
            added_at = time.monotonic()
            continue
        index, what = event
        answer = answers[index]
        full = one_call and bool(answer.calls)
        if isinstance(what, Delta):
            answer.tokens += len(what.tokens)
            answer.prompt_logprobs = what.prompt_logprobs or answer.prompt_logprobs
            new = [] if full else _read(answer, what.text)
            logprobs = () if full else what.logprobs
        else:
            cut = what.finish is not FinishReason.STOP or what.stopped_by is not None
            new = [] if full or answer.reader is None else answer.reader.finish(cut)
            logprobs = ()
            answer.finished = what
        if one_call and (at := _first_call(new)) is not None:
            new = new[: at + 1]
            answer.enough = True
            exchange.end(index)
        answer.logprobs += logprobs
        pieces = answer.add(new)
        first = not answer.begun and (isinstance(what, Finished) or bool(what.tokens))
        answer.begun = answer.begun or first
        if pieces or logprobs or first or answer.finished is not None:
            yield Part(index, pieces, logprobs, first, answer.finished is not None)
            added_at = time.monotonic()
        elif patience is not None and time.monotonic() - added_at >= patience:
            yield None
            added_at = time.monotonic()


def _read(answer: Answer, text: str) -> list[Piece]:
    if answer.reader is not None:
        return answer.reader.add(text)
    return [Piece(PieceKind.TEXT, text)] if text else []


def _first_call(pieces: Sequence[Piece]) -> int | None:
    return next((i for i, piece in enumerate(pieces) if piece.call is not None), None)


async def collect(
    exchange: Exchange, answers: Sequence[Answer], request: Request, *, one_call: bool = False
) -> Response | None:
    """Waits for complete answers. Returns the response if there are none: the error, or None as soon as the client
    disconnects, which a handler that writes nothing only learns by receiving. Closes the exchange at the end."""

    async def whole() -> None:
        async for _ in read_parts(exchange, answers, None, one_call=one_call):
            pass

    answered = asyncio.create_task(whole())
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            return Response(status_code=CLIENT_GONE)
        answered.result()
        return None
    except RedraftError as error:
        return error_response(error, request.scope)
    finally:
        answered.cancel()
        gone.cancel()
        exchange.close()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def combined_timings(answers: Sequence[Answer], per_prompt: int) -> Timings:
    """The timings of several answers, `per_prompt` for each prompt: tokens and rounds are summed, times are the longest."""
    return Timings.combined([answer.timings for answer in answers], per_prompt)
