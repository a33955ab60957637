"""Plans a round: how many tokens to propose and from which source (draft, prompt lookup, none), to maximise tokens per second.

With a_i the acceptance rate of position i of a proposal, given that all positions before it were accepted, K proposed tokens
yield 1 + sum over j <= K of a_1 .. a_j expected tokens (Leviathan et al., arXiv 2211.17192, eq. 1 with a rate per position).
The cost model (`costs`) predicts the time of the round. Where a draft can wait for its confidence, `DraftSteps` ends the
proposal early. The planner is pure arithmetic and uses neither clock nor MLX.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from service.core import Source
from service.engine.acceptance import Acceptance, Calibration, expected_tokens
from service.engine.costs import LENGTHS, USUALLY_HELD, Costs, Load, RoundCosts, Speedup
from service.engine.strategy import current

LOOKED_UP = {8: 0.8, 4: 0.6, 2: 0.4}
"""Prior acceptance rate of prompt lookup, by the minimum number of matched tokens."""
PREDICTED = {8: 0.95, 4: 0.9, 2: 0.7, 1: 0.5, 0: 0.9}
"""Prior acceptance rate of predicted tokens, by the strength of the match (`drafters.prediction`)."""
FORCED, FORCED_RATE = 16, 0.95
"""Match length and prior acceptance rate of tokens that a grammar forces. The model may tokenize their text differently."""
SWITCH_GAIN = 1.03
"""A different draft length must promise this factor in tokens per second. Parking the draft needs no margin."""
PROBE = 32
"""Maximum rounds until a parked draft is probed, before the cost of a probe was measured."""
PROBING = 0.015
"""Maximum share of the time spent on probes."""
PROBES, LONGEST = 3, 2048
"""Number of probes whose cost is remembered, and the maximum rounds between two probes."""
REPAID = 8
"""Rounds over which the tokens that a draft must catch up on have to pay off. Fewer if the rows end earlier, as most answers
are shorter than their limit."""
INVESTMENT = 1.1
"""Factor in tokens per second that drafts must promise before the draft prefills prompts for them. The promise is based on
other prompts, and the prefill is lost if it does not hold."""
PLAIN = 64
"""After this many rounds with proposals, one round runs without, so that its cost stays measured."""
UNMEASURED = 4
"""The same until that cost has been measured."""


@dataclass(frozen=True, slots=True)
class Match:
    """A lookup's match for a row. length: matched tokens, as a key of LOOKED_UP or PREDICTED, or FORCED. available: number of
    tokens after the match."""

    length: int
    available: int
    source: Source = Source.LOOKUP


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan of a round.

    drafted: tokens that the draft proposes for every row without a lookup; 0: the draft is parked.
    looked_up: by row, tokens proposed by lookup, 0 for none; at most `drafted` if anything is drafted.
    speed: expected tokens per second.
    rates: if anything is drafted, by row: a low estimate of the acceptance rate by position.
    lookup_tokens: if anything is drafted, by row: expected tokens of a used lookup, by its length.
    probe: this round tries a parked draft.
    measures: proposals would pay, but the round runs without them to measure the cost of plain rounds.
    """

    drafted: int
    looked_up: tuple[int, ...]
    speed: float = field(default=0.0, compare=False)
    rates: tuple[Sequence[float], ...] = field(default=(), compare=False)
    lookup_tokens: tuple[Sequence[float] | None, ...] = field(default=(), compare=False)
    probe: bool = field(default=False, compare=False)
    measures: bool = field(default=False, compare=False)

    @property
    def proposed(self) -> int:
        """The length of the longest proposal of any row."""
        return max(self.drafted, *self.looked_up)

    def with_drafted(self, drafted: int) -> Choice:
        """The same plan for a draft that stopped after `drafted` tokens."""
        return replace(self, drafted=drafted, looked_up=tuple(min(n, drafted) for n in self.looked_up))


