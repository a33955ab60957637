"""What gate and watch decide over many candidates and many looks: simulated sequences through the functions that decide."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from service.core import BARE_DRAFT, Score, Verdict
from service.lifecycle import sign_flips
from service.lifecycle.gate import AGAINST_BASE, GOLDEN, Scored, judge
from service.lifecycle.interim_check import check_schedule, interim_check
from service.lifecycle.online_testing import FIRST, LARGEST, SHARE, next_level
from service.settings import GateSettings
from tests.support.simulated_scores import LEVEL, Population

RULES = GateSettings(min_tokens=500, bootstrap=100)
REFUSED = Verdict(False, "not proven better", 200, 20_000, 0.0, -0.01, 0.01, p_value=0.4, level=0.01, loss_bounded=True)
HELD_OUT, GOLDEN_TEXTS = 200, 80
SEQUENCES = [50, pytest.param(2000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]


@cache
def population(better: float = 0.0, differ: float = 0.1) -> Population:
    return Population(better=better, differ=differ)


def scored(calls: NDArray[np.float64], seconds: Sequence[float] | None = None, *, start: int = 0) -> list[Score]:
    return [Score(f"g{start + i}", "a", 100, 50, tuple(each)) for i, each in enumerate(calls.tolist())]


def at_most(share: float, trials: int) -> int:
    """More than this many happen once in 1,000 experiments where the share is as stated."""
    return int(stats.binom.ppf(0.999, trials, share))


# ------------------------------------------------------------------------------------------------------ the functions


def test_levels_of_a_stream_without_a_discovery_sum_to_the_first_budget() -> None:
    levels = [next_level([False] * count) for count in range(5000)]
    assert levels == sorted(levels, reverse=True)
    assert 0.95 * FIRST < sum(levels) <= FIRST
    assert levels[100] > 1e-5


def test_discoveries_refill_the_budget() -> None:
    tired = [False] * 100
    assert next_level([*tired, True]) > 100 * next_level(tired)
    assert next_level([*tired, True, True]) > next_level([*tired, False, True])
    assert next_level([True] * 100) <= LARGEST
    # All levels together never exceed the bound's share of what was discovered.
    outcomes = [bool(one) for one in np.random.default_rng(1).random(3000) < 0.2]
    spent = sum(next_level(outcomes[:i]) for i in range(len(outcomes)))
    assert spent <= SHARE * sum(outcomes)


@pytest.mark.parametrize("count", [6, 9, 12])
def test_the_p_value_is_the_share_of_all_assignments_of_signs(count: int) -> None:
    rng = np.random.default_rng(count)
    signs = np.array(np.meshgrid(*[[-1.0, 1.0]] * count)).reshape(count, -1)
    for _ in range(20):
        differences = rng.lognormal(0, 0.5, count) * rng.choice([-1.0, 1.0, 1.0, 1.0], count)
        sums = np.abs(differences) @ signs
        exact = float((sums >= differences.sum() - 1e-9).mean())
        found = sign_flips.p_value(differences)
        if differences.sum() > 0:
            # The exact distribution has steps; where few sums are possible the approximation is the larger one.
            assert 0.9 * exact - 0.5**count <= found <= 1.6 * exact + 2.0 * 0.5**count


def test_a_p_value_far_in_the_tail_is_the_normal_distributions() -> None:
    differences = np.ones(400) * np.where(np.arange(400) < 250, 1.0, -1.0)
    assert sign_flips.p_value(differences) == pytest.approx(float(stats.binom.sf(249.5, 400, 0.5)), rel=0.02)
    assert sign_flips.p_value(np.ones(40)) == 0.5**40
    assert sign_flips.p_value(-np.ones(40)) == sign_flips.p_value(np.zeros(40)) == 1.0


def test_the_evidence_is_one_on_average_whatever_the_sample() -> None:
    rng = np.random.default_rng(3)
    magnitudes = rng.lognormal(0, 1, 30)
    values = [sign_flips.e_value(magnitudes * rng.choice([-1.0, 1.0], 30)) for _ in range(4000)]
    assert np.mean(values) == pytest.approx(1.0, abs=0.25)
    assert np.mean([value >= 20 for value in values]) <= 0.05
    assert sign_flips.e_value(np.zeros(9)) == sign_flips.e_value(np.zeros(0)) == 1.0


# ------------------------------------------------------------------------------------------------------------- gate


def gate(calls: NDArray[np.float64], history: Sequence[Verdict], costs: Sequence[float] | None = None) -> Verdict:
    """calls: (texts, 2, K), the candidate's and its parent's, which is the base draft."""
    new, old = (Scored(scored(calls[:, i]), seconds=costs) for i in (0, 1))
    return judge(new, old, RULES, history=history, seed=1)


@pytest.mark.parametrize("trials", SEQUENCES)
@pytest.mark.parametrize("costs", [None, LEVEL], ids=["calls", "costs"])
def test_of_twenty_gates_on_noise_any_promotes_in_one_sequence_of_twenty(
    costs: Sequence[float] | None, trials: int
) -> None:
    rng, promoted = np.random.default_rng(41), 0
    for _ in range(trials):
        history: list[Verdict] = []
        for _ in range(20):
            history.append(gate(population().draw(rng, HELD_OUT, noise=True), history, costs))
            if history[-1].promoted:
                promoted += 1
                break
    print(f"any promotion in twenty gates on noise: {promoted / trials:.3f} of {trials}")
    assert promoted <= at_most(0.05, trials) if trials < 1000 else promoted <= 0.05 * trials


@pytest.mark.parametrize("trials", SEQUENCES)
@pytest.mark.parametrize("refusals", [0, 100])
@pytest.mark.parametrize("texts", [100, HELD_OUT])
def test_a_true_gain_of_three_per_cent_is_promoted_within_five_runs(texts: int, refusals: int, trials: int) -> None:
    rng, promoted = np.random.default_rng(42), 0
    better = population(0.02).scaled(0.03)
    for _ in range(trials):
        history = [REFUSED] * refusals
        for _ in range(5):
            history.append(gate(better.draw(rng, texts), history))
            if history[-1].promoted:
                promoted += 1
                break
    print(f"+3 % on {texts} texts after {refusals} refusals: promoted in {promoted / trials:.3f} of {trials}")
    assert promoted >= 0.9 * trials


class Chain:
    """Candidates, each on top of what was promoted, that win on their own texts and lose on the golden set. loss: of each on
    that set, against its parent."""

    def __init__(self, rng: np.random.Generator, loss: float) -> None:
        self._rng = rng
        self._own, self._worse = population(0.0135).scaled(0.02), population(-0.011).scaled(-loss)
        self._loss = loss
        self._golden = population().draw(rng, GOLDEN_TEXTS)[:, 1]
        self._parent_golden = self._golden
        self.gain = 0.0
        """True gain on the golden set against the base draft of what serves."""
        self.verdicts: list[Verdict] = []

    def step(self) -> None:
        own, other = self._own.draw(self._rng, HELD_OUT), self._worse.draw(self._rng, GOLDEN_TEXTS)
        golden = self._parent_golden * other[:, 0] / other[:, 1]
        promoted = sum(one.promoted for one in self.verdicts)
        base = Scored(scored(own[:, 1] * 1.02**promoted), scored(self._golden))
        verdict = judge(
            Scored(scored(own[:, 0]), scored(golden)),
            Scored(scored(own[:, 1]), scored(self._parent_golden)),
            RULES,
            base=base if promoted else None,
            history=self.verdicts,
            seed=1,
        )
        self.verdicts.append(verdict)
        if verdict.promoted:
            self._parent_golden, self.gain = golden, (1.0 + self.gain) * (1.0 - self._loss) - 1.0


@pytest.mark.parametrize("trials", SEQUENCES)
@pytest.mark.parametrize("loss", [0.017, 0.025])
def test_a_chain_of_small_losses_stays_within_two_per_cent_of_the_base_draft(loss: float, trials: int) -> None:
    """Also where each candidate alone loses more than it may, and twenty are tried."""
    rng, beyond, promoted = np.random.default_rng(43), 0, 0
    for _ in range(trials):
        chain = Chain(rng, loss)
        # No candidate brings back what was lost.
        while len(chain.verdicts) < 20 and chain.gain >= -0.02:
            chain.step()
        beyond += chain.gain < -0.02
        promoted += sum(one.promoted for one in chain.verdicts)
    print(f"-{loss:.1%} each: beyond -2 % in {beyond / trials:.3f} of {trials}, promoted {promoted / trials:.2f} of 20")
    assert beyond <= at_most(0.05, trials) if trials < 1000 else beyond <= 0.05 * trials


def test_the_golden_set_is_compared_with_the_base_draft_as_well() -> None:
    """Three adapters that lose 1.5 % each are 4.4 % below the base draft."""
    texts = np.full((40, 3), 50.0)
    golden = np.full((80, 3), 50.0)
    parent = Scored(scored(texts), scored(golden * 1.03))
    candidate = Scored(scored(texts * 0.9), scored(golden * 1.045))
    assert judge(candidate, parent, RULES, seed=1).promoted, "against its parent alone it loses 1.4 %"
    verdict = judge(candidate, parent, RULES, base=Scored(scored(texts), scored(golden)), seed=1)
    assert not verdict.promoted and verdict.reason.startswith(f"worse on {GOLDEN}{AGAINST_BASE}")
    assert verdict.domains[GOLDEN + AGAINST_BASE][0] == pytest.approx(1 / 1.045 - 1)


@pytest.mark.parametrize(("texts", "promoted"), [(80, False), (40, True)])
def test_a_loss_that_may_be_larger_than_the_tolerance_blocks(texts: int, promoted: bool) -> None:
    """An estimate of -0.7 %, plus or minus 2 %. A set of few texts cannot prove less and is held to the weaker rule."""
    golden = np.full((texts, 3), 50.0)
    spread = 1.0 + np.where(np.arange(texts) % 2, 0.13, -0.12)
    new = Scored(scored(np.full((40, 3), 45.0)), scored(golden * spread[:, None]))
    verdict = judge(new, Scored(scored(np.full((40, 3), 50.0)), scored(golden)), RULES, seed=1)
    assert verdict.promoted is promoted
    assert verdict.loss_bounded is (None if promoted else False)
    if not promoted:
        assert verdict.reason.startswith(f"may lose more than 2% on {GOLDEN}{AGAINST_BASE}")


def test_a_verdict_says_at_which_level_it_was_tested() -> None:
    calls = population(0.02).draw(np.random.default_rng(5), HELD_OUT)
    first, later = gate(calls, []), gate(calls, [REFUSED] * 20)
    assert first.p_value == later.p_value
    assert first.level == next_level([]) and later.level == next_level([False] * 20)
    assert f"tested at {later.level:.2g}" in later.reason
    # What was not tested does not use up the budget.
    untested = Verdict(False, "12 of 30 prompts", 12, 900, 0.0, 0.0, 0.0)
    assert gate(calls, [untested] * 20) == first


# ------------------------------------------------------------------------------------------------------------- watch


def looks(serving: NDArray[np.float64], other: NDArray[np.float64], counts: Sequence[int]) -> int | None:
    """After how many answers the watch rolls back, looking at each of `counts`; None: never."""
    for count in counts:
        new, old = scored(serving[:count]), scored(other[:count])
        found = interim_check(new, {BARE_DRAFT: old}, parent=BARE_DRAFT, last=False, resamples=100, seed=1)
        if found.roll_back_to is not None:
            return count
    return None


def soon(calls: NDArray[np.float64]) -> int | None:
    """With the looks that the watch takes."""
    return looks(calls[:, 0], calls[:, 1], check_schedule(200))


@pytest.mark.parametrize("trials", SEQUENCES)
def test_the_watch_rolls_back_an_equal_adapter_in_one_of_twenty_however_often_it_looks(trials: int) -> None:
    rng, back = np.random.default_rng(44), 0
    for _ in range(trials):
        calls = population().draw(rng, 600, noise=True)
        back += looks(calls[:, 0], calls[:, 1], range(8, 600, 32)) is not None
    print(f"equal adapters rolled back in 19 looks: {back / trials:.3f} of {trials}")
    assert back <= at_most(0.05, trials) if trials < 1000 else back <= 0.05 * trials


@pytest.mark.parametrize(("loss", "within"), [(0.1, 25), (0.05, 50), (0.03, 100)])
def test_the_watch_rolls_back_a_worse_adapter_soon(loss: float, within: int) -> None:
    rng = np.random.default_rng(45)
    worse = population(-0.65 * loss).scaled(-loss)
    counts = [soon(worse.draw(rng, 200)) for _ in range(40)]
    decided = [count for count in counts if count is not None]
    print(f"-{loss:.0%}: rolled back after {np.mean(decided):.0f} answers, {len(decided)} of {len(counts)}")
    assert sum(count <= within for count in decided) >= 38
