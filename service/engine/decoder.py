"""One speculative round over a batch: propose K tokens for every row, verify all rows in one target call, emit.

Single-threaded and without text, queues or clocks beyond the rows' own: the worker feeds it, offline tools drive it
directly, and the tests compare it with a target decoding alone.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from service.core import BARE_DRAFT, Source
from service.engine import profile, verify
from service.engine.acceptance import Acceptance
from service.engine.cache import RowCache
from service.engine.confidence import Steps
from service.engine.costs import Load
from service.engine.draft import Draft
from service.engine.drafting import READING, WIDE, Proposal, instead
from service.engine.eagle import drafter
from service.engine.evidence import Evidence, gather
from service.engine.length import Choice, DraftLength, Match
from service.engine.lookup import Found, Lookup
from service.engine.prefix import Owner, PrefixCache
from service.engine.reading import Prefill, follow, lead, together
from service.engine.report import RoundReport
from service.engine.room import closed
from service.engine.row import Row, prompted
from service.engine.sampling import SamplingBatch, SharedNoise, transform
from service.engine.target import Target

log = logging.getLogger(__name__)

RETRY = 32
"""Rounds that a row decodes without the draft after its logits for it were not finite; after another time twice as many."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """What one target call over a proposal gave. accepted: (B,) positions of each row's proposal. emitted: tokens of each row,
    the accepted ones and the target's own after them. proposed: each row's proposal, without positions where the draft's
    logits were not finite. finite: (B,) whether they all were. logits, law: (B, K+1, V) before and after the sampling
    transform."""

    accepted: list[int]
    emitted: list[list[int]]
    proposed: list[list[int]]
    finite: list[bool]
    logits: mx.array
    law: mx.array
    proposal: Proposal | None


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
        self.target = Target.of(target, draft.model if draft is not None else None)
        self.vocabulary = vocabulary
        self.prefill_chunk = prefill_chunk
        self.tie_margin = tie_margin
        self.collect = collect
        self.drafted = k if draft is not None else 0
        self.lookup = Lookup(lookup) if adaptive and lookup > 0 else None
        self.adaptive = adaptive and (self.drafted > 0 or self.lookup is not None)
        self.length: DraftLength | None = None
        self._profile: profile.Profile | None = None
        self.key = mx.random.key(secrets.randbits(63)) if key is None else key
        self.cache = self.target.cache(0)
        self.drafter = drafter(draft, vocabulary, self.cache) if draft is not None else None
        self.failed = False
        self.draft_failures = 0
        self.rows: list[Row] = []
        self.prefix = prefix
        self.epoch = 0
        """Counts switches and failures of drafts."""
        self._epochs: list[int] = []
        """The epoch in which the draft began to read each row."""
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
        self.drafter.switch(draft)
        self.failed = False
        self._next_epoch()
        if self.length is not None:
            self.length.restart()
        if self._profile is not None and self.drafted:
            self._profile.switch(draft.model)
            if self.length is not None:
                self.length.learn(self._profile.costs())
        for row in self.rows:
            row.acceptance = Acceptance(self.drafted)
            row.draft_failures = row.draft_again = 0

    def profile(self, rows: int) -> None:
        """Measure what rounds of up to so many rows cost here, for lengths to be chosen by; left undone, the first round does
        it for its own rows."""
        if self.adaptive:
            draft = self.drafter.draft.model if self.drafter is not None and self.drafted else None
            looked_up = self.lookup.most if self.lookup is not None else 0
            sizes, most = profile.sizes(rows), max(self.drafted, looked_up)
            self._profile = profile.Profile(self.target.model, draft, rows=sizes, most=most)
            self.length = DraftLength(self.drafted, looked_up, self._profile.measure())

    def idle(self) -> bool:
        """While there are no rows: measure a little of it again, where that is due. False: there is nothing to do."""
        return self._profile is not None and not self.failed and self._profile.again()

    # ------------------------------------------------------------------------------------------------ rows come and go

    def begin(self, row: Row) -> Prefill:
        """Start reading a row's prompt, all but its last token."""
        if self._profile is not None and self.length is not None and (costs := self._profile.settle()) is not None:
            self.length.learn(costs)
        return Prefill([row], self.target.cache(1), None, self.epoch)

    def gather(self, waiting: Sequence[Prefill], room: int) -> Prefill:
        """The first of these prompts, with others that can be read beside it in one call of `room` tokens."""
        kinds = [self._follows(prefill, len(waiting)) for prefill in waiting]
        return together(waiting, kinds, self.target, room=room, size=self.prefill_chunk, prefix=self.prefix)

    def read(self, prefill: Prefill, coming: int = 1) -> bool:
        """Read the next chunk; True when its rows are ready to join. coming: rows that are to join, these among them. Target
        and draft go on from what each of them holds, which differs when the draft is newer than a kept beginning."""
        size, prefix, drafter = self.prefill_chunk, self.prefix, self.drafter
        more = lead(self.target, prefill, size=size, prefix=prefix)
        prefill.follows = self._follows(prefill, coming)
        if drafter is not None and not self.failed and prefill.follows:
            prefill.draft_cache(drafter.draft.model, self.epoch)
            try:
                more |= follow(drafter, prefill, size=size, prefix=prefix)
            except Exception as error:  # noqa: BLE001  (whatever is wrong with a draft costs speed alone)
                self._put_draft_aside(error)
        return not more

    def join(self, ready: Sequence[Prefill]) -> None:
        """Take rows whose prompts were read into the batch, all at once."""
        self.cache.join([prefill.target for prefill in ready])
        if self.drafter is not None:
            self.drafter.cache.join([prefill.draft_cache(self.drafter.draft.model, self.epoch) for prefill in ready])
        for prefill in ready:
            for row in prefill.rows:
                row.joined_at = time.perf_counter()
                row.acceptance = Acceptance(self.drafted)
            self.rows += prefill.rows
            self._epochs += [prefill.epoch] * len(prefill.rows)

    def admit(self, row: Row) -> None:
        """Read a row's prompt to its end, then take it into the batch."""
        prefill = self.begin(row)
        while not self.read(prefill):
            pass
        self.join([prefill])

    def leave(self, gone: Sequence[Row]) -> None:
        """Take rows out of the batch, finished or not. What is verified of them is kept for those who go on from there."""
        indices = {i for i, row in enumerate(self.rows) if any(row is other for other in gone)}
        for i in indices:
            self._keep_beginning(i)
        keep = closed(len(self.rows), indices)
        self.cache.keep(keep)
        if self.drafter is not None:
            self.drafter.cache.keep(keep)
        self.rows = [self.rows[i] for i in keep]
        self._epochs = [self._epochs[i] for i in keep]
        for row in gone:
            if self.lookup is not None and row.prompt.store:
                self.lookup.remember(row.output)

    def _keep_beginning(self, index: int) -> None:
        row = self.rows[index]
        if self.prefix is None or not row.prompt.store:
            return
        self.prefix.enter(Owner.TARGET, row.tokens, self.cache, index)
        if self.drafter is not None and self._epochs[index] == self.epoch:
            self.prefix.enter(Owner.DRAFT, row.tokens, self.drafter.cache, index)

    def _next_epoch(self) -> None:
        self.epoch += 1
        if self.prefix is not None:
            self.prefix.forget(Owner.DRAFT)

    # ------------------------------------------------------------------------------------------------------- one round

    def round(self, coming: int = 0) -> RoundReport:
        """Propose, verify and emit, once for all rows. Rows that finished have left when it returns. coming: rows about to
        join. Raises what the target raises; whatever the draft raises is logged, and costs speed alone."""
        started = time.perf_counter()
        rows = list(self.rows)
        batch = SamplingBatch.of([row.prompt.sampling for row in rows], self.vocabulary)
        self.key, draft_key, verify_key = mx.random.split(self.key, 3)
        visible = self._visible(rows)
        unread = self.drafter.unread(visible) if self.drafter is not None else 0
        load = Load(len(rows), self.cache.lengths.longest, unread, prompted(rows))
        choice, found, matches = self._choose(rows, load, coming)
        noise = SharedNoise(batch, [row.emitted for row in rows], self.vocabulary)
        behind = choice.drafted > 0 and self.drafter is not None and self.drafter.behind(visible)
        steps = Steps(choice.drafted)
        if self.length is not None and choice.drafted:
            greedy = [row.prompt.sampling.greedy for row in rows]
            steps = self.length.steps(load, choice, greedy, [_drafts(row) for row in rows])
        if not steps.stops:
            noise.first(steps.most + 1)
        failures = self.draft_failures
        drafted = self._propose(rows, visible, steps, batch, noise, draft_key)
        if drafted is not None:
            choice = choice.having(drafted.tokens.shape[1])
        if self.draft_failures > failures:
            batch, noise, verify_key = self._anew(rows)
        try:
            done = self._verify(rows, choice, found, drafted, batch, noise, verify_key)
        except Exception as error:
            # MLX raises where arrays are evaluated, and the proposal is evaluated with the verification.
            if drafted is None:
                raise
            drafted = None
            self._put_draft_aside(error)
            batch, noise, verify_key = self._anew(rows)
            self._prefill_again(rows)
            done = self._verify(rows, choice, found, drafted, batch, noise, verify_key)
        before = [len(row.tokens) for row in rows]
        sources = [Source.LOOKUP if n else Source.DRAFT for n in choice.looked_up]
        deltas = [
            row.take(new, guessed, source, self.adapter, seen, self.tie_margin)
            for row, new, guessed, source, seen in zip(
                rows, done.emitted, done.proposed, sources, self._evidence(rows, batch, sources, done), strict=True
            )
        ]
        self.cache.settle([len(row.tokens) - 1 for row in rows])
        if self.drafter is not None:
            self._settle_draft(rows, sources, before, [len(tokens) for tokens in visible], done.finite)
        if ended := [row for row in rows if row.finish is not None]:
            self.leave(ended)
        seconds = time.perf_counter() - started
        rounds = tuple(row.rounds[-1] for row in rows)
        if self.length is not None and (drafted is not None or not choice.drafted):
            # Positions behind the end of a text count neither as proposed nor as accepted.
            proposed, accepted = [each.drafted for each in rounds], [each.accepted for each in rounds]
            own = [row.acceptance for row in rows]
            self.length.observe(load, choice, matches, accepted, None if behind else seconds, own, proposed)
            steps.observe(accepted, proposed)
        return RoundReport(tuple(rows), tuple(deltas), rounds, seconds)

    def _anew(self, rows: Sequence[Row]) -> tuple[SamplingBatch, SharedNoise, mx.array]:
        """What a round samples with, made again: MLX may take arrays of an evaluation that failed for computed."""
        batch = SamplingBatch.of([row.prompt.sampling for row in rows], self.vocabulary)
        self.key = mx.random.key(secrets.randbits(63))
        return (
            batch,
            SharedNoise(batch, [row.emitted for row in rows], self.vocabulary),
            mx.random.key(secrets.randbits(63)),
        )

    def _prefill_again(self, rows: Sequence[Row]) -> None:
        """Compute the target's keys and values of all rows anew, after an evaluation that failed with them in it. Dear, and as
        rare as a draft that fails so."""
        made: list[RowCache] = []
        for row in rows:
            cache, text = self.target.cache(1), row.tokens[:-1]
            for start in range(0, len(text), self.prefill_chunk):
                self.target(mx.array([text[start : start + self.prefill_chunk]]), cache)
                mx.eval(cache.arrays())
                cache.settle([min(start + self.prefill_chunk, len(text))])
            made.append(cache)
        self.cache.keep([])
        self.cache.join(made)

    def _visible(self, rows: Sequence[Row]) -> list[list[int]]:
        """Each row's tokens as the draft sees them. A draft call runs over the whole batch: of a row that goes without the
        draft it reads one token more than it has read, and nothing is proposed there."""
        if self.drafter is None:
            return [row.tokens for row in rows]
        held = self.drafter.cache.lengths.host
        return [row.tokens if _drafts(row) else row.tokens[: n + 1] for row, n in zip(rows, held, strict=True)]

    def _verify(
        self,
        rows: Sequence[Row],
        choice: Choice,
        found: Sequence[Found | None],
        drafted: Proposal | None,
        batch: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
    ) -> _Verified:
        """One target call over each row's newest token and its proposal: what was looked up where `choice` says so, else what
        was drafted. Waits for both. The target's cache then holds the whole proposal."""
        looked_up = [f.tokens[:n] if f else [] for f, n in zip(found, choice.looked_up, strict=True)]
        most = max((len(tokens) for tokens in looked_up), default=0) if drafted is None else choice.most
        usable = mx.ones((len(rows), 1), dtype=mx.bool_)
        if drafted is not None:
            usable = drafted.usable
            if not all(map(_drafts, rows)):
                drafted = replace(drafted, usable=usable & mx.array([_drafts(row) for row in rows])[:, None])
        proposal = instead(drafted, looked_up, most, self.vocabulary, batch.unseeded)
        latest = mx.array(np.array([[row.tokens[-1]] for row in rows], dtype=np.int32))
        proposed = proposal.tokens if proposal is not None else mx.zeros((len(rows), 0), dtype=mx.int32)
        tried = proposal.usable if proposal is not None else mx.zeros((len(rows), 0), dtype=mx.bool_)
        logits = self.target(mx.concatenate([latest, proposed], axis=1), self.cache)[..., : self.vocabulary]
        law = transform(logits, batch)
        accepted, following = verify.accept(law, batch, noise.first(proposed.shape[1] + 1), proposal, key)
        emitted = verify.emitted(accepted, following, proposed)
        mx.eval(accepted, emitted, proposed, tried, usable, self.cache.arrays(), self.key)

        kept: list[int] = np.array(accepted).tolist()
        finite: NDArray[np.bool_] = np.all(np.array(usable), axis=1)
        counts: NDArray[np.int64] = np.cumprod(np.array(tried), axis=1, dtype=np.int64).sum(axis=1)
        return _Verified(
            accepted=kept,
            emitted=[new[: n + 1].tolist() for new, n in zip(np.array(emitted), kept, strict=True)],
            proposed=[guess[:n].tolist() for guess, n in zip(np.array(proposed), counts.tolist(), strict=True)],
            finite=[bool(each) for each in finite],
            logits=logits,
            law=law,
            proposal=proposal,
        )

    def _evidence(
        self, rows: Sequence[Row], batch: SamplingBatch, sources: Sequence[Source], done: _Verified
    ) -> list[Evidence | None]:
        """What is logged of the round, None for rows that may not be stored."""
        if not self.collect or not any(row.prompt.store for row in rows):
            return [None] * len(rows)
        tried = [
            [] if source is Source.LOOKUP else tokens for tokens, source in zip(done.proposed, sources, strict=True)
        ]
        seen = gather(done.logits, done.law, batch, done.emitted, tried, done.proposal)
        return [each if row.prompt.store else None for row, each in zip(rows, seen, strict=True)]

    def _settle_draft(
        self,
        rows: Sequence[Row],
        sources: Sequence[Source],
        before: Sequence[int],
        visible: Sequence[int],
        finite: Sequence[bool],
    ) -> None:
        """Truncate the draft's cache to tokens that the rows really have. before: each row's tokens before the round. visible:
        how many of them the draft saw.

        The draft wrote its own proposal behind those. Its accepted part stays, but where tokens that were looked up took its
        place none of it does: they are other tokens.
        """
        assert self.drafter is not None
        cache, limits = self.drafter.cache, list[int]()
        for row, source, old, seen, fine in zip(rows, sources, before, visible, finite, strict=True):
            if not _drafted(row):
                limits.append(seen - 1)
            else:
                limits.append(len(row.tokens) - 1 if fine and source is Source.DRAFT else min(old, len(row.tokens) - 1))
        cache.settle([min(n, limit) for n, limit in zip(cache.lengths.host, limits, strict=True)])
        for index, row in enumerate(rows):
            if not finite[index] and _drafted(row):
                self._set_row_aside(index, row)
            elif not finite[index]:
                cache.clear_behind(index)

    def _set_row_aside(self, index: int, row: Row) -> None:
        """Let a row go on without the draft, whose logits for it were not finite, and try again later."""
        assert self.drafter is not None
        sound = self.drafter.cache.scrub(index)
        if not sound and self.prefix is not None:
            # Cached prefixes may hold the same values.
            self.prefix.forget(Owner.DRAFT)
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
        if prefill.follows is not None or self.drafter is None or self.length is None:
            return self.drafter is not None and prefill.follows is not False
        held = max(self.cache.lengths.longest, *(len(row.prompt.tokens) for row in prefill.rows))
        return self.length.follows(Load(len(self.rows) + coming, held, prompted=prompted(prefill.rows)))

    def _choose(
        self, rows: Sequence[Row], load: Load, coming: int
    ) -> tuple[Choice, list[Found | None], list[Match | None]]:
        """What to propose this round, and what was looked up for each row. Where others wait to join, nothing is drafted that
        would not pay among them."""
        found: list[Found | None] = [None] * len(rows)
        if self.adaptive and self.length is None:
            self.profile(len(rows))
        if self.length is None:
            return Choice(self.drafted, (0,) * len(rows)), found, [None] * len(rows)
        if self.lookup is not None:
            found = [self.lookup.find(row.tokens, row.grams) for row in rows]
        matches = [None if f is None else Match(f.length, len(f.tokens)) for f in found]
        drafts = not self.failed and (not coming or self.length.pays(replace(load, rows=load.rows + coming)))
        return self.length.choose(load, matches, [row.acceptance for row in rows], drafts=drafts), found, matches

    def _propose(
        self,
        rows: Sequence[Row],
        visible: Sequence[Sequence[int]],
        steps: Steps,
        batch: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
    ) -> Proposal | None:
        """What the draft proposes, already under way on the device; None where it proposes nothing. visible: see `_visible`."""
        if self.drafter is None or self.failed or steps.most == 0 or any(len(row.tokens) < 2 for row in rows):
            return None
        if not any(map(_drafts, rows)):
            return None
        try:
            proposal = self.drafter.propose(visible, steps, batch, noise, key)
            if proposal is not None:
                # What MLX refuses to run is then raised here, before the target's cache depends on it.
                mx.async_eval(proposal.tokens, proposal.usable, [] if proposal.logq is None else proposal.logq)
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


def _drafts(row: Row) -> bool:
    """Whether the draft proposes tokens for a row."""
    return len(row.rounds) >= row.draft_again


def _drafted(row: Row) -> bool:
    """The same of the round that the row has just had."""
    return len(row.rounds) > row.draft_again
