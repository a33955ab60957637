from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from service.core import Score, Verdict
from service.lifecycle.comparison import Comparison
from service.lifecycle.gate import GOLDEN, Scored, judge
from service.settings import GateSettings
from tests.support.simulated_scores import LEVEL, by_length, pair, scores


def decide(
    candidate: Sequence[Score],
    active: Sequence[Score],
    costs: Sequence[float] | None = None,
    golden: tuple[Sequence[Score], Sequence[Score]] = ((), ()),
    active_costs: Sequence[float] | None = None,
    **changes: float,
) -> Verdict:
    rules = {"min_prompts": 30, "min_tokens": 2000, "domain_tolerance": 0.02, "resamples": 400, "seed": 1, **changes}
    seed, resamples = int(rules.pop("seed")), rules.pop("resamples")
    gate = GateSettings.model_validate(rules | {"bootstrap": resamples})
    parent = Scored(active, golden[1], costs if active_costs is None else active_costs)
    return judge(Scored(candidate, golden[0], costs), parent, gate, seed=seed)


def noisy(rng: np.random.Generator, count: int, gain: float) -> tuple[list[Score], list[Score]]:
    """Texts of different difficulty; the calls of both adapters vary around it, the candidate's reduced by the gain."""
    difficulty = rng.lognormal(np.log(40), 0.4, count)
    new = difficulty * rng.lognormal(0, 0.1, count) / (1 + gain)
    old = difficulty * rng.lognormal(0, 0.1, count)
    return scores(new), scores(old)


@pytest.mark.parametrize("gain", [-0.2, -0.01, 0.01, 0.25, 1.0])
def test_the_same_ratio_on_every_text_is_the_gain_without_any_doubt(gain: float) -> None:
    active = np.linspace(20, 90, 40)
    verdict = decide(scores(active / (1 + gain)), scores(active))
    assert (verdict.gain, verdict.low90, verdict.high90) == pytest.approx((gain, gain, gain))
    assert verdict.promoted is (gain > 0)
    assert (verdict.prompts, verdict.tokens) == (40, 4000)


def test_an_equal_candidate_is_not_better() -> None:
    same = scores(np.linspace(20, 90, 40))
    verdict = decide(same, same)
    assert (verdict.gain, verdict.low90, verdict.high90, verdict.promoted) == (0.0, 0.0, 0.0, False)


def test_the_gain_weighs_texts_by_their_calls() -> None:
    """Half the calls on one text of ten, which makes up nine tenths of all calls: 1 / (0.45 + 0.1) - 1."""
    active = scores([900, *[100 / 9] * 9])
    candidate = scores([450, *[100 / 9] * 9])
    assert decide(candidate, active).gain == pytest.approx(1 / 0.55 - 1)


def test_the_interval_is_the_paired_bootstrap_of_scipy() -> None:
    candidate, active = noisy(np.random.default_rng(3), 80, 0.05)
    ours = decide(candidate, active, resamples=20_000)
    theirs = stats.bootstrap(
        ([s.calls[-1] for s in candidate], [s.calls[-1] for s in active]),
        lambda new, old, axis: old.sum(axis) / new.sum(axis) - 1,
        paired=True,
        vectorized=True,
        n_resamples=20_000,
        confidence_level=0.9,
        method="percentile",
        rng=np.random.default_rng(5),
    ).confidence_interval
    width = theirs.high - theirs.low
    assert ours.low90 == pytest.approx(theirs.low, abs=0.03 * width)
    assert ours.high90 == pytest.approx(theirs.high, abs=0.03 * width)


