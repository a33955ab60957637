"""The planner: its rule on tables and in simulations, and that outputs stay the target's own."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import pytest

from service.core import Prompt, Sampling, Source
from service.engine.acceptance import Acceptance, Calibration
from service.engine.adapters import bare
from service.engine.costs import FIRST, SPEEDUP_DECAY, Costs, Load, RoundCosts
from service.engine.decoder import Decoder
from service.engine.planner import PROBE, Choice, DraftSteps, Match, Planner
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from tests.support.batches import admit, decode
from tests.support.fixed_length import FixedLength
from tests.support.oracle import forced, noisy_copy, tiny_llama

Cost = Callable[[int, int], float]
"""Seconds of a round by rows and tokens drafted."""
ONE = Load(1, 0)


def costs(cost: Cost, step: float, sizes: tuple[int, ...] = (1, 8)) -> Costs:
    """The costs that a start-up measurement would find on this machine."""
    verify = {(rows, n): cost(rows, n - 1) - (n - 1) * step for rows in sizes for n in (1, 3, 5)}
    return measured(verify, dict.fromkeys(sizes, step))


def measured(verify: dict[tuple[int, int], float], step: dict[int, float]) -> Costs:
    """Costs that do not depend on the number of cached positions."""
    return Costs(verify, step, {1: 0.0}, 0.0, 0.0)


def play(
    planner: Planner, rounds: int, *, accept: float, cost: Cost, rows: int = 1, seed: int = 0, pace: float = 1.0
) -> list[int]:
    """The chosen draft lengths if every drafted token is accepted with the same probability."""
    rng, chosen, nothing = random.Random(seed), [], [None] * rows
    for _ in range(rounds):
        choice = planner.choose(Load(rows, 0), nothing)
        k = choice.drafted
        accepted = [next((i for i in range(k) if rng.random() >= accept), k) for _ in range(rows)]
        planner.observe(Load(rows, 0), choice, nothing, accepted, pace * cost(rows, k) * rng.uniform(0.9, 1.1))
        chosen.append(k)
    return chosen


def usual(chosen: list[int]) -> int:
    """The most frequent draft length of the later rounds."""
    late = chosen[len(chosen) // 2 :]
    return max(set(late), key=late.count)


def one_stream(rows: int, k: int) -> float:
    """Memory-bound: a longer verification costs little, a draft step a fifth of a target call."""
    return 0.050 + 0.013 * k


def full_batch(rows: int, k: int) -> float:
    """Compute-bound: every position costs the same."""
    return 0.060 + 0.045 * k


@pytest.mark.parametrize(
    ("accept", "cost", "least", "most"),
    [
        (0.9, one_stream, 4, 4),
        (0.6, one_stream, 1, 3),
        (0.1, one_stream, 0, 0),
        (0.9, full_batch, 1, 4),
        (0.5, full_batch, 0, 0),
        (0.0, full_batch, 0, 0),
    ],
)
def test_the_draft_length_settles_on_what_pays(accept: float, cost: Cost, least: int, most: int) -> None:
    planner = Planner(4, 0, costs(cost, 0.009))
    assert least <= usual(play(planner, 1000, accept=accept, cost=cost)) <= most


def test_round_costs_are_reported_by_draft_length() -> None:
    """For one row of 200 positions: a call over k + 1 tokens and k draft steps."""
    measured_costs = Costs({(1, 1): 0.05, (1, 2): 0.06, (1, 5): 0.09}, {1: 0.01}, {1: 1e-5, 5: 5e-5}, 2e-6, 1e-4)
    expected = [0.05 + 0.01 * k + 200 * 1e-5 * (k + 1) + k * (0.01 + 200 * 2e-6) for k in range(1, 5)]
    assert Planner(4, 8, measured_costs).round_seconds() == pytest.approx(tuple(expected))
    assert Planner(0, 8, measured_costs).round_seconds() == (), "look-ups alone"
    planner = Planner(4, 0, measured_costs)
    play(planner, 200, accept=0.5, cost=one_stream, pace=3.0)
    assert planner.round_seconds() == pytest.approx(tuple(expected)), "as measured at start"


def test_rows_with_low_acceptance_soon_get_shorter_drafts() -> None:
    """Texts of forty rounds with acceptance high and low in turn: rates per row against one rate for all rows."""

    def rate(accept: float, k: int) -> float:
        return sum(accept**i for i in range(k + 1)) / one_stream(1, k)

    def share(apart: bool, seed: int) -> float:
        planner, rng, nothing = Planner(3, 0, costs(one_stream, 0.009)), random.Random(seed), [None]
        got = best = 0.0
        for text in range(20):
            accept, own = (0.85, 0.15)[text % 2], [Acceptance(3)]
            for _ in range(40):
                choice = planner.choose(ONE, nothing, own if apart else None)
                k = choice.drafted
                accepted = next((i for i in range(k) if rng.random() >= accept), k)
                planner.observe(ONE, choice, nothing, [accepted], one_stream(1, k), own if apart else None)
                got += rate(accept, k)
                best += max(rate(accept, j) for j in range(4))
        return got / best

    apart, alike = (sum(share(each, seed) for seed in range(5)) / 5 for each in (True, False))
    assert apart > 0.95 and apart > alike + 0.02, (apart, alike)


def test_rows_are_weighed_by_their_own_acceptance() -> None:
    """The draft is always right for one row and never for seven others: it pays for the first row alone, not for the batch."""
    planner = Planner(3, 0, costs(one_stream, 0.009))
    own = [Acceptance(3) for _ in range(8)]
    load, accepted = Load(8, 0), [3] + [0] * 7
    for _ in range(30):
        planner.observe(load, Choice(3, (0,) * 8), [None] * 8, accepted, None, own)
    assert planner.choose(load, [None] * 8, own).drafted == 0
    assert planner.choose(ONE, [None], own[:1]).drafted == 3
    assert planner.choose(ONE, [None], own[1:2]).drafted == 0


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("cost", [one_stream, full_batch])
def test_measured_costs_bring_it_near_the_best_fixed_length_within_an_answer(accept: float, cost: Cost) -> None:
    def rate(k: int) -> float:
        return sum(accept**i for i in range(k + 1)) / cost(1, k)

    tokens = seconds = 0.0
    for seed in range(10):
        for k in play(Planner(4, 0, costs(cost, 0.009)), 60, accept=accept, cost=cost, seed=seed):
            tokens += sum(accept**i for i in range(k + 1))
            seconds += cost(1, k)
    assert tokens / seconds > 0.88 * max(rate(k) for k in range(5))


def test_a_machine_that_slows_down_as_a_whole_changes_nothing() -> None:
    planner = Planner(3, 0, costs(one_stream, 0.009))
    fast = play(planner, 200, accept=0.7, cost=one_stream)
    slow = play(planner, 200, accept=0.7, cost=one_stream, pace=3.0)
    # Draft lengths two and three are equally fast here.
    assert fast.count(2) + fast.count(3) > 180 and slow.count(2) + slow.count(3) > 180


def test_a_wrong_cost_is_corrected_over_time() -> None:
    wrong = measured({(1, 1): 0.050, (1, 4): 0.077}, {1: 0.15})
    planner = Planner(3, 0, wrong)
    assert usual(play(planner, 100, accept=0.7, cost=one_stream)) == 0
    assert usual(play(planner, 8000, accept=0.7, cost=one_stream)) > 0


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_draft_that_turns_out_dearer_is_parked_within_twenty_rounds(rows: int) -> None:
    """Measured on an accelerator: calls timed alone promised rounds of 19 ms; drafted rounds took 59."""

    def cost(rows: int, k: int) -> float:
        return 0.059 if k else 0.008

    planner = Planner(7, 0, measured({(1, 1): 0.0075, (1, 5): 0.0093, (1, 8): 0.011}, {1: 0.0024}))
    chosen = play(planner, 500, accept=0.7, cost=cost, rows=rows)
    assert chosen[0] > 0 and sum(k > 0 for k in chosen[20:]) <= 480 * 0.05, chosen


def test_a_parked_draft_is_probed_and_returns_when_it_improves() -> None:
    planner = Planner(3, 0, costs(one_stream, 0.009))
    parked = play(planner, 640, accept=0.1, cost=one_stream)
    late = parked[320:]
    assert late.count(0) > 0.8 * len(late) and max(len(list(run)) for k, run in groupby(late) if k == 0) < PROBE
    # Without a restart only the probes show the better draft.
    assert usual(play(planner, 4000, accept=0.9, cost=one_stream)) == 3


def test_a_few_rejections_park_a_good_draft_only_briefly() -> None:
    planner = Planner(3, 0, costs(one_stream, 0.009))
    for _ in range(12):
        planner.observe(ONE, Choice(3, (0,)), [None], [0], 0.1)
    assert planner.choose(ONE, [None]).drafted == 0
    assert usual(play(planner, 160, accept=0.7, cost=one_stream)) > 0


def test_a_hopeless_draft_costs_next_to_nothing() -> None:
    planner = Planner(3, 0, costs(one_stream, 0.009))
    chosen = play(planner, 4000, accept=0.0, cost=one_stream)
    assert sum(one_stream(1, k) for k in chosen[200:]) < 1.02 * 3800 * one_stream(1, 0)


@pytest.mark.parametrize("dear", [pytest.param(3.0, marks=pytest.mark.nightly), 20.0])
def test_probes_cost_what_they_may_as_measured(dear: float) -> None:
    """A draft that fell behind must read before it drafts: a try costs several plain rounds, whatever the calls promise."""
    planner, plain = Planner(3, 0, costs(one_stream, 0.009)), one_stream(1, 0)
    play(planner, 200, accept=0.0, cost=one_stream)
    lost = total = 0.0
    for _ in range(30_000):
        choice = planner.choose(ONE, [None])
        spent = dear * plain if choice.probe else one_stream(1, choice.drafted)
        planner.charge(ONE, choice, spent, 1.0, drafted=True)
        planner.observe(ONE, choice, [None], [0], None if choice.probe else spent)
        lost, total = lost + spent - plain, total + spent
    assert 0.005 < lost / total < 0.02


def test_rounds_that_once_looked_dear_are_tried_again() -> None:
    """Look-ups met eight slow moments, and are as fast as promised ever after."""
    planner, match = Planner(0, 4, measured({(1, 1): 1.0, (1, 5): 1.1}, {1: 0.0})), Match(8, 4)
    for _ in range(8):
        planner.observe(ONE, Choice(0, (4,)), [match], [4], 20.0)
        planner.observe(ONE, Choice(0, (0,)), [None], [0], 1.0)
    assert planner.choose(ONE, [match]).proposed == 0
    chosen: list[int] = []
    for _ in range(1500):
        choice = planner.choose(ONE, [match])
        planner.observe(ONE, choice, [match], [choice.proposed], 1.1 if choice.proposed else 1.0)
        chosen.append(choice.proposed)
    assert not any(chosen[:100]) and sum(n > 0 for n in chosen[-500:]) > 400


def test_a_new_draft_is_tried_at_once_after_a_swap() -> None:
    planner = Planner(3, 0, costs(one_stream, 0.009))
    assert usual(play(planner, 640, accept=0.05, cost=one_stream)) == 0
    planner.restart()
    chosen = play(planner, 60, accept=0.9, cost=one_stream)
    assert chosen[0] > 0 and chosen.count(3) > 20


def test_each_batch_size_has_costs_of_its_own() -> None:
    def cost(rows: int, k: int) -> float:
        return one_stream(rows, k) if rows == 1 else full_batch(rows, k)

    planner = Planner(3, 0, costs(cost, 0.009))
    alone, together = [], []
    for turn in range(60):
        alone += play(planner, 8, accept=0.6, cost=cost, rows=1, seed=turn)
        together += play(planner, 8, accept=0.6, cost=cost, rows=8, seed=turn)
    assert usual(alone) > 0 and usual(together) == 0


def test_a_drafts_pending_prefill_must_pay_too() -> None:
    of = costs(one_stream, 0.009, sizes=(1, 8))
    planner = Planner(3, 0, replace(of, read=0.003))
    for _ in range(100):
        planner.observe(ONE, Choice(3, (0,)), [None], [2], None)
    near, far = Load(1, 4000, 10), Load(1, 4000, 4000)
    assert planner.choose(near, [None]).drafted > 0 and planner.choose(far, [None]).drafted == 0


def test_prompts_too_long_for_their_answers_are_not_prefilled_by_the_draft() -> None:
    """Drafting for sixteen rows gains a little, but not if the draft must prefill four tokens per output token."""
    of = measured({(16, 1): 0.075, (16, 2): 0.097, (16, 5): 0.165}, {16: 0.014})
    planner = Planner(3, 0, replace(of, read=0.00025))
    for _ in range(100):
        planner.observe(Load(16, 0), Choice(1, (0,) * 16), [None] * 16, [1, 1, 1, 0] * 4, None)
    loads = [Load(16, 0, 0, prompted) for prompted in (0.1, 4.0)]
    assert [planner.prefills(load) for load in loads] == [True, False]
    assert [planner.choose(load, [None] * 16).drafted for load in loads] == [1, 0]


@pytest.mark.parametrize(("coming", "answer", "reads"), [(1, 48, True), (1, 1, False), (16, 48, False)])
def test_draft_prefill_depends_on_the_coming_batch_size(coming: int, answer: int, reads: bool) -> None:
    """Alone it pays if the answer is long enough; in a batch of sixteen it does not."""
    target = tiny_llama(0)
    decoder = Decoder(target, bare(noisy_copy(target, 1, 0.1)), vocabulary=97, k=3, adaptive=True)
    timed = measured({(1, 1): 0.05, (1, 4): 0.06, (16, 1): 0.1, (16, 4): 0.9}, {1: 0.005, 16: 0.1})
    decoder.planner = Planner(3, 0, replace(timed, read=0.002))
    prefill = decoder.start_prefill(
        Request("one", Prompt(tuple(range(4, 60)), Sampling(max_tokens=answer)), frozenset(), None)
    )
    while not decoder.prefill(prefill, coming):
        pass
    assert (prefill.draft_cache is not None) == reads


@pytest.mark.parametrize(("coming", "drafts"), [(0, True), (15, False)])
def test_drafting_depends_on_the_requests_that_wait(coming: int, drafts: bool) -> None:
    target = tiny_llama(0)
    decoder = Decoder(target, bare(noisy_copy(target, 1, 0.1)), vocabulary=97, k=3, adaptive=True)
    decoder.planner = Planner(
        3, 0, measured({(1, 1): 0.05, (1, 4): 0.06, (16, 1): 0.1, (16, 4): 0.9}, {1: 0.005, 16: 0.1})
    )
    decoder.admit(Request("one", Prompt(tuple(range(4, 60)), Sampling(max_tokens=48)), frozenset(), None))
    (done,) = decoder.round(coming).rounds
    assert (done.drafted > 0) == drafts


def test_a_draft_that_promises_little_reads_no_prompts_of_a_full_batch() -> None:
    planner, load = Planner(3, 0, replace(costs(full_batch, 0.009), read=0.0005)), Load(8, 100)
    assert planner.choose(load, [None] * 8).drafted == 1, "what it has read already costs nothing more"
    assert not planner.prefills(load) and planner.prefills(ONE)
    # In 8 rounds it would gain a twentieth of what reading costs.
    assert planner.choose(replace(load, unread=800), [None] * 8).drafted == 0


@pytest.mark.parametrize(("left", "drafts"), [(200, True), (9, False)])
def test_a_draft_does_not_catch_up_with_rows_that_are_about_to_end(left: int, drafts: bool) -> None:
    def cost(rows: int, k: int) -> float:
        return 0.060 + 0.030 * k

    planner = Planner(3, 0, replace(costs(cost, 0.009), read=0.0002))
    load = Load(8, 100, unread=600, left=left)
    assert planner.choose(replace(load, unread=0), [None] * 8).drafted > 0
    assert (planner.choose(load, [None] * 8).drafted > 0) == drafts


def test_a_draft_that_promises_little_does_not_catch_up() -> None:
    """Each row gets 1.04 times the tokens per second: worth a round, not a call of its own before it."""
    planner, load = Planner(1, 0, measured({(8, 1): 0.060, (8, 2): 0.095}, {8: 0.009})), Load(8, 100)
    assert planner.choose(load, [None] * 8).drafted == 1
    assert planner.choose(replace(load, lags=True), [None] * 8).drafted == 0
    cheaper = Planner(1, 0, measured({(8, 1): 0.060, (8, 2): 0.085}, {8: 0.009}))
    assert cheaper.choose(replace(load, lags=True), [None] * 8).drafted == 1


@pytest.mark.parametrize(("strategy", "reads"), [(CPU, True), (METAL, False), (CUDA, False)])
def test_a_parked_draft_reads_prompts_only_where_that_costs_little(strategy: Strategy, reads: bool) -> None:
    with using(strategy):
        planner = Planner(3, 0, costs(one_stream, 0.009))
        assert planner.prefills(ONE)
        for _ in range(100):
            planner.observe(ONE, Choice(3, (0,)), [None], [0], None)
        assert not planner.pays(ONE) and planner.prefills(ONE) is reads


def test_a_parked_draft_in_a_full_batch_stops_prefilling_and_is_rarely_probed() -> None:
    def cost(rows: int, k: int) -> float:
        return 0.060 + 0.035 * k

    planner, load = Planner(3, 0, replace(costs(cost, 0.009), read=0.0005)), Load(8, 100)
    assert planner.prefills(load)
    for _ in range(100):
        planner.observe(load, Choice(3, (0,) * 8), [None] * 8, [0] * 8, None)
    assert planner.choose(load, [None] * 8).drafted == 0
    assert not planner.prefills(load) and planner.prefills(ONE)
    # The draft lacks at most what the rows hold; it prefills 256 tokens per round, and drafts once it has caught up.
    unread, reading, drafting = 0, 0, 0
    for _ in range(4000):
        unread = min(unread + 8, 800)
        choice = planner.choose(replace(load, unread=unread), [None] * 8)
        if choice.drafted and unread > 256:
            unread, reading = unread - 256, reading + 1
            continue
        unread, drafting = (0, drafting + 1) if choice.drafted else (unread, drafting)
        planner.observe(load, choice, [None] * 8, [0] * 8, None)
    assert 3 < drafting < 20 and reading < 100
    # A single row is cheap to follow, and is probed again soon.
    for turn in range(2 * PROBE):
        if planner.choose(Load(1, 100, turn), [None]).drafted:
            break
    else:
        pytest.fail("never tried")


def test_a_long_context_gets_a_shorter_draft() -> None:
    of = costs(one_stream, 0.009)
    planner = Planner(4, 0, Costs(of.verify, of.step, {1: 1e-5, 5: 1e-4}, 1e-6, 0.0))
    for _ in range(300):
        planner.observe(Load(1, 100), Choice(4, (0,)), [None], [2], None)
    chosen = [planner.choose(Load(1, held), [None]).drafted for held in (100, 8000)]
    assert chosen[0] > chosen[1]


def test_a_look_up_is_used_where_it_gains_more_than_the_draft() -> None:
    planner = Planner(3, 8, measured({(1, 1): 1.0, (1, 9): 1.8}, {1: 0.05}))
    good, bad = Match(8, 8), Match(2, 8)
    for _ in range(200):
        planner.observe(ONE, Choice(0, (8,)), [good], [8], None)
        planner.observe(ONE, Choice(0, (4,)), [bad], [0], None)
    for rows in (1, 2):
        # So that no round is spent on measuring what plain ones cost.
        for _ in range(FIRST):
            plain = Choice(0, (0,) * rows)
            planner.observe(Load(rows, 0), plain, [None] * rows, [0] * rows, planner.costs.seconds(Load(rows, 0), 0, 0))
    assert planner.choose(ONE, [good]) == Choice(0, (8,))
    # No more tokens than follow the match.
    assert planner.choose(ONE, [Match(8, 2)]).looked_up[0] <= 2
    assert planner.choose(ONE, [bad]) == Choice(3, (0,))
    # One row of two has a match: the draft proposes for the other, if its steps pay.
    assert planner.choose(Load(2, 0), [Match(8, 3), None]) == Choice(3, (3, 0))
    assert planner.choose(Load(2, 0), [good, None]) == Choice(0, (8, 0))
    assert planner.choose(Load(2, 0), [Match(8, 3), bad]) == Choice(3, (3, 0))


def test_without_a_draft_only_look_ups_are_chosen() -> None:
    planner = Planner(0, 4, measured({(1, 1): 1.0, (1, 5): 1.2}, {1: 0.0}))
    assert planner.choose(ONE, [None]) == Choice(0, (0,))
    assert all(planner.choose(ONE, [Match(4, 4)]).drafted == 0 for _ in range(2 * PROBE))
    assert planner.choose(ONE, [Match(4, 4)]).looked_up == (4,)


@pytest.mark.parametrize("accepted", [0, 3], ids=["parked", "drafting"])
def test_a_disabled_draft_leaves_look_ups_as_without_a_draft(accepted: int) -> None:
    of = replace(costs(one_stream, 0.009), read=0.001)
    planner, without = Planner(3, 4, of), Planner(0, 4, of)
    for _ in range(100):
        planner.observe(ONE, Choice(3, (0,)), [None], [accepted], None)
    assert (planner.choose(ONE, [None]).drafted > 0) is (accepted > 0)
    found = [Match(8, 4), None, Match(4, 2)]
    rounds = [(Load(1, turn, unread=8), [found[turn % 3]]) for turn in range(6 * PROBE)]
    chosen = [planner.choose(load, matches, drafts=False) for load, matches in rounds]
    assert chosen == [without.choose(load, matches) for load, matches in rounds]
    assert sum(choice.proposed > 0 for choice in chosen) > 0.6 * len(chosen)
    planner.restart()
    assert planner.choose(ONE, [None]).drafted > 0


class RandomChoice(Planner):
    """Random draft and look-up lengths, with rounds that do not draft in between."""

    def __init__(self, seed: int) -> None:
        super().__init__(4, 6, measured({(1, 1): 1.0}, {1: 0.1}))
        self.rng = random.Random(seed)

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        drafted = self.rng.choice([0, 0, 1, 2, 4])
        most = [min(drafted or 6, m.available) if m and self.rng.random() < 0.5 else 0 for m in matches]
        return Choice(drafted, tuple(self.rng.randint(0, n) for n in most))

    def steps(
        self, load: Load, choice: Choice, greedy: Sequence[bool], drafts: Sequence[bool] | None = None
    ) -> DraftSteps:
        return DraftSteps(self.drafted, [Calibration() for _ in greedy], lambda drafted, reach: self.rng.random() < 0.6)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_random_choices_keep_the_targets_own_tokens(greedy: bool) -> None:
    target, rng = tiny_llama(0), random.Random(5)
    asked = [
        Prompt(
            tuple(rng.randrange(4, 97) for _ in range(rng.randint(2, 40))),
            Sampling(max_tokens=60) if greedy else Sampling(temperature=0.8, seed=i, max_tokens=60),
        )
        for i in range(12)
    ]

    def between(decoder: Decoder) -> None:
        if not isinstance(decoder.planner, RandomChoice):
            decoder.planner = RandomChoice(1)

    draft = noisy_copy(target, 1, 0.1)
    rows = decode(target, draft, asked, k=4, vocabulary=97, adaptive=True, lookup=6, between=between)
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)
    for source in (Source.DRAFT, Source.LOOKUP):
        rounds = [round for row in rows for round in row.rounds if round.source is source]
        assert len({round.drafted for round in rounds}) > 2
        assert sum(round.accepted for round in rounds) > 0
        assert all(round.accepted <= round.drafted for round in rounds)


class FixedCosts(RoundCosts):
    """Of plain rounds, whatever the batch."""

    def __init__(self, plain: float) -> None:
        super().__init__(measured({(1, 1): 1.0}, {1: 0.1}), 4)
        self.plain = plain

    def plain_rounds(self, load: Load, seconds: float) -> float:
        return seconds / self.plain


class Watching(FixedLength):
    """Notes what it is asked, with the lengths of the decoder's rows."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(3)
        self.decoder = decoder
        self.loads: list[tuple[Load, list[int]]] = []

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        self.loads.append((load, [len(row.tokens) - 1 for row in self.decoder.rows]))
        return super().choose(load, matches, own, drafts=drafts)


