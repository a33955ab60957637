"""One round over a batch: draft K tokens for every row, verify all rows in one target call, take what is kept.

Single-threaded and without text, queues or clocks beyond the rows' own: the worker feeds it, offline tools drive it
directly, and the tests hold it against a target decoding alone.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import BARE_DRAFT, Source
from service.engine import profile, verify
from service.engine.acceptance import Acceptance
from service.engine.cache import RowCache
from service.engine.confidence import Steps
from service.engine.costs import Load
from service.engine.draft import Draft
from service.engine.drafting import Proposal, instead
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


class Decoder:
    """The batch. `k`: tokens drafted per round (0: the target alone), or, with `adaptive`, at most so many: what pays for the
    batch at hand, where up to `lookup` tokens may also be looked up in what was said before. `collect`: gather evidence for
    rows that may be stored. `prefix`: where beginnings of prompts are kept.

    A draft that raises or turns non-finite is put aside: decoding goes on with the target alone until another draft is
    switched in. Errors of the target are the caller's.
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
        """When the draft began to read each row."""

    @property
    def adapter(self) -> int:
        return self.drafter.draft.adapter if self.drafter is not None else BARE_DRAFT

    def switch(self, draft: Draft) -> None:
        """Draft with another version from the next round on."""
        if self.drafter is None:
            raise ValueError("this decoder was built without a draft")
        self.drafter.switch(draft)
        self.failed = False
        self._next_epoch()
        if self.length is not None:
            self.length.restart()
        if self._profile is not None and self.drafted:
            self._profile.draft = draft.model
        for row in self.rows:
            row.acceptance = Acceptance(self.drafted)

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
            except Exception:
                self._put_draft_aside()
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
        """One round for all rows; those that finished are out of the batch when it returns. coming: rows about to join."""
        begun = time.perf_counter()
        rows = list(self.rows)
        batch = SamplingBatch.of([row.prompt.sampling for row in rows], self.vocabulary)
        collect = self.collect and any(row.prompt.store for row in rows)
        self.key, draft_key, verify_key = mx.random.split(self.key, 3)
        tokens = [row.tokens for row in rows]
        unread = self.drafter.unread(tokens) if self.drafter is not None else 0
        load = Load(len(rows), self.cache.lengths.longest, unread, prompted(rows))
        choice, found, matches = self._choose(rows, load, coming)
        noise = SharedNoise(batch, [row.emitted for row in rows], self.vocabulary)
        behind = choice.drafted > 0 and self.drafter is not None and self.drafter.behind(tokens)
        steps = Steps(choice.drafted)
        if self.length is not None and choice.drafted:
            steps = self.length.steps(load, choice, [row.prompt.sampling.greedy for row in rows])
        if not steps.stops:
            noise.first(steps.most + 1)
        drafted = self._propose(rows, steps, batch, noise, draft_key)
        if drafted is not None:
            choice = choice.having(drafted.tokens.shape[1])
        k = choice.most
        told = [f.tokens[:n] if f else [] for f, n in zip(found, choice.looked_up, strict=True)]
        proposal = instead(drafted, told, k, self.vocabulary, batch.unseeded)
        counts = [len(tokens) or (0 if drafted is None else choice.drafted) for tokens in told]
        k = 0 if proposal is None else k
        adapter = self.adapter

        latest = mx.array(np.array([[row.tokens[-1]] for row in rows], dtype=np.int32))
        proposed = proposal.tokens if proposal is not None else mx.zeros((len(rows), 0), dtype=mx.int32)
        logits = self.target(mx.concatenate([latest, proposed], axis=1), self.cache)[..., : self.vocabulary]
        law = transform(logits, batch)
        accepted, following = verify.accept(law, batch, noise.first(k + 1), proposal, verify_key)
        emitted = verify.emitted(accepted, following, proposed)
        usable = drafted.usable if drafted is not None else mx.ones((len(rows), 1), dtype=mx.bool_)
        mx.eval(accepted, emitted, proposed, usable, self.cache.arrays(), self.key)

        kept: list[int] = np.array(accepted).tolist()
        news = [new[: n + 1].tolist() for new, n in zip(np.array(emitted), kept, strict=True)]
        guesses = [guess[:n].tolist() for guess, n in zip(np.array(proposed), counts, strict=True)]
        sources = [Source.LOOKUP if n else Source.DRAFT for n in choice.looked_up]
        shown: list[Evidence | None] = [None] * len(rows)
        if collect:
            tried = [[] if source is Source.LOOKUP else tokens for tokens, source in zip(guesses, sources, strict=True)]
            seen = gather(logits, law, batch, news, tried, proposal)
            shown = [each if row.prompt.store else None for row, each in zip(rows, seen, strict=True)]
        deltas = [
            row.take(new, guessed, source, adapter, seen, self.tie_margin)
            for row, new, guessed, source, seen in zip(rows, news, guesses, sources, shown, strict=True)
        ]
        if not np.array(usable).all():
            self._put_draft_aside()
        self.cache.settle([len(row.tokens) - 1 for row in rows])
        if self.drafter is not None:
            read = self.drafter.cache.lengths.host
            self.drafter.cache.settle([min(n, len(row.tokens) - 1) for n, row in zip(read, rows, strict=True)])
        if ended := [row for row in rows if row.finish is not None]:
            self.leave(ended)
        seconds = time.perf_counter() - begun
        if self.length is not None and (drafted is not None or not choice.drafted):
            self.length.observe(
                load, choice, matches, kept, None if behind else seconds, [row.acceptance for row in rows]
            )
            steps.observe(kept)
        return RoundReport(tuple(rows), tuple(deltas), tuple(row.rounds[-1] for row in rows), seconds)

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
        self, rows: Sequence[Row], steps: Steps, batch: SamplingBatch, noise: SharedNoise, key: mx.array
    ) -> Proposal | None:
        if self.drafter is None or self.failed or steps.most == 0 or any(len(row.tokens) < 2 for row in rows):
            return None
        try:
            return self.drafter.propose([row.tokens for row in rows], steps, batch, noise, key)
        except Exception:
            # Whatever went wrong in the draft costs speed only.
            self._put_draft_aside()
            return None

    def _put_draft_aside(self) -> None:
        """Keys and values may be as broken as the guesses were: the next draft reads the rows anew."""
        self.failed = True
        self.draft_failures += 1
        self._next_epoch()
        if self.drafter is not None:
            self.drafter.cache = RowCache(self.drafter.draft.model, len(self.rows))