@pytest.mark.parametrize("trials", [200, pytest.param(400, marks=pytest.mark.nightly)])
def test_chance_alone_is_rarely_promoted_and_real_progress_nearly_always(trials: int) -> None:
    rng = np.random.default_rng(0)
    lucky = sum(decide(*noisy(rng, 60, 0.0)).promoted for _ in range(trials))
    proven = sum(decide(*noisy(rng, 60, 0.08)).promoted for _ in range(trials // 2))
    # A correct gate promotes 5 % of them; more than this many happens once in 10,000 such experiments.
    assert lucky <= stats.binom.ppf(0.9999, trials, 0.05)
    assert lucky >= stats.binom.ppf(0.0001, trials, 0.05), "a gate that promotes nothing proves nothing"
    assert proven >= 0.95 * (trials // 2)


def test_a_worse_candidate_is_never_promoted() -> None:
    rng = np.random.default_rng(1)
    assert not any(decide(*noisy(rng, 60, -0.08)).promoted for _ in range(100))


def test_one_domain_that_is_surely_worse_blocks() -> None:
    active = scores([50] * 40) + scores([50] * 10, domain="b", start=40)
    better = scores([35] * 40) + scores([52] * 10, domain="b", start=40)
    verdict = decide(better, active)
    assert verdict.low90 > 0
    assert not verdict.promoted
    assert "worse on b" in verdict.reason
    assert verdict.domains["b"] == pytest.approx((50 / 52 - 1,) * 3)
    assert decide(better, active, domain_tolerance=0.05).promoted, "within the tolerance"


def test_a_domain_that_may_be_as_good_does_not_block() -> None:
    active = scores([50] * 40) + scores([50] * 10, domain="b", start=40)
    doubtful = scores([35] * 40) + scores([80, 80, 80, 80, 80, 35, 35, 35, 35, 35], domain="b", start=40)
    verdict = decide(doubtful, active)
    assert verdict.domains["b"][0] < -0.02 < verdict.domains["b"][2]
    assert verdict.promoted


def test_a_domain_of_four_texts_does_not_speak() -> None:
    active = scores([50] * 40) + scores([50] * 4, domain="b", start=40)
    verdict = decide(scores([35] * 40) + scores([90] * 4, domain="b", start=40), active)
    assert verdict.promoted
    assert set(verdict.domains) == {"a"}


@pytest.mark.parametrize(("prompts", "tokens", "missing"), [(29, 100, "29 of 30 prompts"), (30, 66, "1980 of 2000")])
def test_too_little_evidence_promotes_nothing(prompts: int, tokens: int, missing: str) -> None:
    verdict = decide(scores([20] * prompts, tokens=tokens), scores([40] * prompts, tokens=tokens))
    assert not verdict.promoted
    assert missing in verdict.reason
    assert verdict.gain == pytest.approx(1.0)


def test_as_much_evidence_as_is_asked_for_is_enough() -> None:
    assert decide(scores([20] * 30), scores([40] * 30), min_prompts=30, min_tokens=3000).promoted


def test_nothing_to_compare_on_promotes_nothing() -> None:
    assert not decide([], []).promoted


GOOD = scores([40] * 40)


@pytest.mark.parametrize(
    "candidate",
    [
        GOOD[1:],
        [*GOOD[1:], replace(GOOD[0], generation="other")],
        [*GOOD, GOOD[0]],
        [*GOOD[1:], replace(GOOD[0], tokens=99)],
        [*GOOD[1:], replace(GOOD[0], domain="b")],
        [*GOOD[1:], replace(GOOD[0], calls=(60.0, 50.0, 45.0, 40.0))],
        [*GOOD[1:], replace(GOOD[0], calls=(0.0, 50.0, 40.0))],
        [*GOOD[1:], replace(GOOD[0], calls=(60.0, 50.0, float("nan")))],
    ],
)
def test_scores_that_do_not_match_are_an_error(candidate: list[Score]) -> None:
    with pytest.raises(ValueError, match=r"scored|usable score|draft lengths"):
        decide(candidate, GOOD)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1, 100), min_size=30, max_size=60), st.integers(0, 2**32), st.randoms())
def test_the_verdict_depends_on_neither_order_nor_repetition(calls: list[float], seed: int, random) -> None:  # pyright: ignore
    candidate, active = scores(calls), scores(list(reversed(calls)))
    for costs in (None, (1.0, 1.2, 1.4)):
        first = decide(candidate, active, costs, seed=seed)
        random.shuffle(candidate)
        random.shuffle(active)
        assert decide(candidate, active, costs, seed=seed) == first
    assert first.low90 <= first.high90


