"""The scheduler alone: who is admitted, prefilled, and dropped. Its caller computes nothing here."""

import time
from collections.abc import Sequence

import mlx.core as mx
import pytest

from service.core import Overloaded, Prompt, Sampling
from service.engine.decoder import Decoder
from service.engine.prefill import Prefill
from service.engine.request import Request
from service.engine.scheduler import Scheduler
from service.engine.ticket import Ticket
from tests.support.oracle import tiny_llama

CHUNK = 16


class Requests:
    """Makes tickets, and rows and prefills for them."""

    def __init__(self) -> None:
        self.decoder = Decoder(tiny_llama(0), None, vocabulary=97, k=0, prefill_chunk=CHUNK, key=mx.random.key(1))

    def ticket(self, length: int = 3) -> Ticket:
        return Ticket(Prompt(tuple(5 + i % 3 for i in range(length)), Sampling()), lambda event: None)

    def admit(self, scheduler: Scheduler) -> list[Ticket]:
        """Admit as many as the scheduler names."""
        admitted: list[Ticket] = []
        while (ticket := scheduler.next(self.decoder.prefixes.cached_tokens, time.perf_counter())) is not None:
            ticket.row = Request(ticket.id, ticket.prompt, frozenset(), None, arrived_at=ticket.arrived_at)
            scheduler.admit(ticket, self.decoder.start_prefill(ticket.row))
            admitted.append(ticket)
        return admitted


@pytest.fixture(scope="module")
def requests() -> Requests:
    return Requests()


def both(first: Prefill, second: Prefill) -> Prefill:
    """Two prompts that were prefilled in one call."""
    return Prefill([*first.rows, *second.rows], first.target_cache, None, 0)


def test_requests_are_admitted_in_order_as_rows_become_free(requests: Requests) -> None:
    scheduler = Scheduler(max_rows=2, max_waiting=8)
    tickets = [requests.ticket() for _ in range(5)]
    assert [scheduler.add(ticket) for ticket in tickets] == [False, False, True, True, True]
    assert (
        requests.admit(scheduler) == tickets[:2]
        and scheduler.next(requests.decoder.prefixes.cached_tokens, time.perf_counter()) is None
    )
    assert (scheduler.rows, scheduler.free_rows, len(scheduler.waiting)) == (2, 0, 3)
    # A request that prefills takes a row, like one that runs.
    scheduler.prefilled(scheduler.prefilling[tickets[1]])
    assert (scheduler.running, [*scheduler.prefilling]) == ([tickets[1]], [tickets[0]])
    scheduler.remove([tickets[0]])
    assert requests.admit(scheduler) == [tickets[2]]
    scheduler.remove([tickets[1], tickets[2]])
    assert requests.admit(scheduler) == tickets[3:]
    scheduler.remove(tickets)
    assert not scheduler.unfinished


def _whole(tokens: Sequence[int], salt: str) -> int:
    """All of a text is in the prefix cache."""
    return len(tokens)


def test_short_prompts_go_before_long_ones_and_none_waits_for_ever(requests: Requests) -> None:
    """2,000 tokens let those pass that arrive within nearly two seconds, whether they wait for a row or prefill; where all
    are admitted, that is in order of arrival."""
    scheduler = Scheduler(max_rows=3, max_waiting=8)
    long, short, late = (requests.ticket(length) for length in (2001, 11, 11))
    for ticket, seconds in ((long, 0.0), (short, 1.0), (late, 2.0)):
        ticket.arrived_at = seconds
        scheduler.add(ticket)
    narrow = Scheduler(max_rows=1, max_waiting=8)
    narrow.waiting = scheduler.waiting.copy()
    cached = requests.decoder.prefixes.cached_tokens
    assert narrow.next(cached, 10.0) is short and scheduler.next(cached, 10.0) is long
    assert narrow.next(_whole, 10.9) is short, "what is cached is remembered for a second"
    assert narrow.next(_whole, 11.0) is long, "what is in the prefix cache costs nothing"
    requests.admit(scheduler)
    order = [scheduler.prefilling[ticket] for ticket in (short, long, late)]
    assert scheduler.prefill_order() == order
    # What is left of it counts.
    assert not requests.decoder.prefill(scheduler.prefilling[long])
    assert scheduler.prefilling[long].remaining == 2000 - CHUNK
    scheduler.prefilling[short].rows[0].arrived_at = 1.98
    assert scheduler.prefill_order() == [order[1], order[0], order[2]]


def test_prompts_prefilled_in_one_call_run_together_in_order_of_arrival(requests: Requests) -> None:
    scheduler = Scheduler(max_rows=3, max_waiting=0)
    tickets = [requests.ticket() for _ in range(3)]
    for ticket in tickets:
        scheduler.add(ticket)
    requests.admit(scheduler)
    scheduler.prefilled(both(scheduler.prefilling[tickets[2]], scheduler.prefilling[tickets[0]]))
    assert (scheduler.running, [*scheduler.prefilling]) == ([tickets[0], tickets[2]], [tickets[1]])
    scheduler.prefilled(scheduler.prefilling[tickets[1]])
    assert scheduler.running == [tickets[0], tickets[2], tickets[1]] and not scheduler.prefilling


