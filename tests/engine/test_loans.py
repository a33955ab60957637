"""Memory that serving lends: what gives way to it, and requests that need it back."""

import pytest

from service.core import FinishReason
from service.engine.kv.budget import Budget
from service.engine.strategy import CPU, STEP, current
from tests.engine.test_budget import GROWING, BudgetHarness, of_keys_and_values
from tests.engine.test_thread import BlockingHook, decoding, long_prompts, prompt, wait_for
from tests.support.oracle import noisy_copy, tiny_llama

pytestmark = pytest.mark.skipif(current() is not CPU, reason="rows are in rectangles on a CPU")
ROOM = 12 * STEP
"""Positions that the budget is for."""


def size(positions: int) -> int:
    """Bytes of so many positions while their batch grows."""
    return GROWING * positions * of_keys_and_values(tiny_llama(0), noisy_copy(tiny_llama(0), 1, 0.3)).first


def test_cached_prefixes_give_way_and_short_requests_are_answered_beside_it() -> None:
    with BudgetHarness(ROOM) as harness:
        harness.submit(prompt(1, 3 * STEP, 8)).finished()
        assert harness.engine is not None and harness.engine.decoder.batch.prefix is not None
        prefix = harness.engine.decoder.batch.prefix
        wait_for(lambda: prefix.nbytes > size(STEP) // GROWING, "the prompt is cached")
        assert harness.thread.lend(size(ROOM) + 1, size(ROOM) + 1).result(10) == 0, "more than there is"
        assert prefix.nbytes > 0, "nothing is evicted in vain"
        assert harness.thread.lend(2 * size(ROOM), size(STEP)).result(10) == size(ROOM) == harness.budget.size
        assert prefix.nbytes == 0
        harness.thread.take_back()
        assert harness.thread.lend(size(ROOM - 4 * STEP), 1).result(10) == size(ROOM - 4 * STEP)
        harness.submit(prompt(2, 12, 24)).finished()
        assert not harness.thread.loan_needed
        assert prefix.nbytes <= size(4 * STEP), "new prefixes leave it alone too"


def test_a_request_that_needs_it_waits_until_it_is_back() -> None:
    long = prompt(1, 6 * STEP, 8)
    with BudgetHarness(ROOM) as harness:
        assert harness.thread.lend(size(ROOM - 4 * STEP), 1).result(10) > 0
        client = harness.submit(long)
        wait_for(lambda: harness.thread.loan_needed, "the loan is needed")
        behind = harness.submit(prompt(2, 6, 8))
        assert not client.started.wait(0.3) and not behind.started.is_set(), "smaller ones do not pass it"
        assert harness.thread.lend(size(STEP), 1).result(10) == 0, "those that wait come first"
        harness.thread.take_back()
        client.finished()
        behind.finished()
        harness.thread.lend(size(ROOM - 4 * STEP), 1).result(10)
        again = harness.submit(long)
        wait_for(lambda: harness.thread.loan_needed, "the loan is needed")
        harness.thread.take_back()
        again.finished()
        assert not harness.thread.loan_needed and harness.preemptions == 0


def test_a_request_that_runs_grows_into_it_and_nobody_goes_back_to_the_queue() -> None:
    hold = BlockingHook(at=2, match=decoding)
    with BudgetHarness(ROOM, hold) as harness:
        client = harness.submit(long_prompts(1, 2 * STEP)[0])
        assert hold.reached.wait(10)
        lent = harness.thread.lend(size(ROOM), 1)
        hold.release.set()
        # What is left is for the share of its answer that has room already.
        assert 0 < lent.result(10) < size(ROOM)
        wait_for(lambda: harness.thread.loan_needed or client.ended.is_set(), "it grows")
        assert harness.thread.loan_needed
        client.finished(FinishReason.LENGTH)
        assert harness.preemptions == 0


def test_what_the_budget_leaves_is_lent_first() -> None:
    with BudgetHarness(ROOM) as harness:
        assert harness.engine is not None
        memory, budget = harness.engine.decoder.memory, harness.budget
        memory.limit(Budget(budget.size, budget.row), spare=1000)
        assert harness.thread.lend(budget.size + 2000, 1).result(10) == budget.size + 1000
        assert harness.thread.lend(1000, 1000).result(10) == 1000
        harness.submit(prompt(1, 6 * STEP, 8)).finished()
        assert not harness.thread.loan_needed