@dataclass(frozen=True, slots=True)
class _Expected:
    """Expected tokens of proposals. batch: the draft's acceptance rates over all rows. By row: rates, the draft's acceptance
    rates; draft, expected tokens by draft length; lookup, expected tokens by lookup length, as far as the match reaches."""

    batch: Sequence[float]
    rates: Sequence[Sequence[float]]
    draft: Sequence[Sequence[float]]
    lookup: Sequence[Sequence[float]]

    @property
    def longest_lookup(self) -> int:
        """Number of tokens available after the longest match."""
        return max(len(found) for found in self.lookup) - 1

    def looking_up(self, length: int) -> float:
        """Expected tokens of a round with lookups only."""
        return sum(_up_to(found, length) for found in self.lookup)

    def drafting(self, length: int) -> float:
        """Expected tokens of a round in which each row uses a draft of this length, or a lookup if that promises more."""
        return sum(max(draft[length], _up_to(found, length)) for draft, found in self._rows)

    def choice(self, length: int, speed: float) -> Choice:
        """The plan of such a round."""
        used = [found if _up_to(found, length) > draft[length] else None for draft, found in self._rows]
        counts = tuple(min(length, len(found) - 1) if found else 0 for found in used)
        # Far positions are rarely tested. A row's past success does not make them better than in other rows.
        low = tuple([min(pair) for pair in zip(each, self.batch, strict=True)] for each in self.rates)
        return Choice(length, counts, speed, low, tuple(used))

    @property
    def _rows(self) -> list[tuple[Sequence[float], Sequence[float]]]:
        return list(zip(self.draft, self.lookup, strict=True))


def _up_to(table: Sequence[float], length: int) -> float:
    return table[min(length, len(table) - 1)]


class DraftSteps:
    """The draft steps of one round: at most `most`, fewer if the draft's confidence says that more do not pay.

    calibrations: one per row, None for a row without a draft proposal; if empty, the length is fixed. pays: whether to continue
    drafting, given the number of drafted tokens and each row's probability that all of them are accepted. The decision depends
    only on tokens that will be verified anyway and is made before the next one is drawn, so the output keeps the target's
    distribution.
    """

    def __init__(
        self,
        most: int,
        calibrations: Sequence[Calibration | None] = (),
        pays: Callable[[int, Sequence[float]], bool] = lambda drafted, reach: True,
    ) -> None:
        self.most = most
        self.stops = tuple(stop for stop in LENGTHS if stop < most) if calibrations else ()
        """The numbers of tokens after which `more` is called. Calling it after every token would cost more in host syncs than
        it gains."""
        self._calibrations = calibrations
        self._pays = pays
        self._reach = [0.0 if each is None else 1.0 for each in calibrations]
        self._confidences: list[Sequence[float]] = []

    def more(self, confidences: Sequence[Sequence[float]]) -> bool:
        """Whether to continue drafting. confidences: of the tokens since the last call, by token and row."""
        for step in confidences:
            rows = zip(self._reach, self._calibrations, step, strict=True)
            self._reach = [0.0 if each is None else reach * each.rate(own) for reach, each, own in rows]
        self._confidences += confidences
        return self._pays(len(self._confidences), self._reach)

    def observe(self, accepted: Sequence[int], proposed: Sequence[int] | None = None) -> None:
        """Learn how well confidence predicted acceptance. accepted: tokens by row. proposed: by row, the positions that count,
        fewer than drafted if the text ended earlier; None: all."""
        ends = [len(self._confidences)] * len(accepted) if proposed is None else proposed
        for step, confidences in enumerate(self._confidences):
            for each, confidence, count, end in zip(self._calibrations, confidences, accepted, ends, strict=True):
                if each is not None and count >= step and step < end:
                    each.observe(confidence, count > step)