def test_a_gain_that_is_sure_but_not_worth_a_swap_is_refused() -> None:
    verdict = decide(scores([39.9] * 40), scores([40.0] * 40))
    assert verdict.low90 > 0
    assert not verdict.promoted and "gain too small" in verdict.reason


def test_a_domain_blocks_when_it_is_probably_beyond_the_tolerance_and_surely_worse() -> None:
    """Three per cent worse, plus or minus one: the rule that the interval must lie below -2 % would let it pass."""
    rng = np.random.default_rng(4)
    active = scores([50] * 40) + scores([50] * 20, domain="b", start=40)
    candidate = scores([35] * 40) + scores(50 * 1.03 * rng.normal(1, 0.03, 20), domain="b", start=40)
    verdict = decide(candidate, active)
    assert verdict.domains["b"][2] > -0.02 > verdict.domains["b"][0]
    assert not verdict.promoted and "worse on b" in verdict.reason
    slightly = scores([35] * 40) + scores([50.5] * 20, domain="b", start=40)
    assert decide(slightly, active).promoted, "surely worse, but within the tolerance"


def test_a_domain_among_many_blocks_only_where_it_is_surer_to_be_worse() -> None:
    worse = 50 * np.random.default_rng(0).normal(1.05, 0.08, 20)
    active = scores([50] * 40) + scores([50] * 20, domain="b", start=40)
    candidate = scores([35] * 40) + scores(worse, domain="b", start=40)
    alone = decide(candidate, active, resamples=4000)
    assert not alone.promoted and "worse on b" in alone.reason
    others = [score for i in range(8) for score in scores([50] * 6, domain=f"c{i}", start=100 + 10 * i)]
    among = decide(candidate + others, active + others, resamples=4000)
    assert among.domains["b"] == pytest.approx(alone.domains["b"]), "the interval that is shown stays"
    assert among.promoted


@pytest.mark.nightly
def test_domains_are_not_blocked_by_chance_the_more_there_are() -> None:
    rng = np.random.default_rng(5)
    passed = 0
    for _ in range(100):
        main, main_active = pair(rng, 60, better=0.08, differ=0.12)
        others = [
            [replace(score, generation=f"x{score.generation}", domain=f"x{score.domain}") for score in each]
            for each in pair(rng, 80, differ=0.12, domains=8)
        ]
        passed += decide([*main, *others[0]], [*main_active, *others[1]], resamples=2000).promoted
    # Without the widening it is 64 of 100.
    assert passed >= 87


@pytest.mark.parametrize(
    ("texts", "differ", "costs"),
    [
        pytest.param(30, 0.01, None, id="30-hardly any noise-calls"),
        pytest.param(30, 0.01, LEVEL, id="30-hardly any noise-costs", marks=pytest.mark.nightly),
        pytest.param(30, 0.1, None, id="30-much-calls", marks=pytest.mark.nightly),
        pytest.param(30, 0.1, LEVEL, id="30-much-costs"),
        *(
            pytest.param(
                200, differ, costs, id=f"200-{differ}-{'costs' if costs else 'calls'}", marks=pytest.mark.nightly
            )
            for differ in (0.01, 0.1)
            for costs in (None, LEVEL)
        ),
    ],
)
@pytest.mark.promise(10)
def test_of_100_candidates_that_are_only_noise_ten_at_most_are_promoted(
    differ: float, texts: int, costs: Sequence[float] | None
) -> None:
    """Even if the draft lengths are about as fast as each other, so that each adapter gets the one that favours it."""
    rng = np.random.default_rng(6)
    each = [decide(*pair(rng, texts, differ=differ, domains=3), costs, min_tokens=500) for _ in range(100)]
    assert sum(one.promoted for one in each) <= 10


