"""Which requests wait, prefill and run, and which is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from service.core import Overloaded, RequestState
from service.engine.prefill import Prefill
from service.engine.strategy import BURST
from service.engine.ticket import Ticket

RETRY_SECONDS = 5
DELAY = 1e-3
"""Seconds by which each token to be prefilled moves a request back in the queues. A request with 32,000 uncached tokens lets
much shorter ones pass that arrive within the next half minute."""
RECOUNT = 1.0
"""Seconds for which the number of a waiting request's cached tokens is remembered. Counting takes 0.25 ms for 30,000 tokens,
and while memory is short it would be repeated for all waiting requests before every round."""
GATHERED = 1 / 4
"""Prompts gather until they are this share of the running requests. A prefill delays all running requests for a time that
hardly depends on the number of prompts, but while prompts wait, rows are empty (docs/decisions/engine.md)."""


class Scheduler:
    """The queues and the decisions about them. It computes nothing and has no thread or lock. EngineThread holds its lock
    around methods that other threads also call, and around the waiting queue (reserve, release, add, next, drop_cancelled,
    admit, requeue, clear).

    A request waits until a row is free and memory suffices, prefills, and runs until it ends, unless it is preempted because
    memory runs out. Short prompts go before long ones, but none waits for ever (`DELAY`). A queue slot can be reserved before
    the request arrives. max_rows: maximum requests that prefill or run. max_waiting: maximum requests and reserved slots beyond
    those that free rows can take.
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
        """Every request and its state, in order of arrival. May be called from any thread, with the lock held."""
        # In the order in which requests progress, so that one that starts to run meanwhile appears in one state or in two, but
        # is not missed.
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
        """Raises Overloaded if the queue is full."""
        if len(self.waiting) + self.reserved >= self._max_waiting + self.free_rows:
            raise Overloaded("the queue is full", retry_after=RETRY_SECONDS)

    def reserve(self) -> None:
        """Reserve a queue slot for a future request. Raises Overloaded if the queue is full."""
        self.check_capacity()
        self.reserved += 1

    def release(self) -> None:
        """Release a reserved slot, unused or for its request."""
        self.reserved -= 1

    def add(self, ticket: Ticket) -> bool:
        """Queue a request. Returns True if it has to wait for a row."""
        self.waiting.append(ticket)
        return len(self.waiting) > self.free_rows

    def next(
        self,
        cached_tokens: Callable[[Sequence[int], str], int],
        now: float,
        has_room: Callable[[Ticket], bool] = lambda ticket: True,
    ) -> Ticket | None:
        """The request to admit next, which stays queued until `admit`. None if there is no free row, no waiting request, or not
        enough memory: smaller requests do not pass it, or it might wait for ever. cached_tokens: given a text and its salt, the
        number of cached tokens, counted at most once in `RECOUNT` seconds. now: perf_counter. has_room: whether memory
        suffices."""
        if not self.waiting or not self.free_rows:
            return None

        def turn(ticket: Ticket) -> float:
            if now >= ticket.counted_at + RECOUNT:
                ticket.cached, ticket.counted_at = cached_tokens(ticket.tokens, ticket.prompt.cache_salt), now
            return ticket.arrived_at + DELAY * (len(ticket.tokens) - ticket.cached)

        first = self.waiting[0] if len(self.waiting) <= self.free_rows else min(self.waiting, key=turn)
        return first if has_room(first) else None

    def admit(self, ticket: Ticket, prefill: Prefill) -> None:
        """Give a waiting request a row and start its prefill."""
        self.prefilling[ticket] = prefill
        self.waiting.remove(ticket)

    def requeue(self, ticket: Ticket) -> None:
        """Return a running request to the front of the queue. It keeps its answer so far."""
        self.running = [each for each in self.running if each is not ticket]
        self.waiting.appendleft(ticket)

    # ----------------------------------------------------------------------------------------------- prefill and decode

    def prefill_order(self) -> list[Prefill]:
        """The requests that prefill, next one first."""
        return sorted(self.prefilling.values(), key=lambda each: each.rows[0].arrived_at + DELAY * each.remaining)

    def prefill_is_due(self, now: float, gather_seconds: float, chunk: int) -> bool:
        """Whether to prefill before the next round. A started prefill continues. A new one starts when enough prompts have
        gathered, when they have half of a chunk's tokens and would not share a call anyway, or when one has had its row for
        `gather_seconds`. now: perf_counter."""
        prefilling, running = self.prefilling.values(), len(self.running)
        if not all(each.unstarted for each in prefilling) or len(prefilling) >= GATHERED * running:
            return bool(prefilling)
        enough = sum(each.remaining for each in prefilling) >= chunk // 2
        return enough or any(now - each.admitted_at >= gather_seconds for each in prefilling)

    def prefill_tokens(self, chunk: int) -> int:
        """How many prompt tokens may be prefilled before the next round: one chunk, or BURST chunks while more requests prefill
        than run, since few are delayed then."""
        return chunk * (BURST if len(self.prefilling) > len(self.running) else 1)

    def prefilled(self, prefill: Prefill) -> None:
        """Mark the rows of `prefill` as running, their prompts being prefilled."""
        rows = {id(row) for row in prefill.rows}
        done = [ticket for ticket in self.prefilling if id(ticket.row) in rows]
        # In this order, because other threads read `unfinished` meanwhile.
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
        """The cancelled requests in rows, which keep their rows until `remove`."""
        return [ticket for ticket in [*self.prefilling, *self.running] if ticket.cancelled.is_set()]

    def remove(self, tickets: Collection[Ticket]) -> None:
        """Free the rows of requests that ended."""
        self.prefilling = {ticket: each for ticket, each in self.prefilling.items() if ticket not in tickets}
        self.running = [ticket for ticket in self.running if ticket not in tickets]

    def clear(self) -> list[Ticket]:
        """Remove every request, and return them. Reserved slots are not affected."""
        tickets = [*self.waiting, *self.prefilling, *self.running]
        self.waiting.clear()
        self.prefilling, self.running = {}, []
        return tickets
