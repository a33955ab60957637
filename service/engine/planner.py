"""How many tokens to propose, and from where: what promises the most tokens per second for the batch at hand.

With a_i the probability that position i of a proposal is kept when all before it were, K proposed tokens make
1 + sum over j <= K of a_1 .. a_j expected tokens (Leviathan et al., arXiv 2211.17192, eq. 1 with a rate per position). A round
costs one target call over K + 1 tokens a row, and K draft steps unless what is proposed was looked up. Pure arithmetic, no
clock of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from service.engine.acceptance import Acceptance, expected
from service.engine.confidence import STOPS, Steps, Trust
from service.engine.costs import USUALLY_HELD, Costs, Load, line
from service.engine.strategy import current

PROBE = 32
"""Rounds after which a resting draft drafts again at the latest: what it would be worth stays known, and what it gets wrong
stays logged, so that it goes on learning."""
PROBING = 0.015
"""Share of the time that may be lost by that: the closer it is to paying, the sooner it is tried. Where reading alone costs a
draft more, as in a full batch on a CPU, it stops that too, and is tried when it has rested for so long that catching up costs
no more."""
PROBES, LONGEST = 3, 2048.0
"""Tries of a parked draft whose cost is remembered, and the most rounds that pass between two."""
REPAID = 64
"""Rounds in which what a draft must read before it can draft must have paid."""
STAY = 1.03
"""Another draft length must promise so many times the tokens per second; none at all only as many."""
LOOKED_UP = {8: 0.8, 4: 0.6, 2: 0.4}
"""Acceptance of look-ups taken for granted before anything was seen, by how many tokens matched at least."""
ASKING = 0.03
"""Share of a round's time from which on it does not pay to ask a draft how sure it is: it is asked once or twice a round, and
where that takes 2 % each what is heard still gains up to 18 %, 6 on the mean of five kinds of text."""
PLAIN = 64
"""Rounds with proposals after which one has none, so that what they are compared with stays measured."""
UNMEASURED = 4
"""The same while too few rounds without proposals were seen."""
FIRST, ESTABLISHED = 3, 8
"""The median of a kind's first rounds counts, from so many on, until there were so many."""
ONCE = 1.5
"""Those that take so many times the second least of them did something that is done once."""
STALE = 256
"""Rounds after which the corrections of a kind that was not seen are forgotten for the first time."""
SLOW = 0.05
"""Weight of a later time in a cost's correction."""
NEWS = 0.05
"""Share by which a cost must differ from the one gone by for a new measurement to count: corrections of the old are lost."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a look-up found for a row: how many tokens matched (a key of LOOKED_UP), how many follow there."""

    length: int
    available: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens the draft proposes for every row that has nothing better (0: it rests), and those looked up by row (0: none; no
    more than the draft's where it drafts). pace: tokens per second that it promises. Where it drafts, by row: rates: how often
    each position is kept at least when all before it were; found: what a look-up is worth by how many tokens of it are
    proposed, for rows that have one. probe: a try of a parked draft."""

    drafted: int
    looked_up: tuple[int, ...]
    pace: float = field(default=0.0, compare=False)
    rates: tuple[Sequence[float], ...] = field(default=(), compare=False)
    found: tuple[Sequence[float] | None, ...] = field(default=(), compare=False)
    probe: bool = field(default=False, compare=False)

    def having(self, drafted: int) -> Choice:
        """When so many were drafted in the end."""
        return replace(self, drafted=drafted, looked_up=tuple(min(n, drafted) for n in self.looked_up))

    @property
    def most(self) -> int:
        """Tokens of the longest proposal of any row, drafted or looked up."""
        return max(self.drafted, *self.looked_up)


def _kind(load: Load, drafted: int, most: int) -> tuple[int, int, int]:
    """Rounds whose costs are corrected together. A draft that is asked goes on to its next stop, and lengths between two of
    them would never be corrected by themselves."""
    drafts, proposes = ((next((stop for stop in STOPS if stop >= n), n) if drafted else n) for n in (drafted, most))
    return load.rows.bit_length(), drafts, proposes


class Planner:
    """drafted: tokens of the longest draft; looked_up: of the longest look-up. One controller belongs to one decoder."""

    def __init__(self, drafted: int, looked_up: int, costs: Costs) -> None:
        allowed = current().allowed
        self.drafted = drafted
        self._draft_lengths = allowed(drafted)
        self._lookup_lengths = allowed(looked_up)
        self._costs = costs
        self._most = max(drafted, looked_up)
        self._lines: dict[int, list[tuple[float, float]]] = {}
        self._looked_up = {length: Acceptance(looked_up, prior) for length, prior in LOOKED_UP.items()}
        self._last: tuple[tuple[int, int, int], float] | None = None
        self._fixes: dict[tuple[int, int, int], float] = {}
        self._first: dict[tuple[int, int, int], list[float]] = {}
        """By kind of round, how many times the expected seconds its first ones took."""
        self._timed = 0
        self._seen: dict[tuple[int, int, int], int] = {}
        self._waits: dict[tuple[int, int, int], int] = {}
        """By kind of round, when one was timed last, and after how many others that is forgotten."""
        self._level = 1.0
        """How many times the expected seconds rounds take of a kind that was not seen yet."""
        self._machine = 1.0
        """How many times the expected seconds rounds of all kinds take lately."""
        self.restart()

    def restart(self) -> None:
        """Forget what the last draft was worth: another one drafts. What rounds cost and look-ups are worth stays true."""
        self._draft = Acceptance(self.drafted)
        self._trusts = {greedy: Trust() for greedy in (True, False)}
        self._current = self.drafted
        self._rested = self._busy = 0
        self._probing = 0.0
        self._probes: deque[float] = deque(maxlen=PROBES)
        """Plain rounds that each of the last tries of the parked draft cost."""
        self._plain_for = 0.0

    def learn(self, costs: Costs) -> None:
        """Go by these from now on, where they are others."""
        if not self._costs.near(costs, NEWS):
            self._costs = costs
            self._lines.clear()
            for held in (self._seen, self._fixes, self._first, self._waits):
                held.clear()
            self._level, self._machine, self._last = 1.0, 1.0, None

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        """What to propose in the coming round. matches: one entry a row. own: what each row's drafts were worth; None: nothing
        is known of these rows. drafts: False while the draft is put aside, which ends with a `restart`: it is as if there
        were none."""
        self._plain_for = 0.0
        usual = self._draft.rates() if drafts else []
        rows = [each.rates_beside(usual) for each in own] if own and drafts else [usual] * load.rows
        by_row = [expected(rates) for rates in rows]
        draft = [sum(each) / load.rows for each in zip(*by_row, strict=True)]
        tables = {length: expected(found.rates()) for length, found in self._looked_up.items()}
        nothing = (0,) * load.rows

        def worth(match: Match | None, count: int) -> float:
            return 1.0 if match is None else tables[match.length][min(count, match.available)]

        def lower() -> tuple[Sequence[float], ...]:
            # Far positions are seldom tested, and a row that did well so far does not make them better than usual.
            return tuple([min(pair) for pair in zip(rates, usual, strict=True)] for rates in rows)

        plain, reading = self.seconds(load, 0, 0), load.unread * self._read_seconds()
        rates = [load.rows / plain]
        for k in range(1, len(draft)):
            if k not in self._draft_lengths:
                rates.append(0.0)
                continue
            tokens = sum(max(mine[k], worth(m, k)) for mine, m in zip(by_row, matches, strict=True))
            rates.append(self._pace(load, k, tokens))
        best = max(range(len(rates)), key=rates.__getitem__)
        if not drafts or rates[best] > STAY * rates[self._current] or rates[0] > rates[self._current]:
            self._current = best
        k, rate = self._current, rates[self._current]
        longest = max((m.available for m in matches if m), default=0)
        for count in self._lookup_lengths:
            if count > longest:
                break
            found = sum(worth(m, count) for m in matches) / self.seconds(load, 0, count)
            if found > rate:
                k, rate = -count, found
        self._busy = self._busy + 1 if k else 0
        plain_kind = self._first.get(_kind(load, 0, 0), ())
        if self._busy >= (PLAIN if len(plain_kind) >= FIRST else UNMEASURED):
            self._busy = 0
            return Choice(0, nothing, rate)
        if k > 0:
            self._rested = 0
            better = [m if m and worth(m, k) > mine[k] else None for mine, m in zip(by_row, matches, strict=True)]
            counts = tuple(min(k, m.available) if m else 0 for m in better)
            return Choice(k, counts, rate, lower(), tuple(tables[m.length] if m else None for m in better))
        self._rested += 1
        self._plain_for = inf
        if len(draft) > 1:
            probe = max(self._draft_lengths, key=lambda k: draft[k] / self.seconds(load, k, k))
            lost = self.seconds(load, probe, probe) / plain - draft[probe]
            most = float(PROBE)
            if self._probes:
                # One try may have met something that is done once; what all of the last ones lost is their price.
                lost = min(self._probes)
                most = min(max(lost / PROBING, most), LONGEST)
            patience = most if k else min(max(lost / PROBING, 2), most)
            # Begun anew when it has drafted: one that fell behind may read for some rounds first.
            patience = max(patience, reading / plain / PROBING)
            if self._rested >= patience:
                self._plain_for = 0.0
                return Choice(probe, nothing, rate, lower(), (None,) * load.rows, probe=True)
            self._plain_for = patience - self._rested - 1.0
        return Choice(0, tuple(min(-k, m.available) if m else 0 for m in matches), rate)

    def charge(self, load: Load, choice: Choice, seconds: float, emitted: float, *, drafted: bool) -> None:
        """Count what a try of a parked draft costs, the rounds included in which it only reads what it has missed. emitted:
        tokens by row. drafted: the try is over."""
        if choice.probe:
            self._probing += seconds / (self._machine * self.seconds(load, 0, 0)) - emitted
            if drafted:
                self._probes.append(max(self._probing, 0.0))
                self._probing = 0.0

    def stay_parked(self) -> bool:
        """Whether the round after the one that was chosen last proposes nothing either, whatever that one gives; it then counts
        as chosen."""
        if self._plain_for < 1.0:
            return False
        self._plain_for -= 1.0
        self._rested += 1
        return True

    def steps(self, load: Load, choice: Choice, greedy: Sequence[bool], drafts: Sequence[bool] | None = None) -> Steps:
        """The draft steps of a round that drafts: on while the draft's confidence predicts a net gain; the fixed length where
        waiting for its confidence costs more than that saves. By row: greedy, because a drawn token is accepted by another
        rule than the likeliest one; drafts, whether the draft proposes there at all (None: everywhere)."""
        asked = self._costs.asked
        if asked and self._level * line(asked, load.rows) > ASKING * self.seconds(load, choice.drafted, choice.most):
            return Steps(choice.drafted)
        # Not what `seconds` says: its corrections are as large as the difference that a token makes.
        step, *calls = (
            empty + load.held * held for empty, held in self._lines.get(load.rows) or self._drawn(load.rows)
        )

        # What was looked up is cut to as much as is drafted.
        found = [(n, tokens) for n, tokens in zip(choice.looked_up, choice.found, strict=True) if n and tokens]

        def worth(drafted: int, reach: Sequence[float]) -> bool:
            kept, gain = list(reach), 0.0
            for k in range(drafted, self.drafted):
                kept = [chance * rates[k] for chance, rates in zip(kept, choice.rates, strict=True)]
                gain += sum(kept) + sum(tokens[k + 1] - tokens[k] for n, tokens in found if n > k)
                dearer = (k + 1 - drafted) * step + calls[k + 1] - calls[drafted]
                if (k + 1 in STOPS or k + 1 == self.drafted) and gain > choice.pace * self._level * dearer:
                    return True
            return False

        asked_of = [not n for n in choice.looked_up]
        if drafts is not None:
            asked_of = [asks and drafted for asks, drafted in zip(asked_of, drafts, strict=True)]
        trusts = [self._trusts[likeliest] if asks else None for asks, likeliest in zip(asked_of, greedy, strict=True)]
        return Steps(self.drafted, trusts, worth)

    def round_seconds(self, step: float = 1.0) -> tuple[float, ...]:
        """Of a round over one row by the tokens drafted, from one on, as measured. step: how many times the present draft's a
        draft step costs."""
        load = Load(1, USUALLY_HELD)
        one = self._costs.draft(load) * (step - 1.0)
        return tuple(self._costs.round(load, k) + k * one for k in range(1, self.drafted + 1))

    def follows(self, load: Load) -> bool:
        """Whether the draft should read what rows are asked, in such a batch."""
        return self.pays(load) or load.rows * self._read_seconds() <= PROBING * self.seconds(load, 0, 0)

    def pays(self, load: Load) -> bool:
        """Whether drafts as usual promise more than none in such a batch."""
        tokens, plain = expected(self._draft.rates()), load.rows / self.seconds(load, 0, 0)
        return any(self._pace(load, k, load.rows * tokens[k]) > plain for k in self._draft_lengths)

    def _pace(self, load: Load, drafted: int, tokens: float) -> float:
        """Tokens per second of rounds that draft so many and say so many, what the draft reads for it included. Prompts that it
        has read are paid for, but others come after them: short answers to long ones may not repay it."""
        read = max(load.unread / REPAID, tokens * load.prompted) * self._read_seconds()
        return tokens / (self.seconds(load, drafted, drafted) + read)

    def seconds(self, load: Load, drafted: int, most: int) -> float:
        """Expected time of a round that drafts so many and proposes at most so many, but for how fast the machine is now."""
        lines = self._lines.get(load.rows) or self._drawn(load.rows)
        empty, held = lines[most + 1]
        if drafted:
            empty, held = empty + drafted * lines[0][0], held + drafted * lines[0][1]
        return (empty + load.held * held) * self._fixes.get(_kind(load, drafted, most), self._level)

    def _expire(self, key: tuple[int, int, int]) -> None:
        """A round of this kind was timed. Forget the corrections of kinds that were not for long, each time after twice as many
        rounds: a few slow ones may have made them look dear for ever."""
        self._timed += 1
        self._seen[key] = self._timed
        for other, seen in list(self._seen.items()):
            wait = self._waits.get(other, STALE)
            if self._timed - seen > wait:
                self._waits[other] = 2 * wait
                for held in (self._seen, self._fixes, self._first):
                    held.pop(other, None)
                self._level = median(self._fixes.values()) if self._fixes else 1.0
                self._last = None

    def _read_seconds(self) -> float:
        """Expected time of a token that the draft only reads."""
        return self._costs.read * self._level

    def _drawn(self, rows: int) -> list[tuple[float, float]]:
        """Seconds over empty rows, and more for each position held: of a draft step, then of a call over 1, 2, ... tokens.
        Put together anew for every choice they took 0.1 ms, which is much where a round takes 3."""
        empty, one = Load(rows, 0), Load(rows, 1)
        sums = [(self._costs.draft(empty), self._costs.draft(one))]
        sums += [(self._costs.call(empty, n), self._costs.call(one, n)) for n in range(1, self._most + 2)]
        self._lines[rows] = [(least, more - least) for least, more in sums]
        return self._lines[rows]

    def observe(
        self,
        load: Load,
        choice: Choice,
        matches: Sequence[Match | None],
        kept: Sequence[int],
        seconds: float | None,
        own: Sequence[Acceptance] | None = None,
        proposed: Sequence[int] | None = None,
    ) -> None:
        """Learn from a round. By row: kept, accepted tokens; own, the row's acceptance, which learns too; proposed, positions
        that count, fewer than chosen where the text ended before them and none where the draft proposed nothing (None: as
        chosen). seconds: None where the round did other work besides.

        What was timed at start is another program than a round: each kind of round costs what its first ones took. From then on
        a cost is corrected against another one seen a round before or after: what slows the whole machine, such as a training
        run, slows both.
        """
        if choice.drafted:
            self._rested = 0
        ends = [n or choice.drafted for n in choice.looked_up] if proposed is None else proposed
        for row, (match, count, accepted, end) in enumerate(zip(matches, choice.looked_up, kept, ends, strict=True)):
            if count and match is not None:
                self._looked_up[match.length].observe(end, accepted)
            elif choice.drafted and not count and end:
                self._draft.observe(end, accepted)
                if own:
                    own[row].observe(end, accepted)
        if seconds is None:
            self._last = None
            return
        key = _kind(load, choice.drafted, choice.most)
        self._expire(key)
        surprise = seconds / (self._machine * self.seconds(load, choice.drafted, choice.most))
        first = self._first.setdefault(key, [])
        if len(first) < ESTABLISHED:
            first.append(surprise * self._fixes.get(key, self._level))
            if len(first) >= FIRST:
                # What is done once, such as compiling, adds to some of them.
                self._fixes[key] = median(each for each in first if each <= ONCE * sorted(first)[1])
                self._level = median(self._fixes.values())
            self._last = None
            return
        clipped = min(max(surprise, 0.5), 2.0)
        self._machine *= clipped**SLOW
        if self._last is not None and self._last[0] != key:
            before, other = self._last
            ratio = min(max(surprise / other, 0.5), 2.0) ** (SLOW / 2)
            self._fixes[key] *= ratio
            self._fixes[before] /= ratio
        self._last = (key, surprise)