@pytest.mark.parametrize(
    ("differ", "costs", "trials"),
    [
        pytest.param(0.04, None, 100, marks=pytest.mark.nightly),
        pytest.param(0.1, None, 100, marks=pytest.mark.nightly),
        pytest.param(0.1, LEVEL, 100, marks=pytest.mark.nightly),
        (0.1, LEVEL, 20),
    ],
)
@pytest.mark.promise(10)
def test_of_20_candidates_that_are_truly_two_per_cent_better_19_pass(
    differ: float, costs: Sequence[float] | None, trials: int
) -> None:
    """Acceptance 0.0135 higher is 2 % more tokens a call; the gate's 200 prompts of three domains."""
    many = pair(np.random.default_rng(7), 20_000, better=0.0135, differ=differ)
    assert decide(*many, costs, resamples=100).gain == pytest.approx(0.02, abs=0.002)
    rng = np.random.default_rng(8)
    passed = sum(
        decide(*pair(rng, 200, better=0.0135, differ=differ, domains=3), costs).promoted for _ in range(trials)
    )
    assert passed >= 0.95 * trials


# ------------------------------------------------------------------------------------------------ measured costs

SHORT, LONG = (1.0, 2.0, 3.0), (1.0, 1.1, 1.2)
"""Costs at which K = 1 is best, and at which K = 3 is, for the tests below."""


@pytest.mark.parametrize(
    ("candidate", "active", "costs", "gain", "message"),
    [
        # Better at K = 3 only.
        ((60, 50, 36), (60, 50, 40), None, 40 / 36 - 1, "better: +11.1% tokens/s at K = 3,"),
        ((60, 50, 36), (60, 50, 40), LONG, 40 / 36 - 1, "better: +11.1% tokens/s at K = 3,"),
        ((60, 50, 36), (60, 50, 40), SHORT, 0.0, "not proven better: +0.0% tokens/s at K = 1,"),
        # Better at K = 1, worse at K = 3.
        ((50, 48, 44), (60, 50, 40), LONG, 48 / 50 - 1, "not proven better: -4.0% tokens/s at K = 1 against K = 3,"),
        ((50, 48, 44), (60, 50, 40), SHORT, 0.2, "better: +20.0% tokens/s at K = 1,"),
        # Each is best at another draft length.
        ((60, 50, 30), (60, 50, 40), (1.0, 1.4, 1.8), 60 / 54 - 1, "better: +11.1% tokens/s at K = 3 against K = 1,"),
        ((60, 50, 40), (60, 50, 30), (1.0, 1.4, 1.8), 54 / 60 - 1, "-10.0% tokens/s at K = 1 against K = 3,"),
        ((60, 40, 39), (50, 45, 40), (1.0, 1.3, 1.8), 50 / 52 - 1, "-3.8% tokens/s at K = 2 against K = 1,"),
        # No draft length pays against plain decoding (100 calls of cost 1), but the better candidate is still better.
        ((80, 70, 65), (90, 85, 80), (3.0, 5.0, 7.0), 90 / 80 - 1, "better: +12.5% tokens/s at K = 1,"),
    ],
)
def test_each_adapter_is_taken_at_its_best_draft_length(
    candidate: Sequence[float], active: Sequence[float], costs: Sequence[float] | None, gain: float, message: str
) -> None:
    verdict = decide(by_length([candidate] * 40), by_length([active] * 40), costs)
    assert (verdict.gain, verdict.low90, verdict.high90) == pytest.approx((gain,) * 3)
    assert message in verdict.reason
    assert verdict.promoted is (gain > 0)


def test_equal_costs_give_the_verdict_that_calls_give() -> None:
    rng = np.random.default_rng(9)
    for better in (-0.02, 0.0, 0.02, 0.05):
        both = pair(rng, 60, better=better, domains=2)
        one, other = ([replace(score, calls=score.calls[-1:]) for score in each] for each in both)
        calls = decide(*both)
        for found in (decide(*both, (0.04,) * 3), decide(one, other), decide(one, other, (0.7,))):
            assert found.reason.replace("K = 1", "K = 3") == calls.reason
            same(found, calls)


def test_the_unit_of_costs_does_not_matter() -> None:
    both = pair(np.random.default_rng(10), 60, better=0.03)
    same(decide(*both, (1.0, 1.25, 1.5)), decide(*both, (0.03, 0.0375, 0.045)))