def test_two_chunks_are_prefilled_before_a_round_while_more_prefill_than_run(requests: Requests) -> None:
    scheduler = Scheduler(max_rows=4, max_waiting=0)
    tickets = [requests.ticket() for _ in range(4)]
    for ticket in tickets:
        scheduler.add(ticket)
    requests.admit(scheduler)
    budgets = [scheduler.prefill_tokens(CHUNK)]
    for ticket in tickets:
        scheduler.prefilled(scheduler.prefilling[ticket])
        budgets.append(scheduler.prefill_tokens(CHUNK))
    assert budgets == [2 * CHUNK, 2 * CHUNK, CHUNK, CHUNK, CHUNK]


def test_prompts_gather_while_requests_run(requests: Requests) -> None:
    """Eight run: a prefill begins with two prompts, or when one has had its row for long enough, or is long itself; and it
    continues once it was started."""
    scheduler, seconds = Scheduler(max_rows=16, max_waiting=0), 0.1
    for _ in range(8):
        scheduler.add(requests.ticket())
    first, *others = requests.admit(scheduler)
    now = time.perf_counter()

    def due(after: float = 0.0, gather: float = seconds) -> bool:
        return scheduler.prefill_is_due(now + after, gather, CHUNK)

    assert due(gather=60.0), "nobody runs"
    for ticket in (first, *others):
        scheduler.prefilled(scheduler.prefilling[ticket])
    assert not due(gather=0.0), "there is none"
    one = requests.ticket()
    # It waited for a row for long: others that did are still to come.
    one.arrived_at -= 60.0
    scheduler.add(one)
    requests.admit(scheduler)
    now = scheduler.prefilling[one].admitted_at
    assert [due(after) for after in (0.0, 0.09, 0.11)] == [False, False, True] and due(gather=0.0)
    scheduler.add(requests.ticket())
    (two,) = requests.admit(scheduler)
    assert due(), "a quarter of those that run"
    scheduler.remove([two])
    assert not due()
    scheduler.add(requests.ticket(CHUNK // 2 + 1))
    (long,) = requests.admit(scheduler)
    scheduler.remove([one])
    assert due(), "it would share no call"
    scheduler.remove([long])
    scheduler.add(requests.ticket(CHUNK // 2))
    (short,) = requests.admit(scheduler)
    assert not due()
    requests.decoder.prefill(scheduler.prefilling[short])
    assert due(), "it was started"


def test_the_queue_holds_max_waiting_beyond_the_free_rows(requests: Requests) -> None:
    scheduler = Scheduler(max_rows=1, max_waiting=2)
    scheduler.reserve()
    for _ in range(2):
        scheduler.check_capacity()
        scheduler.add(requests.ticket())
    for refused in (scheduler.check_capacity, scheduler.reserve):
        with pytest.raises(Overloaded):
            refused()
    # Admission moves a request from the queue to the row that was free: the capacity stays.
    requests.admit(scheduler)
    with pytest.raises(Overloaded):
        scheduler.reserve()
    scheduler.release()
    scheduler.reserve()
    scheduler.remove([*scheduler.prefilling])
    scheduler.reserve()


def test_cancelled_requests_leave_the_queue_at_once_and_rows_when_they_are_removed(requests: Requests) -> None:
    scheduler = Scheduler(max_rows=2, max_waiting=4)
    tickets = [requests.ticket() for _ in range(4)]
    for ticket in tickets:
        scheduler.add(ticket)
    requests.admit(scheduler)
    scheduler.prefilled(scheduler.prefilling[tickets[1]])
    for ticket in tickets[:3]:
        ticket.cancel()
    assert scheduler.drop_cancelled() == [tickets[2]] and list(scheduler.waiting) == [tickets[3]]
    assert (
        scheduler.cancelled() == tickets[:2]
        and scheduler.rows == 2
        and scheduler.next(requests.decoder.prefixes.cached_tokens, time.perf_counter()) is None
    )
    scheduler.remove(scheduler.cancelled())
    assert (scheduler.rows, scheduler.next(requests.decoder.prefixes.cached_tokens, time.perf_counter())) == (
        0,
        tickets[3],
    )


def test_clear_returns_every_request_and_keeps_reserved_places(requests: Requests) -> None:
    scheduler = Scheduler(max_rows=2, max_waiting=4)
    tickets = [requests.ticket() for _ in range(3)]
    for ticket in tickets:
        scheduler.add(ticket)
    scheduler.reserve()
    requests.admit(scheduler)
    scheduler.prefilled(scheduler.prefilling[tickets[0]])
    assert set(scheduler.clear()) == set(tickets)
    assert not scheduler.unfinished and scheduler.clear() == [] and scheduler.reserved == 1
