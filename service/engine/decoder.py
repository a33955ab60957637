"""Speculative decoding of a batch: plan a round, launch it, read it, and append tokens to the rows.

The decoder is single-threaded and knows no text, queues or clocks. The engine thread feeds it, offline tools drive it directly,
and the tests compare its output with the target's alone.
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

    vocabulary: width of the target's logits.
    k: draft length of each round (0: the target alone). With `adaptive` it is the maximum: the planner chooses the draft length
    for the batch, and prompt lookup may propose up to `lookup` tokens.
    prefill_chunk: prompt tokens per call; None: what suits the device.
    collect: gather evidence for rows that may be stored.
    tie_margin: a failure case is a tie when the target's two best log-probabilities differ by less.
    prefix: the prefix cache.
    key: random key for rows that sample without a seed; None: a random one.
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
        """The pending round: launched, not read yet."""
        self._reports: deque[RoundReport] = deque()
        """Rounds that were completed before the batch changed and are not reported yet."""
        self._completed_at = 0.0
        self._rows_changed = False

    @property
    def rows(self) -> list[Request]:
        """The requests in the batch."""
        return self.batch.requests

    @property
    def adapter(self) -> int:
        """The id of the adapter that drafts; BARE_DRAFT (0) for the base draft or no draft."""
        return self.batch.adapter

    @property
    def draft_failures(self) -> int:
        """How often a draft raised an error or produced non-finite logits for a row."""
        return self.batch.draft_failures

    def switch(self, draft: Draft) -> None:
        """Draft with another version from the next round on. Raises ValueError if there is no draft."""
        self._complete_pending()
        self.batch.switch(draft)
        if self.planner is not None:
            self.planner.restart()
        if self._seeds is not None and self.planner is not None and self.draft_length:
            self.planner.reseed(self._seeds.switch(draft.model))

    def profile(self, rows: int, context: int | None = None, timed: Costs | None = None) -> None:
        """Warm up, and time calls over up to `rows` rows to seed the cost model. Without this call, the first round times the
        number of rows it has.

        context: maximum tokens of a request; None: not known. timed: costs measured earlier (see the `timed` property).
        """
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
        """The costs that `profile` measured with the draft; None if it timed nothing."""
        return None if self._seeds is None else self._seeds.timed

    @contextmanager
    def unplanned(self) -> Generator[None]:
        """Within the block, rounds draft `draft_length` tokens each and use no prompt lookup. Afterwards the planner, lookups,
        prefix cache, reports, keys and draft failures are as before. The batch must be empty before and after."""
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
        """The prefill of a request: the whole prompt except its last token."""
        salt, prefix = row.prompt.cache_salt, None if row.unscored else self.batch.prefix
        cached = 0 if prefix is None else self.prefixes.cached_tokens(row.tokens, salt)
        pieces = [] if prefix is None else prefix.find(row.tokens[:-1], self.pace.speed.value, salt)
        cache, reserved = self.batch.target.cache(1), self.memory.reserved(row)
        cache.reserve(reserved)
        return Prefill([row], cache, None, self.batch.epoch, reserved=reserved, cached=cached, pieces=pieces)

    def preempt(self, prefilling: Sequence[int]) -> list[Request]:
        """Preempts the newest requests, keeping at least one, until the remaining rows fit in memory for their next rounds,
        together with prefilling texts of the given lengths. Returns the preempted requests."""
        most = self._next_positions
        running = [len(row.tokens) + most for row in self.rows]
        if not self.rows or self.memory.fits(running, prefilling):
            self.memory.make_room(running, prefilling)
            return []
        if len(self.rows) == 1 and not self.memory.fits([len(self.rows[0].tokens) + most], prefilling, have=0):
            # No request can leave, and releasing spare memory would not be enough either.
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
        """Positions past a row's end that its next rounds may write: those of the pending round and of one launched ahead of
        reading it."""
        return 2 * (1 + max(self.draft_length, self.lookup.max_tokens if self.lookup is not None else 0))

    def batch_prompts(self, waiting: Sequence[Prefill], tokens: int, chunk: int | None = None) -> Prefill:
        """The first of these prompts, together with others that fit into the same call of `tokens` tokens. chunk: as for
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
        """Prefill the next chunk. Returns True when its rows are ready to join the batch. If files hold a part of the prompt, a
        file is loaded instead.

        joining: number of rows about to join, including these. chunk: its tokens; None: `prefill_chunk`.

        The draft's cache may be at another position than the target's, because it loads its cached prefixes separately.
        """
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
            except Exception as error:  # noqa: BLE001  (a broken draft must only cost speed)
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
        """Add rows with prefilled prompts to the batch, all at once. Rows that ended with their prompts are left out."""
        ended = [row for prefill in ready for row in prefill.rows if row.finish is not None]
        ready = [prefill for prefill in ready if any(row.finish is None for row in prefill.rows)]
        if ready:
            self._complete_pending()
            self._rows_changed = True
            self.batch.join(ready)
        for row in ended:
            row.decode_started_at = row.decode_started_at or time.perf_counter()
        # Rows that were prefilled in one call share its caches, so ended rows may have joined.
        if joined := [row for row in ended if any(row is other for other in self.rows)]:
            self._remove(joined)

    def admit(self, *rows: Request) -> None:
        """Prefill the prompts of these requests, batching prompts of similar length, and add the rows to the batch."""
        waiting = [self.start_prefill(row) for row in rows]
        while waiting:
            prefill = self.batch_prompts(waiting, self.prefill_chunk)
            while not self.prefill(prefill, len(waiting)):
                pass
            self.join([prefill])
            waiting = [each for each in waiting if not any(each.rows[0] is row for row in prefill.rows)]

    def leave(self, gone: Sequence[Request]) -> None:
        """Remove rows from the batch, finished or not."""
        self._complete_pending()
        self._remove(gone)

    def _remove(self, gone: Sequence[Request], *, under_way: bool = False, tight: bool = False) -> None:
        self._rows_changed = not under_way
        for row in self.batch.remove(gone, under_way=under_way, tight=tight):
            if self.lookup is not None and row.prompt.store and row.finish is not None and row.error is None:
                self.lookup.add_output(row.output, row.prompt.cache_salt)
        if not self.rows:
            # Otherwise the last rows' tokens and stop strings would stay in memory until the next request.
            self.runner.release_rows()

    def forget(self) -> None:
        """Drop everything stored about ended requests: cached prefixes in memory and in files, and the texts of prompt lookup.
        Nothing is dropped selectively, because none of it records its origin."""
        # Ended requests may still occupy a row while a round is pending. They would be stored when it leaves.
        self._complete_pending()
        if self.lookup is not None:
            self.lookup.forget()
        # Last, because removing its files may fail.
        self.prefixes.forget()

    # ------------------------------------------------------------------------------------------------------- one round

    def round(self, joining: int = 0) -> RoundReport:
        """Propose, verify and emit once for all rows.

        Finished rows have left the batch on return, or, if another round was already launched, when the next call returns.
        joining: number of rows about to join. Raises what the target raises; errors of the draft are logged and only cost
        speed.
        """
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
        """Whether `round` has work or a report."""
        return bool(self.rows or self._reports)

    @property
    def reports_pending(self) -> bool:
        """Whether `round` can report something without running anything."""
        return bool(self._reports)

    def _complete_pending(self) -> None:
        """Finishes the pending round before the batch changes. Its report is queued, and the next call to `round` returns
        it."""
        if self._step is not None:
            step, self._step = self._step, None
            self._reports.append(self._complete(step, None, None))

    def _complete(self, step: Step, ahead: Step | Called | None, joining: int | None) -> RoundReport:
        """Wait for a round and append its tokens to the rows. ahead: the round that was launched after it. joining: as for
        `round`, which allows the next round to be launched before the host has finished; None: the rows are about to change, do
        not launch."""
        launched = step
        step, outcome = self.runner.read(launched)
        plan = step.plan
        if step is not launched or not outcome.clean:
            # The round launched ahead was computed from non-finite values.
            ahead = None
        failed = tuple(plan.rows[i] for i in outcome.failing(plan.rows))
        for row in failed:
            row.fail()
        # Rows that ended in the previous round, while this one was pending, get no tokens from it.
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
            # Drop a round that was launched for rows that have all ended.
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
        """Completes the launch of a target call that was launched ahead. Returns None if the draft failed in it."""
        try:
            return self.runner.decide(called)
        except Exception as error:
            if called.drafted is None:
                raise
            self.runner.restore(self.batch.rows, error)
            return None

    def _observe(self, step: Step, report: RoundReport, *, timed: bool) -> None:
        """Update the planner from a round. timed: `report.seconds` is the time of one round."""
        plan, rounds = step.plan, report.rounds
        if self.planner is None or not rounds:
            return
        tokens = sum(each.emitted for each in rounds)
        self.planner.speedup.observe(tokens, len(rounds) * self.planner.costs.plain_rounds(plan.load, report.seconds))
        emitted = tokens / len(rounds)
        self.planner.charge(plan.load, plan.choice, report.seconds, emitted, drafted=step.drafted)
        if len(rounds) == len(plan.requests) and (step.drafted or not plan.choice.drafted):
            # Positions past the end of a text count neither as proposed nor as accepted. Padding rows have no positions.
            newest = iter(rounds)
            counts = [(0, 0) if row.padding else ((last := next(newest)).drafted, last.accepted) for row in plan.rows]
            proposed, accepted = [drafted for drafted, _ in counts], [accepted for _, accepted in counts]
            seconds = report.seconds if timed and not plan.irregular else None
            own = [row.acceptance for row in plan.rows]
            self.planner.observe(plan.load, plan.choice, plan.matches, accepted, seconds, own, proposed)
            plan.steps.observe(accepted, proposed)

    def _times_one_round(self, step: Step, ahead: Step | None) -> bool:
        """Whether the time since the previous round was read is the time of one round.

        In a pipeline this holds neither for the first round nor for the last, nor for a round followed by one of another kind.
        MLX limits how many launches may wait for the device (mlx/transforms.cpp, `MAX_ACTIVE_TASKS`), so the host reads a round
        when part of the next one has already run. Without a pipeline, only rounds that propose something, or that are never
        launched ahead, are timed.
        """
        if not self.strategy.launch_ahead:
            return True
        if ahead is None:
            return not step.follows and (step.plan.choice.proposed > 0 or step.plan.load.alone)
        return step.follows and ahead.plan.choice == step.plan.choice

    def _may_launch_ahead(self, joining: int) -> bool:
        """Whether the next round may be launched while the host still processes this one."""
        return self.strategy.launch_ahead and not joining and not self.batch.cache.states

    @property
    def _alone(self) -> bool:
        """Whether every round over these rows must wait until the previous one was read: grammars may force tokens, logits may
        depend on earlier tokens, or recurrent states depend on the number of accepted tokens."""
        waits = self._waits_for_grammars or self._waits_for_tokens or bool(self.batch.cache.states)
        return self.strategy.launch_ahead and waits

    @property
    def _drafts_alone(self) -> bool:
        """Whether a round must wait after a drafted round: a grammar's mask for the draft and the noise of a seed depend on the
        emitted tokens."""
        seeded = any(not row.prompt.sampling.greedy and row.prompt.sampling.seed is not None for row in self.rows)
        return self.strategy.launch_ahead and (seeded or self._many_grammars)

    @property
    def _waits_for_grammars(self) -> bool:
        """Whether enough rows have a grammar that forced tokens and prompt lookup for them are worth a wait."""
        return self._many_grammars and self.lookup is not None and self.strategy.fits(len(self.batch.rows), 1)

    @property
    def _waits_for_tokens(self) -> bool:
        """Whether the next logits of some row depend on all of its tokens: penalties, bad words and minimum lengths
        (`history`)."""
        return any(row.by_history for row in self.rows)

    @property
    def _many_grammars(self) -> bool:
        return self.batch.constrained > 0 and not self.batch.few_constrained

    def _launch_after(self, step: Step, joining: int) -> Step | Called | None:
        """Launch a round before `step` was read. Returns None if the batch will shrink, if prompt lookup or grammars need the
        tokens first, or if the draft would have to catch up first."""
        plan, rows, requests = step.plan, list(self.batch.rows), self.rows
        if not self._may_launch_ahead(joining) or (plan.choice.proposed and not step.drafted):
            return None
        # Every row gets at least one token from the unread round.
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
        """What to propose after a round that was not read yet and in which no row uses prompt lookup. None: not known yet."""
        plan = step.plan
        if not step.drafted:
            # Plain rounds come in runs long enough that one of them can be timed. The first and the last of a pipeline cannot:
            # a plain round after a drafted one, or after one that was not launched ahead, gets another one after it.
            if any(len(row.rounds) + 1 == row.draft_again for row in self.rows):
                # The draft is due to be retried for a row that continued without it.
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
        """Plan a round over the rows as they are now."""
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
        """The largest draft length that any of these rows asks for, rounded down to an allowed one."""
        limits = [row.prompt.num_draft_tokens for row in rows if drafts(row)]
        wanted = max((self.draft_length if limit is None else limit for limit in limits), default=0)
        if wanted >= self.draft_length:
            return self.draft_length
        return max((n for n in self.strategy.allowed(self.draft_length) if n <= wanted), default=1)

    def _choose(
        self, rows: Sequence[Request], load: Load, joining: int
    ) -> tuple[Choice, list[LookupProposal | None], list[Match | None]]:
        """What to propose, and each row's prompt lookup. When rows are about to join, a draft must also pay in the larger
        batch."""
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
        """Whether drafts pay once `joining` more rows have joined the batch."""
        assert self.planner is not None
        return self.planner.pays(replace(load, rows=self.batch.size(len(self.rows) + joining), ragged=True))

    def _look_up(self, rows: Sequence[Request], *, forced: bool = True) -> list[LookupProposal | None]:
        if self.lookup is None:
            return [None] * len(rows)
        return self.lookup.propose(rows, possible=self.strategy.fits(len(rows), 1), forced=forced)

    def _waits(self, found: Sequence[LookupProposal | None]) -> bool:
        """Whether the next round is launched only after this one was read: for prompt lookup, for tokens that grammars force,
        or because logits depend on earlier tokens."""
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