def test_the_planner_is_asked_about_the_rows_as_they_stand() -> None:
    """Two prompts of one length begin alike and are ragged as soon as one of them has more tokens accepted."""
    target = tiny_llama(0)
    decoder = Decoder(target, bare(noisy_copy(target, 1, 0.1)), vocabulary=97, k=3, adaptive=True)
    decoder.planner = watching = Watching(decoder)
    prompts = [Prompt(tuple(range(start, start + 20)), Sampling(max_tokens=40)) for start in (5, 40)]
    admit(decoder, [Request(str(i), prompt, frozenset(), None) for i, prompt in enumerate(prompts)])
    while decoder.rows:
        decoder.round()
    for load, lengths in watching.loads:
        assert (load.rows, load.held, load.ragged) == (len(lengths), max(lengths), len(set(lengths)) > 1)
    assert {load.ragged for load, _ in watching.loads if load.rows == 2} == {False, True}


def test_the_estimated_speed_up_is_of_tokens_over_those_of_plain_rounds_in_the_same_time() -> None:
    """Two rows of unlike length, so that the last rounds are of one."""
    target, plain = tiny_llama(0), 0.01
    decoder = Decoder(target, bare(noisy_copy(target, 1, 0.1)), vocabulary=97, k=3, adaptive=True)
    decoder.planner = planner = FixedLength(3)
    planner.costs = FixedCosts(plain)
    prompts = [
        Prompt(tuple(range(start, start + 20)), Sampling(max_tokens=count)) for start, count in ((5, 40), (40, 20))
    ]
    admit(decoder, [Request(str(i), prompt, frozenset(), None) for i, prompt in enumerate(prompts)])
    emitted = expected = 0.0
    widths: set[int] = set()
    assert planner.speedup.value == 0
    while decoder.unfinished:
        report = decoder.round()
        widths.add(len(report.rounds))
        emitted = emitted * SPEEDUP_DECAY + sum(round.emitted for round in report.rounds)
        expected = expected * SPEEDUP_DECAY + len(report.rounds) * report.seconds / plain
        assert planner.speedup.value == pytest.approx(emitted / expected)
    assert widths == {1, 2}