def same(one: Verdict, other: Verdict) -> None:
    """Equal up to rounding."""
    assert one.promoted is other.promoted
    assert (one.gain, one.low90, one.high90) == pytest.approx((other.gain, other.low90, other.high90))
    assert one.domains.keys() == other.domains.keys()
    assert all(each == pytest.approx(other.domains[name]) for name, each in one.domains.items())


def test_the_length_is_chosen_for_all_texts_together_and_for_each_domain_alone() -> None:
    easy, hard = [(55, 38, 30)] * 20, [(90, 85, 80)] * 20
    active = by_length(easy, domain="easy") + by_length(hard, domain="hard", start=20)
    candidate = by_length([(55, 38, 25)] * 20, domain="easy") + by_length(hard, domain="hard", start=20)
    costs = (1.0, 1.25, 1.6)
    verdict = decide(candidate, active, costs)
    # Together: 145, 153.75 and 176 before; 145, 153.75 and 168 now. Had each text a length of its own: 137.5 to 130.
    assert verdict.gain == 0.0 and "at K = 1," in verdict.reason
    assert verdict.domains["easy"] == pytest.approx((47.5 / 40 - 1,) * 3), "at K = 3 against K = 2"
    assert verdict.domains["hard"] == (0.0, 0.0, 0.0)


