"""Speculative decoding of a batch: plan a round, launch it, read it, give the rows their tokens.

Single-threaded, without text, queues or clocks beyond the rows' own: the engine's thread feeds it, offline tools drive it
directly, and the tests compare it with a target decoding alone.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from service.engine import profile
from service.engine.adapters import Draft
from service.engine.batch import Batch, drafts
from service.engine.costs import Costs, Load
from service.engine.drafters.lookup import Lookup, LookupProposal
from service.engine.kv.prefix import PrefixCache
from service.engine.memory import RowMemory
from service.engine.planner import Choice, DraftSteps, Match, Planner
from service.engine.prefill import Pace, Prefill, batch_prompts, prefill_draft, prefill_target
from service.engine.prefixes import Prefixes
from service.engine.prompt_logprobs import tokens_at_once
from service.engine.request import Request, prefill_ratio
from service.engine.rounds import Called, Outcome, Plan, RoundReport, Step
from service.engine.runner import Runner
from service.engine.strategy import current
from service.engine.target import Target
from service.engine.warm_up import warm_up

log = logging.getLogger(__name__)


class Decoder:
    """A batch of rows that decode together.

    vocabulary: width of the target's logits. k: tokens drafted per round (0: the target alone), or, with `adaptive`, at most
    so many: as many as pay for the batch at hand, where up to `lookup` tokens may also come from prompt look-up.
    prefill_chunk: prompt tokens of a call; None: as many as suit the device. collect: gather evidence for rows that may be
    stored. tie_margin: of log-probabilities, below which a failure case is a tie. prefix: the prefix cache. key: of rows that
    sample without a seed; None: a random one.
    """

    def __init__(
        self,
        target: nn.Module,
        draft: Draft | None,
        *,
        vocabulary: int,
        k: int,
        prefill_chunk: int | None = None,
        tie_margin: float = 1e-3,
        collect: bool = False,
        adaptive: bool = False,
        lookup: int = 0,
        prefix: PrefixCache | None = None,
        key: mx.array | None = None,
    ) -> None:
        self.strategy = current()
        self.draft_length = k if draft is not None else 0
        self.prefill_chunk = prefill_chunk or self.strategy.prefill_chunk
        self.batch = Batch(
            Target(target, None if draft is None else draft.model),
            draft,
            vocabulary=vocabulary,
            draft_length=self.draft_length,
            prefix=prefix,
            prefill_chunk=self.prefill_chunk,
        )
        self.runner = Runner(
            self.batch,
            vocabulary=vocabulary,
            collect=collect,
            prefill_chunk=self.prefill_chunk,
            key=mx.random.key(secrets.randbits(63)) if key is None else key,
        )
        self.tie_margin = tie_margin
        self.collect = collect
        self.lookup = Lookup(lookup) if adaptive and lookup > 0 else None
        self.adaptive = adaptive and (self.draft_length > 0 or self.lookup is not None)
        self.pace = Pace(self.strategy.max_gap)
        self.memory = RowMemory(self.batch, paged=self.strategy.paged)
        self.prefixes = Prefixes(self.batch, self.pace, self.prefill_chunk)
        self.planner: Planner | None = None
        self._seeds: profile.Seeds | None = None
        self._step: Step | None = None
        """The round under way: launched, not read."""
        self._reports: deque[RoundReport] = deque()
        """Rounds that were completed because rows were to change, not reported yet."""
        self._completed_at = 0.0
        self._rows_changed = False

    @property
    def rows(self) -> list[Request]:
        """The requests in the batch."""
        return self.batch.requests

    @property
    def adapter(self) -> int:
        """The id of the adapter that drafts; BARE_DRAFT (0) for the bare draft or none."""
        return self.batch.adapter

    @property
    def draft_failures(self) -> int:
        """How often a draft raised, or gave logits for a row that were not finite."""
        return self.batch.draft_failures

    def switch(self, draft: Draft) -> None:
        """Draft with another version from the next round on. Raises ValueError without a draft."""
        self._complete_pending()
        self.batch.switch(draft)
        if self.planner is not None:
            self.planner.restart()
        if self._seeds is not None and self.planner is not None and self.draft_length:
            self.planner.reseed(self._seeds.switch(draft.model))

    def profile(self, rows: int, context: int | None = None, timed: Costs | None = None) -> None:
        """Warm up, and time calls over up to so many rows to seed the costs of rounds. Otherwise the first round times those of
        its rows. context: tokens of a request, at most; None: not known. timed: costs that were measured before (`timed`)."""
        if self.strategy.replay and not self.unfinished:
            warm_up(self, rows, context)
        if self.adaptive:
            drafter = self.batch.drafter
            draft = drafter.draft.model if drafter is not None and self.draft_length else None
            looked_up = self.lookup.max_tokens if self.lookup is not None else 0
            sizes, most = profile.sizes(self.batch.size(rows)), max(self.draft_length, looked_up)
            measured = timed or profile.measure(self.batch.target.model, draft, rows=sizes, most=most)
            self._seeds = profile.Seeds(measured, draft)
            self.planner = Planner(self.draft_length, looked_up, self._seeds.costs)

    @property
    def timed(self) -> Costs | None:
        """Costs of rounds with the draft that `profile` found; None where it timed nothing."""
        return None if self._seeds is None else self._seeds.timed

    @contextmanager
    def unplanned(self) -> Generator[None]:
        """Rounds in the block draft `draft_length` tokens each and look nothing up. Nothing is left of them: in planner,
        look-ups and prefix cache, of reports, keys and failures of the draft. No row may be there before or after."""
        batch, runner = self.batch, self.runner
        before = self.planner, self.adaptive, self.lookup, batch.prefix, self.draft_length, runner.key
        assert not self.unfinished
        self.planner, self.adaptive, self.lookup, batch.prefix = None, False, None, None
        try:
            yield
        finally:
            self.planner, self.adaptive, self.lookup, batch.prefix, self.draft_length, runner.key = before
            self._reports.clear()
            batch.forget_failures()

    # ------------------------------------------------------------------------------------------------ rows come and go

    def start_prefill(self, row: Request) -> Prefill:
        """A request's prefill, of all but the prompt's last token."""
        salt, prefix = row.prompt.cache_salt, None if row.unscored else self.batch.prefix
        cached = 0 if prefix is None else self.prefixes.cached_tokens(row.tokens, salt)
        pieces = [] if prefix is None else prefix.find(row.tokens[:-1], self.pace.speed.value, salt)
        cache, reserved = self.batch.target.cache(1), self.memory.reserved(row)
        cache.reserve(reserved)
        return Prefill([row], cache, None, self.batch.epoch, reserved=reserved, cached=cached, pieces=pieces)

    def preempt(self, prefilling: Sequence[int]) -> list[Request]:
        """Take the youngest requests out of the batch, but for one, until memory does for the next rounds of the others and for
        texts of such lengths that prefill; returns them."""
        most = self._next_positions
        running = [len(row.tokens) + most for row in self.rows]
        if not self.rows or self.memory.fits(running, prefilling):
            self.memory.make_room(running, prefilling)
            return []
        if len(self.rows) == 1 and not self.memory.fits([len(self.rows[0].tokens) + most], prefilling, have=0):
            # Nobody can go, and spare memory would not do either.
            return []
        self._complete_pending()
        staying, gone = sorted(self.rows, key=lambda row: row.arrived_at), list[Request]()
        while len(staying) > 1 and not self.memory.fits(
            [len(row.tokens) + most for row in staying], prefilling, have=0
        ):
            gone.append(staying.pop())
        if self.rows:
            self._remove(gone, tight=True)
        return gone

    @property
    def _next_positions(self) -> int:
        """Positions behind a row's end that its next rounds may write: one may be under way, and another be launched behind
        it."""
        return 2 * (1 + max(self.draft_length, self.lookup.max_tokens if self.lookup is not None else 0))

    def batch_prompts(self, waiting: Sequence[Prefill], tokens: int, chunk: int | None = None) -> Prefill:
        """The first of these prompts, with others that can be prefilled in one call of `tokens` tokens with it. chunk: as for
        `prefill`."""
        first = waiting[0]
        alike = [each for each in waiting if (each.scored, each.answered) == (first.scored, first.answered)]
        kinds = [self._prefills_draft(prefill, len(waiting)) for prefill in alike]
        size, prefix, rows = chunk or self.prefill_chunk, self.batch.prefix, self.batch.size
        if first.scored:
            limit = tokens_at_once(self.runner.vocabulary)
            size, tokens, prefix = min(size, limit), min(tokens, limit), None
        return batch_prompts(alike, kinds, self.batch.target, room=tokens, size=size, prefix=prefix, batch_size=rows)

    def prefill(self, prefill: Prefill, joining: int = 1, chunk: int | None = None) -> bool:
        """Prefill the next chunk; True when its rows are ready to join. joining: rows that are to join, these among them.
        chunk: its tokens; None: `prefill_chunk`. The draft's cache may be at another position than the target's: it loads
        cached prefixes of its own. Where files hold some of the prompt, a file is read instead."""
        size, batch = chunk or self.prefill_chunk, self.batch
        if prefill.pieces and batch.prefix is not None:
            piece, row = prefill.pieces.pop(0), prefill.rows[0]
            more = batch.prefix.read(row.tokens[:-1], piece, prefill.target_cache, row.prompt.cache_salt)
            if not more or not batch.prefix.reads_faster(self.pace.speed.value):
                prefill.pieces.clear()
            return False
        if prefill.scored:
            vocabulary = self.runner.vocabulary
            least = max(tokens_at_once(vocabulary) // len(prefill.target_cache.lengths.host), 1)
            more = prefill_target(
                batch.target, prefill, size=min(size, least), prefix=None, pace=self.pace, vocabulary=vocabulary
            )
        else:
            more = prefill_target(batch.target, prefill, size=size, prefix=batch.prefix, pace=self.pace)
        prefill.prefills_draft = self._prefills_draft(prefill, joining)
        if batch.drafter is not None and not batch.failed and prefill.prefills_draft:
            prefill.ensure_draft_cache(batch.drafter, batch.epoch)
            try:
                more |= prefill_draft(batch.drafter, prefill, size=size, prefix=batch.prefix)
            except Exception as error:  # noqa: BLE001  (whatever is wrong with a draft costs speed alone)
                batch.disable_draft(error)
        if not more:
            for row in prefill.rows:
                row.prompt_ended()
        return not more

    def _prefills_draft(self, prefill: Prefill, joining: int) -> bool:
        """Whether the draft prefills these prompts."""
        if not prefill.answered or all(row.prompt.num_draft_tokens == 0 for row in prefill.rows):
            return False
        if prefill.prefills_draft is not None or self.batch.drafter is None or self.planner is None:
            return self.batch.drafter is not None and prefill.prefills_draft is not False
        longest = max(self.batch.cache.lengths.longest, *(len(row.tokens) for row in prefill.rows))
        rows = self.batch.size(len(self.rows) + joining)
        return self.planner.prefills(Load(rows, longest, prompted=prefill_ratio(prefill.rows), ragged=rows > 1))

    def join(self, ready: Sequence[Prefill]) -> None:
        """Take rows whose prompts were prefilled into the batch, all at once, but those that ended with their prompts."""
        ended = [row for prefill in ready for row in prefill.rows if row.finish is not None]
        ready = [prefill for prefill in ready if any(row.finish is None for row in prefill.rows)]
        if ready:
            self._complete_pending()
            self._rows_changed = True
            self.batch.join(ready)
        for row in ended:
            row.decode_started_at = row.decode_started_at or time.perf_counter()
        # Rows that were prefilled in one call share its caches.
        if joined := [row for row in ended if any(row is other for other in self.rows)]:
            self._remove(joined)

    def admit(self, *rows: Request) -> None:
        """Prefill requests' prompts to their ends, those of similar length together, and take them into the batch."""
        waiting = [self.start_prefill(row) for row in rows]
        while waiting:
            prefill = self.batch_prompts(waiting, self.prefill_chunk)
            while not self.prefill(prefill, len(waiting)):
                pass
            self.join([prefill])
            waiting = [each for each in waiting if not any(each.rows[0] is row for row in prefill.rows)]

    def leave(self, gone: Sequence[Request]) -> None:
        """Take rows out of the batch, finished or not."""
        self._complete_pending()
        self._remove(gone)

    def _remove(self, gone: Sequence[Request], *, under_way: bool = False, tight: bool = False) -> None:
        self._rows_changed = not under_way
        for row in self.batch.remove(gone, under_way=under_way, tight=tight):
            if self.lookup is not None and row.prompt.store and row.finish is not None and row.error is None:
                self.lookup.add_output(row.output, row.prompt.cache_salt)
        if not self.rows:
            # Else the last rows' tokens and stop strings would stay until there are others.
            self.runner.release_rows()

    def forget(self) -> None:
        """Drop what is stored of texts when their requests have ended: cached prefixes, in memory and in files, and what
        look-ups are found in. None of it says whose it is."""
        # Requests that have ended may still have a row while a round is under way, and would be stored when it leaves.
        self._complete_pending()
        if self.lookup is not None:
            self.lookup.forget()
        # Last: its files may be such that they cannot be removed.
        self.prefixes.forget()

    # ------------------------------------------------------------------------------------------------------- one round

    def round(self, joining: int = 0) -> RoundReport:
        """Propose, verify and emit, once for all rows. Rows that finished have left when it returns, or, where another round
        was under way already, when the next one does. joining: rows about to join. Raises what the target raises; what the
        draft raises is logged and costs speed alone."""
        if self._reports:
            return self._reports.popleft()
        self.batch.make_room(self._next_positions)
        step = self._step or self.runner.launch(self._plan(joining))
        self._step = None
        try:
            ahead = self._launch_after(step, joining)
        except Exception as error:
            if not step.drafted:
                raise
            report = self._complete(step, None, None)
            if self.rows:
                self.runner.restore(self.batch.rows, error)
            return report
        return self._complete(step, ahead, joining)

    @property
    def unfinished(self) -> bool:
        """Whether `round` has something to do or to report."""
        return bool(self.rows or self._reports)

    @property
    def reports_pending(self) -> bool:
        """`round` has something to report without running anything."""
        return bool(self._reports)

    def _complete_pending(self) -> None:
        """Complete the round under way, if any, because rows are about to change; `round` reports it later."""
        if self._step is not None:
            step, self._step = self._step, None
            self._reports.append(self._complete(step, None, None))

    def _complete(self, step: Step, ahead: Step | Called | None, joining: int | None) -> RoundReport:
        """Wait for a round and give its rows their tokens. ahead: the round launched behind it. joining: as for `round`, where
        the next one may be launched before the host is done; None: not before rows have changed."""
        launched = step
        step, outcome = self.runner.read(launched)
        plan = step.plan
        if step is not launched or not outcome.clean:
            # The round ahead was computed from values that are not finite.
            ahead = None
        failed = tuple(plan.rows[i] for i in outcome.failing(plan.rows))
        for row in failed:
            row.fail()
        # Rows that ended in the round before this one, which was under way by then, get nothing of it.
        live = [i for i, row in enumerate(plan.rows) if row.finish is None]
        before, sources = [len(row.tokens) for row in plan.rows], plan.sources
        deltas = tuple(
            plan.rows[i].append_round(outcome.emitted[i], outcome.proposed[i], sources[i], self.adapter) for i in live
        )
        self.batch.truncate(step, before, outcome)
        if isinstance(ahead, Called):
            ahead = self._decide(ahead)
        if not self.strategy.launch_ahead:
            self._log_evidence(step, outcome, live)
        rows = tuple(plan.rows[i] for i in live)
        rounds = tuple(row.rounds[-1] for row in rows)
        started_at, self._completed_at = max(plan.started_at, self._completed_at), time.perf_counter()
        report = RoundReport(rows, deltas, rounds, self._completed_at - started_at, failed)
        self._observe(step, report, timed=self._times_one_round(step, ahead))
        ended = [row for row in self.rows if row.finish is not None]
        if len(ended) == len(self.rows):
            # A round that was launched for rows all of which have ended is dropped.
            ahead = None
        if ended and (ahead is None or self.batch.stays_without(ended)):
            self._remove(ended, under_way=ahead is not None)
        if ahead is not None:
            self._step = ahead
        elif joining is not None and self.rows and self._may_launch_ahead(joining):
            self._step = self.runner.launch(self._plan(joining))
        if self.strategy.launch_ahead:
            self._log_evidence(step, outcome, live)
        if any(row.prompt.logprobs is not None for row in rows):
            deltas = (replace(each, logprobs=row.newest_logprobs()) for each, row in zip(deltas, rows, strict=True))
            report = replace(report, deltas=tuple(deltas))
        return report

    def _decide(self, called: Called) -> Step | None:
        """The round of a call that was launched behind another. None where the draft has failed in it."""
        try:
            return self.runner.decide(called)
        except Exception as error:
            if called.drafted is None:
                raise
            self.runner.restore(self.batch.rows, error)
            return None

    def _observe(self, step: Step, report: RoundReport, *, timed: bool) -> None:
        """Let the planner learn from a round. timed: its seconds are those of one round."""
        plan, rounds = step.plan, report.rounds
        if self.planner is None or not rounds:
            return
        tokens = sum(each.emitted for each in rounds)
        self.planner.speedup.observe(tokens, len(rounds) * self.planner.costs.plain_rounds(plan.load, report.seconds))
        emitted = tokens / len(rounds)
        self.planner.charge(plan.load, plan.choice, report.seconds, emitted, drafted=step.drafted)
        if len(rounds) == len(plan.requests) and (step.drafted or not plan.choice.drafted):
            # Positions behind the end of a text count neither as proposed nor as accepted; padding has none.
            newest = iter(rounds)
            counts = [(0, 0) if row.padding else ((last := next(newest)).drafted, last.accepted) for row in plan.rows]
            proposed, accepted = [drafted for drafted, _ in counts], [accepted for _, accepted in counts]
            seconds = report.seconds if timed and not plan.irregular else None
            own = [row.acceptance for row in plan.rows]
            self.planner.observe(plan.load, plan.choice, plan.matches, accepted, seconds, own, proposed)
            plan.steps.observe(accepted, proposed)

    def _times_one_round(self, step: Step, ahead: Step | None) -> bool:
        """Whether the time since the round before was read is that of one round. Of a pipeline not the first one, nor the last;
        nor one before another kind of round: MLX lets few launches wait for the device (mlx/transforms.cpp,
        `MAX_ACTIVE_TASKS`), so that the host reads a round when part of the next one has run. Rounds that are always by
        themselves propose something."""
        if not self.strategy.launch_ahead:
            return True
        if ahead is None:
            return not step.follows and (step.plan.choice.proposed > 0 or step.plan.load.alone)
        return step.follows and ahead.plan.choice == step.plan.choice

    def _may_launch_ahead(self, joining: int) -> bool:
        """Whether the next round may be launched while the host is still at this one."""
        return self.strategy.launch_ahead and not joining and not self.batch.cache.states

    @property
    def _alone(self) -> bool:
        """No round over these rows is launched before the one before it was read: for what grammars force, because logits
        depend on what was said, or because recurrent states depend on how many tokens stay."""
        waits = self._waits_for_grammars or self._waits_for_tokens or bool(self.batch.cache.states)
        return self.strategy.launch_ahead and waits

    @property
    def _drafts_alone(self) -> bool:
        """The same behind a drafted round: what a grammar allows the draft, and the noise of a seed, depend on the tokens."""
        seeded = any(not row.prompt.sampling.greedy and row.prompt.sampling.seed is not None for row in self.rows)
        return self.strategy.launch_ahead and (seeded or self._many_grammars)

    @property
    def _waits_for_grammars(self) -> bool:
        """So many rows have a grammar that what it forces, and look-ups for them, are worth a wait."""
        return self._many_grammars and self.lookup is not None and self.strategy.fits(len(self.batch.rows), 1)

    @property
    def _waits_for_tokens(self) -> bool:
        """Some row's next logits depend on all of its tokens: penalties, bad words and least lengths (`history`)."""
        return any(row.by_history for row in self.rows)

    @property
    def _many_grammars(self) -> bool:
        return self.batch.constrained > 0 and not self.batch.few_constrained

    def _launch_after(self, step: Step, joining: int) -> Step | Called | None:
        """Launch a round behind one that was not read yet. None where the batch will be smaller, where look-ups or grammars are
        waited for, or where the draft would first have to read what it has missed."""
        plan, rows, requests = step.plan, list(self.batch.rows), self.rows
        if not self._may_launch_ahead(joining) or (plan.choice.proposed and not step.drafted):
            return None
        # Every row gets one token at least of the round that is not read yet.
        ending = [row for row in requests if row.finish or row.emitted + 1 >= row.prompt.sampling.max_tokens]
        if ending and not self.batch.stays_without(ending):
            return None
        if self._waits(plan.found):
            return None
        load = replace(plan.load, held=plan.load.held + 1 + plan.choice.proposed // 2, unread=0, lags=False)
        choice = self._choose_after(step, load)
        if choice is None:
            return None
        choice = choice.with_drafted(min(choice.drafted, self._limit(requests))) if choice.drafted else choice
        visible, found = [row.tokens for row in rows], self._look_up(rows, forced=False)
        matches, steps = [None] * len(rows), DraftSteps(choice.drafted)
        plan = Plan(rows, visible, load, choice, found, matches, steps, False, time.perf_counter())
        return self.runner.launch_after(step, plan)

    def _choose_after(self, step: Step, load: Load) -> Choice | None:
        """What to propose behind a round that was not read yet, where its rows have no look-up; None: that is not known yet."""
        plan = step.plan
        if not step.drafted:
            # Plain rounds between drafted ones are so many that one can be timed, which the first and the last of a pipeline
            # cannot: one that follows a drafted one, or another, has one more behind it.
            if any(len(row.rounds) + 1 == row.draft_again for row in self.rows):
                # The draft is tried again for a row that went on without it.
                return None
            more = self.planner is None or self.planner.stay_parked() or not step.follows or step.second
            return plan.choice if more else None
        drafter = self.batch.drafter
        if drafter is None or drafter.cache.states or self.batch.failed or self._drafts_alone:
            return None
        rows = self.batch.rows
        if any(plan.choice.looked_up) or not all(map(drafts, rows)):
            return None
        if self.planner is None:
            return plan.choice
        return self.planner.choose(load, [None] * len(rows), [row.acceptance for row in rows])

    def _plan(self, joining: int) -> Plan:
        """Plan a round over the rows as they are."""
        started_at, batch, rows, requests = time.perf_counter(), self.batch, self.batch.rows, self.rows
        visible, drafter = batch.draft_views(rows), batch.drafter
        unread, lags = (0, False) if drafter is None else (drafter.unread(visible), drafter.lags(visible))
        lengths = batch.cache.lengths
        left = sum(row.prompt.sampling.max_tokens - row.emitted for row in requests) / len(requests)
        load = Load(
            len(rows),
            lengths.longest,
            unread,
            prefill_ratio(requests),
            ragged=not lengths.equal,
            left=left,
            lags=lags,
            alone=self._alone,
            drafts_alone=self._drafts_alone,
        )
        choice, found, matches = self._choose(rows, load, joining)
        choice = choice.with_drafted(min(choice.drafted, self._limit(requests))) if choice.drafted else choice
        steps = DraftSteps(choice.drafted)
        if self.planner is not None and choice.drafted and self.strategy.ask_confidence:
            greedy = [row.prompt.sampling.greedy for row in rows]
            steps = self.planner.steps(load, choice, greedy, [drafts(row) for row in rows])
            steps.most = min(steps.most, self._limit(requests))
        irregular = choice.drafted > 0 and lags
        irregular |= self.strategy.launch_ahead and self._rows_changed
        self._rows_changed = False
        return Plan(list(rows), visible, load, choice, found, matches, steps, irregular, started_at)

    def _limit(self, rows: Sequence[Request]) -> int:
        """The most tokens that any of these wants drafted."""
        limits = [row.prompt.num_draft_tokens for row in rows if drafts(row)]
        wanted = max((self.draft_length if limit is None else limit for limit in limits), default=0)
        if wanted >= self.draft_length:
            return self.draft_length
        return max((n for n in self.strategy.allowed(self.draft_length) if n <= wanted), default=1)

    def _choose(
        self, rows: Sequence[Request], load: Load, joining: int
    ) -> tuple[Choice, list[LookupProposal | None], list[Match | None]]:
        """What to propose, and each row's look-up. Where rows are about to join, nothing is drafted that would not pay with
        them."""
        if self.adaptive and self.planner is None:
            self.profile(len(self.rows))
        if self.planner is None:
            length = self.draft_length if any(map(drafts, self.rows)) else 0
            return Choice(length, (0,) * len(rows)), [None] * len(rows), [None] * len(rows)
        found = self._look_up(rows)
        if self.strategy.launch_ahead and not self._waits(found):
            found: list[LookupProposal | None] = [None for _ in rows]
        matches = [None if each is None else Match(each.length, len(each.tokens), each.source) for each in found]
        allowed = (
            not self.batch.failed and any(map(drafts, self.rows)) and (not joining or self._pays_with(joining, load))
        )
        choice = self.planner.choose(load, matches, [row.acceptance for row in rows], drafts=allowed)
        if self.strategy.launch_ahead and self.lookup is not None and self.lookup.waits(found, len(self.rows)):
            self.lookup.waited(used=any(choice.looked_up), measures=choice.measures)
        return choice, found, matches

    def _pays_with(self, joining: int, load: Load) -> bool:
        """Whether drafts pay in the batch that so many rows are about to join."""
        assert self.planner is not None
        return self.planner.pays(replace(load, rows=self.batch.size(len(self.rows) + joining), ragged=True))

    def _look_up(self, rows: Sequence[Request], *, forced: bool = True) -> list[LookupProposal | None]:
        if self.lookup is None:
            return [None] * len(rows)
        return self.lookup.propose(rows, possible=self.strategy.fits(len(rows), 1), forced=forced)

    def _waits(self, found: Sequence[LookupProposal | None]) -> bool:
        """Whether the next round is launched after this one was read: for look-ups, for what grammars force, or because logits
        depend on what was said."""
        if self._waits_for_grammars or self._waits_for_tokens:
            return True
        return self.lookup is not None and self.lookup.waits(found, len(self.rows))

    def _log_evidence(self, step: Step, outcome: Outcome, live: Sequence[int]) -> None:
        """Add the round's evidence to the rows that need it."""
        rows = step.plan.rows
        if needing := [i for i in live if rows[i].needs_evidence(self.collect)]:
            evidence = step.evidence(outcome)
            for i in needing:
                rows[i].add_evidence(
                    evidence[i], outcome.emitted[i], outcome.proposed[i], self.tie_margin, collect=self.collect
                )
