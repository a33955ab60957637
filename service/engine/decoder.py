"""One speculative round over a batch: propose K tokens for every row, verify all rows in one target call, emit.

Single-threaded and without text, queues or clocks beyond the rows' own: the engine thread feeds it, offline tools drive it
directly, and the tests compare it with a target decoding alone.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import BARE_DRAFT, Source
from service.engine import accept, device, profile
from service.engine.acceptance import Acceptance
from service.engine.adapters import Draft
from service.engine.costs import Load
from service.engine.drafters.head import make_drafter
from service.engine.drafters.lookup import MIN_SHARED_MATCH, Lookup, LookupProposal
from service.engine.drafters.model import READING, WIDE, Proposal, instead
from service.engine.evidence import RoundEvidence, gather_evidence, split_rows
from service.engine.kv.buffers import compaction_order
from service.engine.kv.cache import RowCache
from service.engine.kv.prefix import Owner, PrefixCache
from service.engine.planner import Choice, DraftSteps, Match, Planner
from service.engine.prefill import Prefill, batch_prompts, prefill_draft, prefill_target
from service.engine.report import RoundReport
from service.engine.request import Request, prefill_ratio
from service.engine.rounds import Outcome, Plan, Step
from service.engine.sampling import SamplingBatch, SharedNoise, transform
from service.engine.strategy import current
from service.engine.target import Target

log = logging.getLogger(__name__)

RETRY = 32
"""Rounds that a row decodes without the draft after its logits for it were not finite; after another time twice as many."""


class Decoder:
    """A batch of rows that decode together.

    vocabulary: width of the target's logits. k: tokens drafted per round (0: the target alone), or, with `adaptive`, at most
    so many: as many as pay for the batch at hand, where up to `lookup` tokens may also come from prompt look-up. collect:
    gather evidence for rows that may be stored. prefix: cached prefixes of prompts.

    A draft that raises is not used until another one is switched in; decoding goes on with the target alone. Where its logits
    for a row are not finite, that row alone goes on without it for a while. Errors of the target are raised.
    """

    def __init__(
        self,
        target: nn.Module,
        draft: Draft | None,
        *,
        vocabulary: int,
        k: int,
        prefill_chunk: int = 256,
        tie_margin: float = 1e-3,
        collect: bool = False,
        adaptive: bool = False,
        lookup: int = 0,
        prefix: PrefixCache | None = None,
        key: mx.array | None = None,
    ) -> None:
        self.strategy = current()
        self.target = Target.of(target, draft.model if draft is not None else None)
        self.vocabulary = vocabulary
        self.prefill_chunk = prefill_chunk
        self.tie_margin = tie_margin
        self.collect = collect
        self.drafted = k if draft is not None else 0
        self.lookup = Lookup(lookup) if adaptive and lookup > 0 else None
        self.adaptive = adaptive and (self.drafted > 0 or self.lookup is not None)
        self.planner: Planner | None = None
        self._seeds: profile.Seeds | None = None
        self.key = mx.random.key(secrets.randbits(63)) if key is None else key
        self.cache = self.target.cache(0)
        self.drafter = make_drafter(draft, vocabulary, self.cache) if draft is not None else None
        self.failed = False
        self.draft_failures = 0
        self.rows: list[Request] = []
        self.prefix = prefix
        self.epoch = 0
        """Counts switches and failures of drafts."""
        self._epochs: list[int] = []
        """The epoch in which the draft began to read each row."""
        self._batch: SamplingBatch | None = None
        self._step: Step | None = None
        """The round under way, launched and not read."""
        self._landed: deque[RoundReport] = deque()
        """Rounds completed because rows were to change, not reported yet."""
        self._completed_at = 0.0
        self._warned = -1
        """The epoch in which logits that were not finite were last logged."""

    @property
    def adapter(self) -> int:
        """The id of the adapter that drafts; BARE_DRAFT (0) for the bare draft or none."""
        return self.drafter.draft.adapter if self.drafter is not None else BARE_DRAFT

    def switch(self, draft: Draft) -> None:
        """Draft with another version from the next round on, which every row uses again. Raises ValueError without a draft."""
        if self.drafter is None:
            raise ValueError("this decoder was built without a draft")
        self._land()
        self.drafter.switch(draft)
        self.failed = False
        self._next_epoch()
        if self.planner is not None:
            self.planner.restart()
        if self._seeds is not None and self.planner is not None and self.drafted:
            self.planner.reseed(self._seeds.switch(draft.model))
        for row in self.rows:
            row.acceptance = Acceptance(self.drafted)
            row.draft_failures = row.draft_again = 0

    def profile(self, rows: int) -> None:
        """Time calls over up to so many rows, which seed the planner's costs; left undone, the first round does it for its own
        rows."""
        if self.adaptive:
            draft = self.drafter.draft.model if self.drafter is not None and self.drafted else None
            looked_up = self.lookup.max_tokens if self.lookup is not None else 0
            sizes, most = profile.sizes(rows), max(self.drafted, looked_up)
            self._seeds = profile.Seeds(profile.measure(self.target.model, draft, rows=sizes, most=most), draft)
            self.planner = Planner(self.drafted, looked_up, self._seeds.costs)

    # ------------------------------------------------------------------------------------------------ rows come and go

    def begin(self, row: Request) -> Prefill:
        """Start reading a row's prompt, all but its last token."""
        return Prefill([row], self.target.cache(1), None, self.epoch)

    def gather(self, waiting: Sequence[Prefill], room: int) -> Prefill:
        """The first of these prompts, with others that can be read beside it in one call of `room` tokens."""
        kinds = [self._follows(prefill, len(waiting)) for prefill in waiting]
        return batch_prompts(waiting, kinds, self.target, room=room, size=self.prefill_chunk, prefix=self.prefix)

    def read(self, prefill: Prefill, coming: int = 1) -> bool:
        """Read the next chunk; True when its rows are ready to join. coming: rows that are to join, these among them. Target
        and draft go on from what each of them holds, which differs when the draft is newer than a kept beginning."""
        size, prefix, drafter = self.prefill_chunk, self.prefix, self.drafter
        more = prefill_target(self.target, prefill, size=size, prefix=prefix)
        prefill.prefills_draft = self._follows(prefill, coming)
        if drafter is not None and not self.failed and prefill.prefills_draft:
            prefill.ensure_draft_cache(drafter.draft.model, self.epoch)
            try:
                more |= prefill_draft(drafter, prefill, size=size, prefix=prefix)
            except Exception as error:  # noqa: BLE001  (whatever is wrong with a draft costs speed alone)
                self._put_draft_aside(error)
        return not more

    def join(self, ready: Sequence[Prefill]) -> None:
        """Take rows whose prompts were read into the batch, all at once."""
        self._land()
        self.cache.join([prefill.target_cache for prefill in ready])
        if self.drafter is not None:
            self.drafter.cache.join(
                [prefill.ensure_draft_cache(self.drafter.draft.model, self.epoch) for prefill in ready]
            )
        for prefill in ready:
            for row in prefill.rows:
                row.decode_started_at = time.perf_counter()
                row.acceptance = Acceptance(self.drafted)
            self.rows += prefill.rows
            self._epochs += [prefill.epoch] * len(prefill.rows)

    def admit(self, row: Request) -> None:
        """Read a row's prompt to its end, then take it into the batch."""
        prefill = self.begin(row)
        while not self.read(prefill):
            pass
        self.join([prefill])

    def leave(self, gone: Sequence[Request]) -> None:
        """Take rows out of the batch, finished or not. What is verified of them is kept for those who go on from there."""
        self._land()
        self._remove(gone)

    def _remove(self, gone: Sequence[Request]) -> None:
        indices = {i for i, row in enumerate(self.rows) if any(row is other for other in gone)}
        gone = [self.rows[i] for i in indices]
        for i in indices:
            self._keep_beginning(i)
        keep = compaction_order(len(self.rows), indices)
        self.cache.compact(keep)
        if self.drafter is not None:
            self.drafter.cache.compact(keep)
        self.rows = [self.rows[i] for i in keep]
        self._epochs = [self._epochs[i] for i in keep]
        for row in gone:
            if self.lookup is not None and row.prompt.store:
                self.lookup.add_output(row.output)

    def _keep_beginning(self, index: int) -> None:
        row = self.rows[index]
        if self.prefix is None or not row.prompt.store:
            return
        self.prefix.insert(Owner.TARGET, row.tokens, self.cache, index)
        if self.drafter is not None and self._epochs[index] == self.epoch:
            self.prefix.insert(Owner.DRAFT, row.tokens, self.drafter.cache, index)

    def _next_epoch(self) -> None:
        self.epoch += 1
        if self.prefix is not None:
            self.prefix.clear(Owner.DRAFT)

    # ------------------------------------------------------------------------------------------------------- one round

    def round(self, coming: int = 0) -> RoundReport:
        """Propose, verify and emit, once for all rows. Rows that finished have left when it returns, or, where another round
        was under way already, when the next one does. coming: rows about to join. Raises what the target raises; whatever the
        draft raises is logged, and costs speed alone."""
        if self._landed:
            return self._landed.popleft()
        step = self._step or self._launch(self._plan(self.rows, coming))
        self._step = None
        ahead = self._launch_plain_after(step, coming)
        return self._complete(step, ahead, coming)

    @property
    def unfinished(self) -> bool:
        """Whether `round` has something to do or to report."""
        return bool(self.rows or self._landed)

    def _land(self) -> None:
        """Complete the round under way, if any, for rows are about to change; `round` reports it later."""
        if self._step is not None:
            step, self._step = self._step, None
            self._landed.append(self._complete(step, None, None))

    def _complete(self, step: Step, ahead: Step | None, coming: int | None) -> RoundReport:
        """Wait for a round and give its rows their tokens. ahead: the round launched behind it. coming: as for `round`, where
        the next one may be launched before the host is done; None: not before rows have changed."""
        step, done = self._read(step)
        plan = step.plan
        # Rows that ended in the round before this one, which was under way by then, get nothing of it.
        live = [i for i, row in enumerate(plan.rows) if row.finish is None]
        before = [len(row.tokens) for row in plan.rows]
        taken = {
            i: plan.rows[i].append_round(done.emitted[i], done.proposed[i], plan.sources[i], self.adapter) for i in live
        }
        if ahead is not None:
            self.cache.advance(1)
        else:
            self.cache.truncate([len(row.tokens) - 1 for row in self.rows])
        if self.drafter is not None:
            self._settle_draft(plan, before, done.finite)
        if not self.strategy.launch_ahead:
            self._log_evidence(step, done, live)
        rows = [plan.rows[i] for i in live]
        rounds = tuple(row.rounds[-1] for row in rows)
        since, self._completed_at = max(plan.started_at, self._completed_at), time.perf_counter()
        seconds = self._completed_at - since
        if self.planner is not None and rounds:
            emitted = sum(each.emitted for each in rounds) / len(rounds)
            self.planner.charge(plan.load, plan.choice, seconds, emitted, drafted=step.drafted)
        if self.planner is not None and len(rows) == len(plan.rows) and (step.drafted or not plan.choice.drafted):
            # Positions behind the end of a text count neither as proposed nor as accepted.
            proposed, accepted = [each.drafted for each in rounds], [each.accepted for each in rounds]
            # The first and the last round of a pipeline hand over two rounds, or none.
            timed = None if plan.behind or step.follows != (ahead is not None) else seconds
            own = [row.acceptance for row in rows]
            self.planner.observe(plan.load, plan.choice, plan.matches, accepted, timed, own, proposed)
            plan.steps.observe(accepted, proposed)
        ended = [row for row in self.rows if row.finish is not None]
        if ended and (ahead is None or len(ended) == len(self.rows)):
            # What was launched for rows all of which have ended is of no use to anybody.
            self._remove(ended)
        elif ahead is not None:
            self._step = ahead
        elif coming is not None and self._may_launch_ahead(plan, coming):
            self._step = self._launch(self._plan(self.rows, coming))
        if self.strategy.launch_ahead:
            self._log_evidence(step, done, live)
        return RoundReport(tuple(rows), tuple(taken[i] for i in live), rounds, seconds)

    def _may_launch_ahead(self, plan: Plan, coming: int) -> bool:
        """Whether the next round over the same rows may be launched while the host is still at this one."""
        same = len(plan.rows) == len(self.rows) and all(a is b for a, b in zip(plan.rows, self.rows, strict=True))
        return self.strategy.launch_ahead and not coming and not self.cache.states and same

    def _plan(self, rows: Sequence[Request], coming: int) -> Plan:
        """What a round over these rows, as they stand, is to do."""
        started_at = time.perf_counter()
        visible = self._visible(rows)
        unread = self.drafter.unread(visible) if self.drafter is not None else 0
        lengths = self.cache.lengths
        load = Load(len(rows), lengths.longest, unread, prefill_ratio(rows), ragged=not lengths.equal)
        choice, found, matches = self._choose(rows, load, coming)
        steps = DraftSteps(choice.drafted)
        if self.planner is not None and choice.drafted and self.strategy.ask_confidence:
            greedy = [row.prompt.sampling.greedy for row in rows]
            steps = self.planner.steps(load, choice, greedy, [_drafts(row) for row in rows])
        behind = choice.drafted > 0 and self.drafter is not None and self.drafter.behind(visible)
        return Plan(list(rows), visible, load, choice, found, matches, steps, behind, started_at)

    def _launch(self, plan: Plan) -> Step:
        """Hand a round to the device, or on a CPU make it ready to be computed. Raises what the target raises."""
        sampling = self._sampling(plan.rows)
        draft_key, verify_key = self._keys(sampling, 2)
        noise = SharedNoise(sampling, [row.emitted for row in plan.rows], self.vocabulary)
        if not plan.steps.stops:
            noise.first(plan.steps.most + 1)
        failures = self.draft_failures
        drafted = self._propose(plan, sampling, noise, draft_key)
        if drafted is not None:
            plan = plan.having(drafted.tokens.shape[1])
        if self.draft_failures > failures:
            sampling, noise, verify_key = self._anew(plan.rows)
        try:
            return self._verify(plan, drafted, sampling, noise, verify_key)
        except Exception as error:
            if drafted is None:
                raise
            return self._without_draft(plan, error)

    def _launch_plain_after(self, step: Step, coming: int) -> Step | None:
        """Launch a round behind one that was not read yet, where neither proposes anything: the target reads the tokens that
        the device has just chosen. None where a row will end, where one has found something to look up, or where the draft
        is due."""
        plan = step.plan
        if not self._may_launch_ahead(plan, coming) or plan.choice.proposed:
            return None
        # Every row gets one token of the round that is not read yet.
        if any(row.emitted + 1 >= row.prompt.sampling.max_tokens or row.finish for row in plan.rows):
            return None
        if any(found is not None and found.length >= MIN_SHARED_MATCH for found in plan.found):
            return None
        if self.planner is not None and not self.planner.stay_parked():
            return None
        started_at = time.perf_counter()
        (key,) = self._keys(step.sampling, 1)
        noise = SharedNoise(step.sampling, [row.emitted + 1 for row in plan.rows], self.vocabulary)
        found = [None if self.lookup is None else self.lookup.find(row.tokens, row.ngrams) for row in plan.rows]
        load = replace(plan.load, held=plan.load.held + 1)
        following = replace(plan, load=load, found=found, started_at=started_at)
        ahead = self._verify(following, None, step.sampling, noise, key, latest=step.emitted[:, :1])
        ahead.follows = True
        return ahead

    def _read(self, step: Step) -> tuple[Step, Outcome]:
        """Wait for a round. Where it fails with a proposal of the draft in it, another one is launched without the draft."""
        try:
            return step, step.read()
        except Exception as error:
            # MLX raises where arrays are evaluated, and the proposal is evaluated with the verification.
            if not step.drafted:
                raise
            step = self._without_draft(step.plan, error)
            return step, step.read()

    def _without_draft(self, plan: Plan, error: Exception) -> Step:
        """The same round without the draft, whose evaluation raised `error`."""
        self._put_draft_aside(error)
        sampling, noise, key = self._anew(plan.rows)
        self._prefill_again(plan.rows)
        return self._verify(plan, None, sampling, noise, key)

    def _sampling(self, rows: Sequence[Request]) -> SamplingBatch:
        """The rows' sampling, as arrays that are kept until rows change."""
        settings = tuple(row.prompt.sampling for row in rows)
        if self._batch is None or self._batch.rows != settings:
            self._batch = SamplingBatch.of(settings, self.vocabulary)
        return self._batch

    def _keys(self, sampling: SamplingBatch, count: int) -> list[mx.array]:
        """Fresh keys where rows need them."""
        if not sampling.unseeded:
            return [self.key] * count
        self.key, *keys = mx.random.split(self.key, count + 1)
        return keys

    def _anew(self, rows: Sequence[Request]) -> tuple[SamplingBatch, SharedNoise, mx.array]:
        """What a round samples with, made again: MLX may take arrays of an evaluation that failed for computed."""
        self._batch = None
        sampling = self._sampling(rows)
        self.key = mx.random.key(secrets.randbits(63))
        return (
            sampling,
            SharedNoise(sampling, [row.emitted for row in rows], self.vocabulary),
            mx.random.key(secrets.randbits(63)),
        )

    def _prefill_again(self, rows: Sequence[Request]) -> None:
        """Compute the target's keys and values of all rows anew, after an evaluation that failed with them in it. Dear, and as
        rare as a draft that fails so."""
        made: list[RowCache] = []
        for row in rows:
            cache, text = self.target.cache(1), row.tokens[:-1]
            for start in range(0, len(text), self.prefill_chunk):
                self.target(mx.array([text[start : start + self.prefill_chunk]]), cache)
                device.wait(cache.arrays())
                cache.truncate([min(start + self.prefill_chunk, len(text))])
            made.append(cache)
        self.cache.compact([])
        self.cache.join(made)

    def _visible(self, rows: Sequence[Request]) -> list[list[int]]:
        """Each row's tokens as the draft sees them. A draft call runs over the whole batch: of a row that goes without the
        draft it reads one token more than it has read, and nothing is proposed there."""
        if self.drafter is None:
            return [row.tokens for row in rows]
        held = self.drafter.cache.lengths.host
        return [row.tokens if _drafts(row) else row.tokens[: n + 1] for row, n in zip(rows, held, strict=True)]

    def _verify(
        self,
        plan: Plan,
        drafted: Proposal | None,
        sampling: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        latest: mx.array | None = None,
    ) -> Step:
        """One target call over each row's newest token and its proposal: what was looked up where the plan says so, else what
        was drafted. latest: (B, 1), the newest tokens where only the device knows them yet. The target's cache then holds the
        whole proposal."""
        rows, choice = plan.rows, plan.choice
        looked_up = [f.tokens[:n] if f else [] for f, n in zip(plan.found, choice.looked_up, strict=True)]
        most = max((len(tokens) for tokens in looked_up), default=0) if drafted is None else choice.proposed
        finite = None
        if drafted is not None:
            finite = drafted.usable
            if not all(map(_drafts, rows)):
                drafted = replace(drafted, usable=finite & mx.array([_drafts(row) for row in rows])[:, None])
        proposal = instead(drafted, looked_up, most, self.vocabulary, sampling.unseeded)
        if latest is None:
            latest = mx.array(np.array([[row.tokens[-1]] for row in rows], dtype=np.int32))
        tokens = latest
        if proposal is not None:
            tokens = mx.concatenate([latest.astype(proposal.tokens.dtype), proposal.tokens], axis=1)
        logits = self.target(tokens, self.cache)[..., : self.vocabulary]
        distribution = transform(logits, sampling)
        accepted, following = accept.accept(distribution, sampling, noise.first(tokens.shape[1]), proposal, key)
        emitted = following[:, None]
        if proposal is not None:
            emitted = accept.emitted_tokens(accepted, following, proposal.tokens)
        evidence = None
        if self.collect and any(row.prompt.store for row in rows) and self.strategy.launch_ahead:
            evidence = RoundEvidence.of(logits, distribution, sampling, emitted, drafted)
        step = Step(
            plan,
            sampling,
            drafted is not None,
            accepted=accepted,
            emitted=emitted,
            finite=finite,
            logits=logits,
            distribution=distribution,
            proposal=proposal,
            evidence=evidence,
            others=[*self.cache.arrays(), self.key],
        )
        if self.strategy.launch_ahead:
            step.launch()
        return step

    def _log_evidence(self, step: Step, done: Outcome, live: Sequence[int]) -> None:
        """Give rows that may be stored what the log keeps of the round."""
        rows = step.plan.rows
        if not self.collect or not any(rows[i].prompt.store for i in live):
            return
        tried = [
            [] if source is Source.LOOKUP else tokens
            for tokens, source in zip(done.proposed, step.plan.sources, strict=True)
        ]
        if step.evidence is not None:
            seen = split_rows(step.evidence, done.emitted, tried)
        else:
            seen = gather_evidence(step.logits, step.distribution, step.sampling, done.emitted, tried, step.proposal)
        for i in live:
            if rows[i].prompt.store:
                rows[i].add_evidence(seen[i], done.emitted[i], done.proposed[i], self.tie_margin)

    def _settle_draft(self, plan: Plan, before: Sequence[int], finite: Sequence[bool]) -> None:
        """Truncate the draft's cache to tokens that the rows really have. before: each row's tokens before the round.

        The draft wrote its own proposal behind those. Its accepted part stays, but where tokens that were looked up took its
        place none of it does: they are other tokens.
        """
        assert self.drafter is not None
        cache, limits = self.drafter.cache, list[int]()
        rows, visible = plan.rows, [len(tokens) for tokens in plan.visible]
        for row, source, old, seen, fine in zip(rows, plan.sources, before, visible, finite, strict=True):
            if not _drafted(row):
                limits.append(seen - 1)
            else:
                limits.append(len(row.tokens) - 1 if fine and source is Source.DRAFT else min(old, len(row.tokens) - 1))
        cache.truncate([min(n, limit) for n, limit in zip(cache.lengths.host, limits, strict=True)])
        for index, row in enumerate(rows):
            if not finite[index] and _drafted(row):
                self._set_row_aside(index, row)
            elif not finite[index]:
                cache.zero_tail(index)

    def _set_row_aside(self, index: int, row: Request) -> None:
        """Let a row go on without the draft, whose logits for it were not finite, and try again later."""
        assert self.drafter is not None
        sound = self.drafter.cache.remove_nonfinite(index)
        if not sound and self.prefix is not None:
            # Cached prefixes may hold the same values.
            self.prefix.clear(Owner.DRAFT)
        rounds = RETRY << min(row.draft_failures, 16)
        row.draft_failures += 1
        row.draft_again = len(row.rounds) + rounds
        if not sound and len(row.tokens) > max(READING // len(self.rows), WIDE):
            # The draft would have to read the row again in several rounds, in which nobody else could draft.
            row.draft_again = sys.maxsize
        self.draft_failures += 1
        if self._warned != self.epoch:
            self._warned = self.epoch
            log.warning(
                "the draft (adapter %d) gave logits that are not finite: request %s goes on without it for %d rounds",
                self.adapter,
                row.id,
                rounds,
            )

    def _follows(self, prefill: Prefill, coming: int) -> bool:
        """Whether the draft should read what these rows are asked."""
        if prefill.prefills_draft is not None or self.drafter is None or self.planner is None:
            return self.drafter is not None and prefill.prefills_draft is not False
        held = max(self.cache.lengths.longest, *(len(row.prompt.tokens) for row in prefill.rows))
        rows = len(self.rows) + coming
        return self.planner.prefills(Load(rows, held, prompted=prefill_ratio(prefill.rows), ragged=rows > 1))

    def _choose(
        self, rows: Sequence[Request], load: Load, coming: int
    ) -> tuple[Choice, list[LookupProposal | None], list[Match | None]]:
        """What to propose this round, and what was looked up for each row. Where others wait to join, nothing is drafted that
        would not pay among them."""
        found: list[LookupProposal | None] = [None] * len(rows)
        if self.adaptive and self.planner is None:
            self.profile(len(rows))
        if self.planner is None:
            return Choice(self.drafted, (0,) * len(rows)), found, [None] * len(rows)
        if self.lookup is not None:
            found = [self.lookup.find(row.tokens, row.ngrams) for row in rows]
        matches = [None if f is None else Match(f.length, len(f.tokens)) for f in found]
        drafts = not self.failed and (
            not coming or self.planner.pays(replace(load, rows=load.rows + coming, ragged=True))
        )
        return self.planner.choose(load, matches, [row.acceptance for row in rows], drafts=drafts), found, matches

    def _propose(self, plan: Plan, sampling: SamplingBatch, noise: SharedNoise, key: mx.array) -> Proposal | None:
        """What the draft proposes, already under way on the device; None where it proposes nothing."""
        rows = plan.rows
        if self.drafter is None or self.failed or plan.steps.most == 0 or any(len(row.tokens) < 2 for row in rows):
            return None
        if not any(map(_drafts, rows)):
            return None
        try:
            proposal = self.drafter.propose(plan.visible, plan.steps, sampling, noise, key)
            if proposal is not None:
                # What MLX refuses to run is then raised here, before the target's cache depends on it.
                device.launch(proposal.tokens, proposal.usable, [] if proposal.logq is None else proposal.logq)
            return proposal
        except Exception as error:  # noqa: BLE001  (whatever is wrong with a draft costs speed alone)
            self._put_draft_aside(error)
            return None

    def _put_draft_aside(self, error: Exception) -> None:
        """Go on without the draft, which raised `error`, until another is switched in. Its keys and values may be as broken as
        its proposals: the next draft reads the rows from the start."""
        log.error(
            "the draft (adapter %d) failed; decoding goes on without it until the next switch",
            self.adapter,
            exc_info=error,
        )
        self.failed = True
        self.draft_failures += 1
        self._next_epoch()
        if self.drafter is not None:
            self.drafter.cache = RowCache(self.drafter.draft.model, len(self.rows))


def _drafts(row: Request) -> bool:
    """Whether the draft proposes tokens for a row."""
    return len(row.rounds) >= row.draft_again


def _drafted(row: Request) -> bool:
    """The same of the round that the row has just had."""
    return len(row.rounds) > row.draft_again