def test_the_interval_chooses_lengths_anew_in_every_resample() -> None:
    candidate, active = pair(np.random.default_rng(11), 80, better=0.02, differ=0.2)
    ours = decide(candidate, active, LEVEL, resamples=20_000)

    def gain(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        return old.sum(-2).min(-1) / new.sum(-2).min(-1) - 1

    spent = [np.array([score.calls for score in each]) * LEVEL for each in (candidate, active)]
    drawn = np.random.default_rng(12).integers(80, size=(20_000, 80))
    low, high = np.percentile(gain(spent[0][drawn], spent[1][drawn]), (5, 95))
    assert ours.gain == pytest.approx(gain(*spent))
    assert ours.low90 == pytest.approx(low, abs=0.03 * (high - low))
    assert ours.high90 == pytest.approx(high, abs=0.03 * (high - low))
    best = [np.bincount(each[drawn].sum(1).argmin(1), minlength=3) for each in spent]
    assert all((counts > 0).sum() > 1 for counts in best), "or choosing once would do"


@pytest.mark.parametrize(
    "costs", [(), (1.0, 1.1), (1.0, 1.1, 1.2, 1.3), (1.0, 0.0, 1.2), (1.0, -1.0, 1.2), (1.0, float("nan"), 1.2)]
)
def test_costs_that_cannot_be_are_an_error(costs: Sequence[float]) -> None:
    with pytest.raises(ValueError, match=r"draft lengths|round costs must be positive"):
        decide(GOOD, GOOD, costs)


@pytest.mark.parametrize("costs", [None, ()])
def test_a_draft_that_may_propose_nothing_has_nothing_to_compare(costs: Sequence[float] | None) -> None:
    none = by_length([()] * 40)
    assert decide(none, none, costs).reason == "nothing to compare on"


# --------------------------------------------------------------------------------------------- golden set, conversations


def test_golden_texts_do_not_dilute_the_gain() -> None:
    """Twelve logged texts, and eighty golden ones with equal scores."""
    active, golden = scores([50] * 12), scores([50] * 80, start=1000)
    verdict = decide(scores([40] * 12), active, golden=(golden, golden), min_prompts=10, min_tokens=1000)
    assert verdict.promoted
    assert (verdict.gain, verdict.prompts, verdict.tokens) == (pytest.approx(0.25), 12, 1200)
    assert verdict.domains[GOLDEN] == (0.0, 0.0, 0.0)
    assert not decide(scores([40] * 12), active, golden=(golden, golden)).promoted, "nor do they stand in for the log"


def test_a_loss_on_the_golden_set_blocks() -> None:
    golden = scores([50] * 40, start=1000)
    good = scores([35] * 40), scores([50] * 40)
    verdict = decide(*good, golden=(scores([52] * 40, start=1000), golden))
    assert not verdict.promoted and "worse on golden set" in verdict.reason
    assert decide(*good, golden=(scores([50.5] * 40, start=1000), golden)).promoted, "within the tolerance"
    assert decide(*good, golden=(scores([60] * 4, start=1000), scores([50] * 4, start=1000))).promoted, "too few"


def test_golden_texts_and_domains_are_compared_at_what_each_adapter_costs() -> None:
    """Both need as many calls, and the candidate's rounds take less time."""
    equal, golden = scores([50] * 40), scores([50] * 40, start=1000)
    slower = tuple(1.25 * cost for cost in SHORT)
    cheaper = decide(equal, equal, SHORT, (golden, golden), slower)
    assert cheaper.promoted
    assert cheaper.domains == {name: pytest.approx((0.25,) * 3) for name in ("a", GOLDEN)}
    # One that is better by its calls is worse on the golden set, where it saves none.
    verdict = decide(scores([35] * 40), equal, slower, (golden, golden), SHORT)
    assert verdict.domains["a"] == pytest.approx((50 / 35 / 1.25 - 1,) * 3)
    assert verdict.domains[GOLDEN] == pytest.approx((1 / 1.25 - 1,) * 3)
    assert not verdict.promoted and "worse on golden set" in verdict.reason


def test_four_conversations_are_no_evidence_however_many_texts_they_have() -> None:
    new, old = (chats(scores([calls] * 80), 20) for calls in (40, 50))
    verdict = decide(new, old)
    assert not verdict.promoted and "4 of 5 conversations" in verdict.reason
    assert decide(chats(new, 8), chats(old, 8)).promoted


def chats(scored: Sequence[Score], turns: int) -> list[Score]:
    return [replace(score, conversation=f"c{i // turns}") for i, score in enumerate(scored)]


GAIN, SPREAD = 0.03, 0.08
"""Mean and standard deviation of the gain over conversations; a quarter of the variation between texts."""


def talk(rng: np.random.Generator, conversations: int, turns: int) -> tuple[list[Score], list[Score]]:
    """Texts of conversations: difficulty and gain of a text depend in part on its conversation."""
    count = conversations * turns
    hard = np.repeat(rng.lognormal(np.log(40), 0.4, conversations), turns) * rng.lognormal(0, 0.4, count)
    gain = 1.0 + np.repeat(rng.normal(GAIN, SPREAD, conversations), turns)
    new, old = hard * rng.lognormal(0, 0.1, count) / gain, hard * rng.lognormal(0, 0.1, count)
    names = [f"c{i // turns}" for i in range(count)]
    made = (
        [Score(f"g{i}", "a", 9, 5, (calls,), name) for i, (calls, name) in enumerate(zip(each, names, strict=True))]
        for each in (new.tolist(), old.tolist())
    )
    return next(made), next(made)


def covered(conversations: int, trials: int, resamples: int, *, known: bool = True) -> float:
    """Share of the 90 % intervals that contain the true gain. known: whether conversations are known to the gate."""
    # E[old] / E[new] - 1: a conversation's gain divides.
    truth = 1.0 / np.mean(1.0 / (1.0 + np.random.default_rng(0).normal(GAIN, SPREAD, 10**6))) - 1.0
    rng, found = np.random.default_rng(31), 0
    for _ in range(trials):
        new, old = talk(rng, conversations, 20)
        if not known:
            new, old = ([replace(score, conversation="") for score in each] for each in (new, old))
        gain = Comparison(new, old).gain(resamples, 1)
        found += gain.low <= truth <= gain.high
    return found / trials


def test_the_interval_of_chats_of_20_turns_is_that_of_conversations() -> None:
    assert 0.82 <= covered(30, 100, 200) <= 0.98
    assert covered(30, 30, 200, known=False) <= 0.7, "or independent texts would do"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("conversations", "trials"), [(10, 2000), (30, 2000), (60, 2000), (200, 1000)])
def test_nine_in_ten_intervals_of_chats_contain_the_true_gain(conversations: int, trials: int) -> None:
    share = covered(conversations, trials, 1000)
    print(f"{conversations} conversations: {share:.3f} of {trials}")
    assert 0.88 <= share <= 0.92