class Planner:
    """Plans the rounds of one decoder. drafted: maximum draft length (0: no draft). looked_up: maximum lookup length. seeds:
    initial costs, corrected by measured rounds."""

    def __init__(self, drafted: int, looked_up: int, seeds: Costs) -> None:
        self._strategy = current()
        allowed = self._strategy.allowed
        self.drafted = drafted
        self.costs = RoundCosts(seeds, max(drafted, looked_up))
        self.speedup = Speedup()
        self._draft_lengths = allowed(drafted)
        self._lookup_lengths = allowed(looked_up)
        priors = {
            **{(Source.LOOKUP, length): prior for length, prior in LOOKED_UP.items()},
            **{(Source.PREDICTION, strength): prior for strength, prior in PREDICTED.items()},
            (Source.GRAMMAR, FORCED): FORCED_RATE,
        }
        self._lookups = {kind: Acceptance(looked_up, prior) for kind, prior in priors.items()}
        self.restart()

    def restart(self) -> None:
        """Forget the draft's acceptance rates because another draft version serves. Costs and lookup rates are kept."""
        self._draft = Acceptance(self.drafted)
        self._calibrations = {greedy: Calibration() for greedy in (True, False)}
        self._length = self.drafted
        self._parked_rounds = self._proposing_rounds = 0
        self._probe_cost = 0.0
        """Plain rounds that the current probe has cost so far."""
        self._probe_costs: deque[float] = deque(maxlen=PROBES)
        """The costs of the last probes."""
        self._plain_ahead = 0.0
        """Rounds until the draft may be probed."""

    def reseed(self, seeds: Costs) -> None:
        """Continue from these costs. If they differ from the current seeds, what was learned from rounds is forgotten."""
        if seeds != self.costs.seeds:
            self.costs.reseed(seeds)

    # ---------------------------------------------------------------------------------------------------- before a round

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        """Plan the next round. By row: matches, the result of the lookup; own, the draft's acceptance in this row (None: not
        known). drafts: False if the draft must not be used."""
        self._plain_ahead = 0.0
        expected = self._expected(load, matches, own, drafts)
        speeds = {0: load.rows / self.costs.seconds(load, 0, 0)}
        lengths = self._lengths(load) if drafts else []
        # Like prefilling a prompt, a catch-up call of the draft is an investment.
        for k in () if lengths and load.lags and not self.pays(load) else lengths:
            speeds[k] = self._draft_speed(load, k, expected.drafting(k))
        self._length = self._stay_or_switch(speeds)
        k, looked_up, speed = self._length, 0, speeds[self._length]
        for n in self._lookup_lengths:
            if n > expected.longest_lookup or not self._strategy.fits(load.rows, n):
                break
            if (lookup_speed := expected.looking_up(n) / self.costs.seconds(load, 0, n)) > speed:
                k, looked_up, speed = 0, n, lookup_speed

        self._proposing_rounds = self._proposing_rounds + 1 if k or looked_up else 0
        if self._proposing_rounds >= (PLAIN if self.costs.established(load, 0, 0) else UNMEASURED):
            self._proposing_rounds = 0
            return Choice(0, (0,) * load.rows, speed, measures=True)
        if k:
            self._parked_rounds = 0
            return expected.choice(k, speed)
        self._parked_rounds += 1
        if not lengths:
            self._plain_ahead = inf
        else:
            tokens = [sum(each) / load.rows for each in zip(*expected.draft, strict=True)]
            length = max(lengths, key=lambda k: tokens[k] / self.costs.seconds(load, k, k))
            if self._probe_is_due(load, length, tokens[length], looking_up=looked_up > 0):
                return replace(expected.choice(length, speed), looked_up=(0,) * load.rows, probe=True)
        return Choice(0, tuple(min(looked_up, len(found) - 1) for found in expected.lookup), speed)

    def _lengths(self, load: Load) -> list[int]:
        """The draft lengths allowed for such a batch."""
        return [k for k in self._draft_lengths if self._strategy.fits(load.rows, k)]

    def _expected(
        self, load: Load, matches: Sequence[Match | None], own: Sequence[Acceptance] | None, drafts: bool
    ) -> _Expected:
        batch = self._draft.rates() if drafts else []
        rates = [each.row_rates(batch) for each in own] if own and drafts else [batch] * load.rows
        tables = {
            kind: expected_tokens(self._lookups[kind].rates())
            for kind in {(match.source, match.length) for match in matches if match is not None}
        }
        lookup = [[1.0] if m is None else tables[m.source, m.length][: m.available + 1] for m in matches]
        return _Expected(batch, rates, [expected_tokens(each) for each in rates], lookup)

    def _stay_or_switch(self, speeds: dict[int, float]) -> int:
        """The draft length to continue with. speeds: tokens per second by draft length, 0 for no draft."""
        now = speeds.get(self._length, 0.0)
        best = max(speeds, key=speeds.__getitem__)
        return best if speeds[best] > SWITCH_GAIN * now or speeds[0] > now else self._length

    def _draft_speed(self, load: Load, drafted: int, tokens: float) -> float:
        """Tokens per second of rounds that draft `drafted` tokens and emit `tokens`, including what the draft must read. Its
        prompts are already prefilled, but more will follow: short answers to long prompts may not repay the prefill."""
        rounds = min(REPAID, max(load.left * load.rows / tokens, 1.0))
        read = max(load.unread / rounds, tokens * load.prompted) * self.costs.read()
        return tokens / (self.costs.seconds(load, drafted, drafted) + read)

    def _probe_is_due(self, load: Load, length: int, tokens: float, *, looking_up: bool) -> bool:
        """Whether a parked draft should be probed. Probes take PROBING of the time, so a draft that is closer to paying is
        probed sooner. length: draft length of a probe; tokens: its expected tokens for one row."""
        plain = self.costs.seconds(load, 0, 0)
        cost, longest = self.costs.seconds(load, length, length) / plain - tokens, PROBE
        if self._probe_costs:
            # The minimum, because a single probe may include one-time work.
            cost, longest = min(self._probe_costs), LONGEST
        rounds = min(max(cost / PROBING, PROBE if looking_up else 2), longest)
        # A draft that fell behind first catches up for some rounds.
        rounds = max(rounds, load.unread * self.costs.read() / plain / PROBING)
        self._plain_ahead = max(rounds - self._parked_rounds - 1.0, 0.0)
        return self._parked_rounds >= rounds

    def stay_parked(self) -> bool:
        """Whether the round after the planned one is plain as well, whatever the planned one yields. If so, it counts as
        planned."""
        if self._plain_ahead < 1.0:
            return False
        self._plain_ahead -= 1.0
        self._parked_rounds += 1
        return True

    def steps(
        self, load: Load, choice: Choice, greedy: Sequence[bool], drafts: Sequence[bool] | None = None
    ) -> DraftSteps:
        """The draft steps of a round that drafts: continue while the draft's confidence promises more tokens per second than
        `choice`. By row: greedy, because acceptance differs for sampled tokens; drafts, whether the draft proposes for this row
        (None: for all)."""
        found = [(n, tokens) for n, tokens in zip(choice.looked_up, choice.lookup_tokens, strict=True) if n and tokens]

        def pays(drafted: int, reach: Sequence[float]) -> bool:
            # The stopping rule for a ratio of sums. Stopping by thresholds: Zhang et al., arXiv 2309.08168; Li et al., arXiv
            # 2406.16858.
            reach, gain = list(reach), 0.0
            for k in range(drafted, self.drafted):
                reach = [chance * rates[k] for chance, rates in zip(reach, choice.rates, strict=True)]
                gain += sum(reach) + sum(_up_to(tokens, k + 1) - _up_to(tokens, k) for n, tokens in found if n > k)
                could_stop = k + 1 in LENGTHS or k + 1 == self.drafted
                if could_stop and gain > choice.speed * self.costs.extra(load, drafted, k + 1):
                    return True
            return False

        drafting = [not n for n in choice.looked_up]
        if drafts is not None:
            drafting = [here and allowed for here, allowed in zip(drafting, drafts, strict=True)]
        rows = zip(drafting, greedy, strict=True)
        return DraftSteps(
            self.drafted, [self._calibrations[likeliest] if here else None for here, likeliest in rows], pays
        )

    def prefills(self, load: Load) -> bool:
        """Whether the draft should prefill the prompts of such a batch."""
        cheap = load.rows * self.costs.read() <= PROBING * self.costs.seconds(load, 0, 0)
        return self.pays(load) or (self._strategy.parked_prefill and cheap)

    def pays(self, load: Load) -> bool:
        """Whether drafts with the usual acceptance promise enough more tokens per second than no drafts in such a batch
        (INVESTMENT)."""
        tokens, plain_speed = expected_tokens(self._draft.rates()), load.rows / self.costs.seconds(load, 0, 0)
        return any(
            self._draft_speed(load, k, load.rows * tokens[k]) > INVESTMENT * plain_speed for k in self._lengths(load)
        )

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...]:
        """Seconds of a round over one row as timed at start-up, by draft length from 1 on. step: the cost of a draft step as a
        multiple of the current draft's."""
        costs = self.costs.seeds.scaled(step)
        return tuple(costs.round(Load(1, USUALLY_HELD), k) for k in range(1, self.drafted + 1))

    # ----------------------------------------------------------------------------------------------------- after a round

    def charge(self, load: Load, choice: Choice, seconds: float, emitted: float, *, drafted: bool) -> None:
        """Add a round to the cost of the current probe, including rounds in which the draft only catches up. emitted: tokens
        per row. drafted: whether the draft proposed, which ends the probe."""
        if not choice.probe:
            return
        self._probe_cost += self.costs.plain_rounds(load, seconds) - emitted
        if drafted:
            self._probe_costs.append(max(self._probe_cost, 0.0))
            self._probe_cost = 0.0

    def observe(
        self,
        load: Load,
        choice: Choice,
        matches: Sequence[Match | None],
        accepted: Sequence[int],
        seconds: float | None,
        own: Sequence[Acceptance] | None = None,
        proposed: Sequence[int] | None = None,
    ) -> None:
        """Learn from a round. By row: accepted, tokens; own, the row's acceptance statistics, which are updated too; proposed,
        the positions that count: fewer than planned if the text ended earlier, 0 if the draft proposed nothing (None: as
        planned). seconds: of the whole round, None if it included other work."""
        if choice.drafted:
            self._parked_rounds = 0
        ends = [n or choice.drafted for n in choice.looked_up] if proposed is None else proposed
        for row, (match, found, count, end) in enumerate(zip(matches, choice.looked_up, accepted, ends, strict=True)):
            if found and match is not None:
                self._lookups[match.source, match.length].observe(end, count)
            elif choice.drafted and not found and end:
                self._draft.observe(end, count)
                if own:
                    own[row].observe(end, count)
        self.costs.observe(load, choice.drafted, choice.proposed, seconds)