def test_the_estimated_speed_up_follows_what_rounds_cost() -> None:
    """Rounds of 3 tokens that take as long as one and a half plain ones, then plain ones, on a machine that slows down."""
    planner = Planner(4, 0, costs(lambda rows, k: 0.02 if k == 0 else 0.03, 0.001))
    for pace, drafted, emitted, speedup in ((1.0, 4, 3, 2.0), (1.0, 0, 1, 1.0), (3.0, 4, 3, 2.0)):
        for _ in range(1500):
            for k, tokens in ((0, 1), (drafted, emitted)):
                seconds = pace * (0.03 if k else 0.02)
                planner.observe(ONE, Choice(k, (0,)), [None], [tokens - 1], seconds)
            planner.speedup.observe(emitted, planner.costs.plain_rounds(ONE, seconds))
        assert planner.speedup.value == pytest.approx(speedup, rel=0.02)


@pytest.mark.parametrize(("rows", "longest"), [(1, 15), (4, 15), (16, 3), (32, 1), (64, 0)])
def test_planned_calls_are_no_larger_than_what_rounds_alike(rows: int, longest: int) -> None:
    """However well longer proposals would pay."""
    match = Match(8, 15)
    with using(CUDA):
        planner = Planner(15, 15, costs(lambda rows, k: 1.0, 0.0, (1, 64)))
        drafted = [planner.choose(Load(rows, 0), [None] * rows).drafted for _ in range(200)]
        looked_up = [planner.choose(Load(rows, 0), [match] * rows, drafts=False).proposed for _ in range(200)]
    assert (max(drafted), max(looked_up)) == (longest, longest)
    assert planner.pays(Load(rows, 0)) is (longest > 0)
