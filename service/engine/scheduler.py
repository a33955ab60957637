"""Which requests wait, prefill and run, and which of them is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from service.core import Overloaded, RequestState
from service.engine.prefill import Prefill
from service.engine.strategy import BURST
from service.engine.ticket import Ticket

RETRY_SECONDS = 5
DELAY = 1e-3
"""Seconds that each token to be prefilled moves a request back in the queues: one of 32,000 tokens that are not in the prefix
cache lets those pass that arrive within the next half minute and are much shorter."""
RECOUNT = 1.0
"""Seconds for which it is remembered how many tokens of a waiting request are in the prefix cache: with 30,000 tokens counting
takes 0.25 ms, and while memory is short it would be done for all that wait before every round."""
GATHERED = 1 / 4
"""Prompts gather until they are this share of the requests that run. A prefill holds up all that run, for a time that hardly
depends on how many prompts it is for; while prompts wait, rows are empty (docs/decisions/engine.md)."""


class Scheduler:
    """Queues and the decisions about them. It computes nothing and has no thread or lock: EngineThread holds its own lock
    around what other threads call too and around the queue itself (reserve, release, add, next, drop_cancelled, admit, requeue,
    clear).

    A request waits until a row is free and memory does for it, prefills, and runs until its end, unless it goes back to the
    queue because memory runs out. Short prompts go before long ones, but none waits for ever (`DELAY`). A place in the queue
    can be reserved before the request is there. max_rows: requests that prefill or run, at most. max_waiting: requests and
    reserved places, at most, beyond those that free rows can take.
    """

    def __init__(self, max_rows: int, max_waiting: int) -> None:
        self.waiting: deque[Ticket] = deque()
        self.reserved = 0
        self.prefilling: dict[Ticket, Prefill] = {}
        self.running: list[Ticket] = []
        self._max_rows = max_rows
        self._max_waiting = max_waiting

    @property
    def rows(self) -> int:
        """Requests that prefill or run."""
        return len(self.running) + len(self.prefilling)

    @property
    def free_rows(self) -> int:
        """Rows for which a request could be admitted."""
        return max(0, self._max_rows - self.rows)

    def states(self) -> list[tuple[Ticket, RequestState]]:
        """Every request and its state, the first to arrive first. From any thread, under the lock."""
        # In the order in which they move on: a request that starts to run meanwhile is seen in one state or in two.
        found = dict.fromkeys(self.waiting, RequestState.WAITING)
        found |= dict.fromkeys(self.prefilling, RequestState.PREFILLING)
        found |= dict.fromkeys(self.running, RequestState.RUNNING)
        return sorted(found.items(), key=lambda item: item[0].arrived_at)

    @property
    def unfinished(self) -> bool:
        """Whether there is any request."""
        return bool(self.waiting or self.prefilling or self.running)

    # ------------------------------------------------------------------------------------------------------- admission

    def check_capacity(self) -> None:
        """Raises Overloaded when the queue is full."""
        if len(self.waiting) + self.reserved >= self._max_waiting + self.free_rows:
            raise Overloaded("the queue is full", retry_after=RETRY_SECONDS)

    def reserve(self) -> None:
        """Take a place in the queue for a request to come. Raises Overloaded when the queue is full."""
        self.check_capacity()
        self.reserved += 1

    def release(self) -> None:
        """Give a reserved place back, or up for its request."""
        self.reserved -= 1

    def add(self, ticket: Ticket) -> bool:
        """Queue a request. True when it has to wait for a row."""
        self.waiting.append(ticket)
        return len(self.waiting) > self.free_rows

    def next(
        self,
        cached_tokens: Callable[[Sequence[int], str], int],
        now: float,
        has_room: Callable[[Ticket], bool] = lambda ticket: True,
    ) -> Ticket | None:
        """The request to admit next, which goes on waiting until `admit`; None without a free row or a waiting request, or
        where there is no room for it: smaller ones do not pass it, or it might wait for ever. cached_tokens: of a text with
        this salt, those that need no prefill, counted once in `RECOUNT` seconds. now: perf_counter. has_room: whether memory
        does."""
        if not self.waiting or not self.free_rows:
            return None

        def turn(ticket: Ticket) -> float:
            if now >= ticket.counted_at + RECOUNT:
                ticket.cached, ticket.counted_at = cached_tokens(ticket.tokens, ticket.prompt.cache_salt), now
            return ticket.arrived_at + DELAY * (len(ticket.tokens) - ticket.cached)

        first = self.waiting[0] if len(self.waiting) <= self.free_rows else min(self.waiting, key=turn)
        return first if has_room(first) else None

    def admit(self, ticket: Ticket, prefill: Prefill) -> None:
        """Give a waiting request a row, where its prefill begins."""
        self.prefilling[ticket] = prefill
        self.waiting.remove(ticket)

    def requeue(self, ticket: Ticket) -> None:
        """Put a request that runs back into the queue, in front of the others. It keeps what it has of its answer."""
        self.running = [each for each in self.running if each is not ticket]
        self.waiting.appendleft(ticket)

    # ----------------------------------------------------------------------------------------------- prefill and decode

    def prefill_order(self) -> list[Prefill]:
        """The requests that prefill, the next one first."""
        return sorted(self.prefilling.values(), key=lambda each: each.rows[0].arrived_at + DELAY * each.remaining)

    def prefill_is_due(self, now: float, gather_seconds: float, chunk: int) -> bool:
        """Whether to prefill before the next round: a prefill that was started continues, and one starts when enough prompts
        have gathered, when they are half of a chunk of so many tokens and would not share a call, or when one has had its row
        for `gather_seconds`. now: perf_counter."""
        prefilling, running = self.prefilling.values(), len(self.running)
        if not all(each.unstarted for each in prefilling) or len(prefilling) >= GATHERED * running:
            return bool(prefilling)
        enough = sum(each.remaining for each in prefilling) >= chunk // 2
        return enough or any(now - each.admitted_at >= gather_seconds for each in prefilling)

    def prefill_tokens(self, chunk: int) -> int:
        """How many prompt tokens may be prefilled before the next round: a chunk, or BURST while more requests prefill than
        run, since then few are held up."""
        return chunk * (BURST if len(self.prefilling) > len(self.running) else 1)

    def prefilled(self, prefill: Prefill) -> None:
        """The rows of `prefill` have their prompts, and run from now on."""
        rows = {id(row) for row in prefill.rows}
        done = [ticket for ticket in self.prefilling if id(ticket.row) in rows]
        # In this order: `unfinished` is read by other threads meanwhile.
        self.running += done
        self.prefilling = {ticket: each for ticket, each in self.prefilling.items() if ticket not in done}

    # ------------------------------------------------------------------------------------------------------- the end

    def drop_cancelled(self) -> list[Ticket]:
        """Remove the waiting requests that were cancelled, and return them."""
        cancelled = [ticket for ticket in self.waiting if ticket.cancelled.is_set()]
        for ticket in cancelled:
            self.waiting.remove(ticket)
        return cancelled

    def cancelled(self) -> list[Ticket]:
        """The requests in rows that were cancelled; they keep their rows until `remove`."""
        return [ticket for ticket in [*self.prefilling, *self.running] if ticket.cancelled.is_set()]

    def remove(self, tickets: Collection[Ticket]) -> None:
        """Free the rows of requests that ended."""
        self.prefilling = {ticket: each for ticket, each in self.prefilling.items() if ticket not in tickets}
        self.running = [ticket for ticket in self.running if ticket not in tickets]

    def clear(self) -> list[Ticket]:
        """Remove every request, and return them. Reserved places stay with whoever holds them."""
        tickets = [*self.waiting, *self.prefilling, *self.running]
        self.waiting.clear()
        self.prefilling, self.running = {}, []
        return tickets
