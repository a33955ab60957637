"""The device side of a round: draft steps, verification, acceptance and evidence, launched without waiting."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from service.engine import accept, device
from service.engine.batch import Batch, drafts
from service.engine.drafters.proposal import Proposal, Unread, prefer_lookups
from service.engine.evidence import RoundEvidence
from service.engine.history import History
from service.engine.kv.cache import RowCache
from service.engine.masks import RoundMasks, allow
from service.engine.replay import Replay
from service.engine.request import PADDING_LENGTH, Request
from service.engine.rounds import Called, Outcome, Plan, RoundArrays, Step
from service.engine.sampling import SamplingBatch, SharedNoise, biased, transform
from service.engine.strategy import current


class Runner:
    """Runs planned rounds over a batch. vocabulary: width of the target's logits. collect: gather evidence for rows that may be
    stored. key: random key for rows that sample without a seed.

    If the draft raises an error, while it proposes or while the round is computed, the draft is disabled and the round runs
    without it. Errors of the target are raised.
    """

    def __init__(self, batch: Batch, *, vocabulary: int, collect: bool, prefill_chunk: int, key: mx.array) -> None:
        self.key = key
        self._batch = batch
        self.vocabulary = vocabulary
        self._collect = collect
        self._prefill_chunk = prefill_chunk
        self._strategy = current()
        self._sampling: SamplingBatch | None = None
        self._ends: tuple[list[bool], mx.array] | None = None
        self._replay = Replay(batch.target.model, self._verified)
        self.on_progress: Callable[[], None] = lambda: None
        """Called between the calls of work that takes longer than a round."""

    def launch(self, plan: Plan) -> Step:
        """Launch a round. On a CPU this only builds its graph, except for rows with a grammar. Raises what the target
        raises."""
        sampling = self._sampling_of(plan.rows)
        draft_key, verify_key = self._keys(sampling, 2)
        noise = SharedNoise(sampling, [row.emitted for row in plan.rows], self.vocabulary)
        if not plan.steps.stops:
            noise.first(plan.steps.most + 1)
        failures = self._batch.draft_failures
        proposal = self._propose(plan, sampling, noise, draft_key)
        if proposal is not None:
            plan = plan.having(proposal.tokens.shape[1])
        if self._batch.draft_failures > failures:
            sampling, noise, verify_key = self._fresh_arrays(plan.rows)
        try:
            return self._verify(plan, proposal, sampling, noise, verify_key)
        except Exception as error:
            if proposal is None:
                raise
            return self._without_draft(plan, error)

    def launch_after(self, step: Step, plan: Plan) -> Step | Called:
        """Launch a round before the previous one was read, continuing from the tokens that the device has just chosen.

        Not allowed after a drafted round if rows have a seed, because their noise depends on the number of their tokens, or if
        draft steps are masked. Not allowed at all if logits depend on earlier tokens (`History`). For batches with a grammar,
        only the target's call is launched, and `decide` completes the round. If this raises with a proposal in it, `restore`
        continues without the draft once `step` was read.
        """
        sampling, cache = self._sampling_of(plan.rows), self._batch.cache
        draft_key, verify_key = self._keys(sampling, 2)
        launched = self._call if self._batch.constrained else self._verify
        if not step.drafted:
            # Every row gets exactly one token.
            noise = SharedNoise(sampling, [row.emitted + 1 for row in plan.rows], self.vocabulary)
            cache.commit(1)
            return launched(plan, None, sampling, noise, verify_key, step)
        after = step.unread()
        cache.follow(after.ends, after.most)
        noise, failures = SharedNoise(sampling, [0] * len(plan.rows), self.vocabulary), self._batch.draft_failures
        proposal = self._propose(plan, sampling, noise, draft_key, after)
        if self._batch.draft_failures > failures:
            sampling, noise, verify_key = self._fresh_arrays(plan.rows)
        return launched(plan, proposal, sampling, noise, verify_key, step)

    def read(self, step: Step) -> tuple[Step, Outcome]:
        """Wait for a round. Relaunches it without the draft if the draft raised an error, and without any proposal if the
        target's logits for a row are not finite. Returns the step that was read."""
        try:
            outcome = step.read()
        except Exception as error:
            # MLX raises errors on evaluation, and the proposal is evaluated together with the verification.
            if not step.drafted:
                raise
            step = self._without_draft(step.plan, error)
            outcome = step.read()
        if step.arrays.proposed is not None and outcome.failing(step.plan.rows):
            # A proposed token can corrupt earlier positions: attention gives it zero weight, but zero times NaN is NaN.
            step = self._without_proposals(step.plan, outcome)
            outcome = step.read()
        return step, outcome

    def _without_proposals(self, plan: Plan, outcome: Outcome) -> Step:
        """The same round without proposals. outcome: of the round with proposals, whose tokens are dropped."""
        rows = plan.rows
        self._batch.truncate_target(outcome)
        sampling = self._sampling_of(rows)
        (key,) = self._keys(sampling, 1)
        noise = SharedNoise(sampling, [row.emitted for row in rows], self.vocabulary)
        return self._verify(plan.without_proposals(), None, sampling, noise, key)

    def _without_draft(self, plan: Plan, error: Exception) -> Step:
        """The same round without the draft, whose evaluation raised `error`."""
        return self._verify(plan, None, *self.restore(plan.rows, error))

    def restore(self, rows: Sequence[Request], error: Exception) -> tuple[SamplingBatch, SharedNoise, mx.array]:
        """Disable the draft, whose evaluation raised `error`, and recompute what may depend on it. Returns what the next round
        samples with."""
        self._batch.disable_draft(error)
        fresh = self._fresh_arrays(rows)
        self._prefill_again(rows)
        return fresh

    def release_rows(self) -> None:
        """Drop references to the rows of the last round. Call only when none of them continues."""
        self._sampling = None
        if self._batch.drafter is not None:
            self._batch.drafter.release_rows()

    def _sampling_of(self, rows: Sequence[Request]) -> SamplingBatch:
        """The rows' sampling settings as arrays, rebuilt when rows change."""
        settings = tuple(row.prompt.sampling for row in rows)
        if self._sampling is None or self._sampling.rows != settings:
            self._sampling = SamplingBatch.of(settings, self.vocabulary)
        return self._sampling

    def _most_ends(self, rows: Sequence[Request]) -> mx.array | None:
        """The maximum end of each row, (B,), int32, so that tokens accepted on the device do not lengthen a padding row. None
        if there are no padding rows."""
        if not self._strategy.batch_sizes:
            return None
        padding = [row.padding for row in rows]
        if self._ends is None or self._ends[0] != padding:
            most = [PADDING_LENGTH if row.padding else np.iinfo(np.int32).max for row in rows]
            self._ends = padding, mx.array(np.array(most, dtype=np.int32))
        return self._ends[1]

    def _keys(self, sampling: SamplingBatch, count: int) -> list[mx.array]:
        """Fresh keys if rows sample without a seed."""
        if not sampling.unseeded:
            return [self.key] * count
        self.key, *keys = mx.random.split(self.key, count + 1)
        return keys

    def _fresh_arrays(self, rows: Sequence[Request]) -> tuple[SamplingBatch, SharedNoise, mx.array]:
        """Rebuilds the arrays that a round samples with: MLX may treat arrays of a failed evaluation as computed."""
        self._sampling = None
        sampling = self._sampling_of(rows)
        self.key = mx.random.key(secrets.randbits(63))
        noise = SharedNoise(sampling, [row.emitted for row in rows], self.vocabulary)
        return sampling, noise, mx.random.key(secrets.randbits(63))

    def _prefill_again(self, rows: Sequence[Request]) -> None:
        """Recompute the target's keys and values of all rows after a failed evaluation that included them."""
        batch, caches = self._batch, list[RowCache]()
        # Release the old cache first, because memory may not hold both.
        batch.cache.compact([], batch.cache.copy_moved([]))
        for row in rows:
            cache, text = batch.target.cache(1), row.tokens[:-1]
            for start in range(0, len(text), self._prefill_chunk):
                tokens = mx.array([text[start : start + self._prefill_chunk]])
                batch.target(tokens, cache)
                batch.target.activations.evaluate(cache.arrays(), tokens.size)
                self.on_progress()
                cache.truncate([min(start + self._prefill_chunk, len(text))])
            caches.append(cache)
        batch.cache.join(caches, [1] * len(rows), range(len(rows)), len(rows))
        batch.cache.storage.pad([i for i, row in enumerate(rows) if row.padding])

    def _propose(
        self, plan: Plan, sampling: SamplingBatch, noise: SharedNoise, key: mx.array, after: Unread | None = None
    ) -> Proposal | None:
        """The draft's proposal, launched. None if it proposes nothing."""
        rows, drafter = plan.rows, self._batch.drafter
        if drafter is None or self._batch.failed or plan.steps.most == 0 or any(len(row.tokens) < 2 for row in rows):
            return None
        if not any(map(drafts, rows)):
            return None
        try:
            masks = None if self._batch.few_constrained else RoundMasks.of(rows, self.vocabulary)
            proposal = drafter.propose(plan.visible, plan.steps, sampling, noise, key, after, masks)
            if proposal is not None:
                # Errors at launch are then raised here, before the target's cache depends on the proposal.
                logq = [] if proposal.logq is None else proposal.logq
                device.launch(proposal.tokens, proposal.usable, logq, *self._unlaunched(drafter.cache))
            return proposal
        except Exception as error:  # noqa: BLE001  (a broken draft must only cost speed)
            self._batch.disable_draft(error)
            return None

    def _verify(
        self,
        plan: Plan,
        drafted: Proposal | None,
        sampling: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        before: Step | None = None,
    ) -> Step:
        """One target call over each row's newest token and its proposal: the lookup where the plan says so, otherwise the
        drafted tokens. Afterwards the target's cache holds the whole proposal. before: the unread round that this one follows;
        only the device knows its newest tokens."""
        if self._batch.constrained:
            return self.decide(self._call(plan, drafted, sampling, noise, key, before))
        proposal, arguments = self._arguments(plan, drafted, sampling, noise, key, before)
        arrays = RoundArrays(**self._replay(arguments, self._batch.cache, _tokens(arguments).shape[1]))
        if arrays.features is not None:
            self._batch.cache.append_features(arrays.features)
        return self._step(plan, sampling, arrays, proposal, drafted is not None, before)

    def _call(
        self,
        plan: Plan,
        drafted: Proposal | None,
        sampling: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        before: Step | None,
    ) -> Called:
        """Launch the target's call of a round (see `_verify`). The rows' grammars may still be behind."""
        own, cache = None, self._batch.cache
        if drafted is not None:
            # A copy that is launched before the target's call and that no call reads: waiting for it does not wait for the
            # target, and on CUDA reading moves an array (mlx/backend/cuda/allocator.cpp, `move_to_unified_memory`).
            own = drafted.tokens + 0
            device.launch(own)
        proposal, arguments = self._arguments(plan, drafted, sampling, noise, key, before)
        starts = _starts(cache)
        logits = self._batch.target.verify(_tokens(arguments), cache)
        device.launch(logits)
        return Called(plan, sampling, arguments, logits, starts, own, proposal, before)

    def decide(self, called: Called) -> Step:
        """Complete the round of a target call and launch it. While the target runs, this waits for the drafted tokens and
        builds the masks of the rows' grammars. The previous round must have been read."""
        plan = called.plan
        masks, proposed = RoundMasks.of(plan.rows, self.vocabulary), _looked_up(plan)
        if called.drafted is not None:
            (tokens,) = device.read(called.drafted)
            proposed = [[*found, *row[len(found) :]] for found, row in zip(proposed, tokens.tolist(), strict=True)]
        bits = None if masks is None else masks.bits(proposed)
        arrays = self._decided(called.arguments, called.logits, None, called.starts, bits)
        return self._step(plan, called.sampling, arrays, called.proposal, called.drafted is not None, called.before)

    def _arguments(
        self,
        plan: Plan,
        drafted: Proposal | None,
        sampling: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        before: Step | None,
    ) -> tuple[Proposal | None, Sequence[Any]]:
        """The proposal (see `_verify`), and the arguments of `_verified` and `_decided`: each row's newest token (B, 1); the
        proposal and the draft's proposal as trees; whether the draft's logits were finite (B, K); noise (B, K+1, V); key; the
        sampling's leaves; how earlier tokens change the logits, as a tree; whether evidence is wanted; and the maximum end of
        each row (B,)."""
        rows, lookups = plan.rows, _looked_up(plan)
        history = History.of(rows, self.vocabulary)
        assert history is None or before is None, "these logits depend on tokens that are not known yet"
        most = max(map(len, lookups), default=0) if drafted is None else plan.choice.proposed
        finite = None
        if drafted is not None:
            finite = drafted.usable if drafted.finite is None else drafted.finite
            count = drafted.tokens.shape[1]
            limits = [_most(row, count) for row in rows]
            if min(limits) < count:
                drafted = replace(drafted, usable=drafted.usable & (mx.arange(count) < mx.array(limits)[:, None]))
        proposal = prefer_lookups(drafted, lookups, most, self.vocabulary, sampling.unseeded)
        if before is None or before.arrays.newest is None:
            latest = mx.array(np.array([[row.tokens[-1]] for row in rows], dtype=np.int32))
        else:
            latest = before.arrays.newest[:, -1:]
        count = 1 + (0 if proposal is None else proposal.tokens.shape[1])
        return proposal, (
            latest,
            None if proposal is None else proposal.tree(),
            None if drafted is None else drafted.tree(),
            finite,
            noise.first(count),
            key,
            sampling.leaves(),
            None if history is None else history.tree(),
            any(row.needs_evidence(self._collect) for row in rows),
            self._most_ends(rows),
        )

    def _step(
        self,
        plan: Plan,
        sampling: SamplingBatch,
        arrays: RoundArrays,
        proposal: Proposal | None,
        drafted: bool,
        before: Step | None,
    ) -> Step:
        """The round with these arrays, launched. drafted, before: as in Step."""
        others = [*self._batch.cache.arrays(), self.key]
        step = Step(plan, sampling, drafted, arrays, proposal, others, before is not None)
        step.second = before is not None and (before.drafted or not before.follows)
        if self._strategy.launch_ahead:
            step.launch()
        return step

    @staticmethod
    def _unlaunched(cache: RowCache) -> list[mx.array]:
        """In-place writes that no other evaluation would run."""
        return [] if cache.pages is None or not cache.pages.pool.in_place else cache.arrays()

    def _verified(self, arguments: Sequence[Any], cache: RowCache) -> dict[str, Any]:
        """A round's arrays, as a tree. arguments: see `_arguments`."""
        starts = _starts(cache)
        logits, features = self._batch.target.logits_and_features(_tokens(arguments), cache)
        return self._decided(arguments, logits, features, starts).tree()

    def _decided(
        self,
        arguments: Sequence[Any],
        logits: mx.array,
        features: mx.array | None,
        starts: mx.array | None,
        bits: mx.array | None = None,
    ) -> RoundArrays:
        """What a round emits, given the target's logits (B, K+1, V). starts: (B,), the position of each row's first token; None
        for recurrent models. bits: the tokens allowed at each position; None: all."""
        latest, proposed, draft, finite, noise, key, leaves, history, collect, most = arguments
        proposal, drafted = (None if tree is None else Proposal(**tree) for tree in (proposed, draft))
        sampling = SamplingBatch.of_leaves(leaves)
        logits = logits[..., : self.vocabulary]
        target_finite = accept.finite_positions(logits)
        logits = biased(allow(logits, bits), sampling)
        # Evidence uses the logits before history is applied: the target's unmodified distribution, which a draft learns.
        drawn_from = logits
        if history is not None:
            tokens = None if proposal is None else proposal.tokens
            drawn_from = History.of_tree(history).apply(logits, tokens, masked=bits is not None)
        distribution = transform(drawn_from, sampling)
        accepted, following = accept.accept(distribution, sampling, noise, proposal, key)
        arrays = RoundArrays(following[:, None], target_finite, features=features, draft_finite=finite)
        if proposal is not None:
            emitted = accept.emitted_tokens(accepted, following, proposal.tokens)
            arrays = replace(
                arrays, emitted=emitted, accepted=accepted, proposed=proposal.tokens, usable=proposal.usable
            )
        if not self._strategy.launch_ahead:
            return replace(arrays, logits=logits, distribution=distribution)
        if collect:
            evidence = RoundEvidence.of(logits, distribution, sampling, arrays.emitted, drafted)
            arrays = replace(arrays, evidence=evidence.arrays())
        arrays = replace(arrays, packed=device.pack(arrays.read))
        if starts is None:
            return arrays
        known = mx.concatenate([latest, arrays.emitted.astype(latest.dtype)], axis=1)
        newest = mx.take_along_axis(known, accepted.astype(mx.int32)[:, None] + mx.arange(2), axis=1)
        ends = starts + accepted.astype(mx.int32) + 1
        return replace(arrays, newest=newest, ends=ends if most is None else mx.minimum(ends, most))


def _looked_up(plan: Plan) -> list[list[int]]:
    """By row, the lookup tokens that the plan proposes."""
    return [list(found.tokens[:n]) if found else [] for found, n in zip(plan.found, plan.choice.looked_up, strict=True)]


def _starts(cache: RowCache) -> mx.array | None:
    """The position of each row's next token, (B,); None if layers are recurrent."""
    return None if cache.states else cache.lengths.starts(cache.ahead)


def _tokens(arguments: Sequence[Any]) -> mx.array:
    """The tokens of a round's target call, (B, K+1): each row's newest token and its proposal. arguments: see `_arguments`."""
    latest, proposed = arguments[:2]
    if proposed is None:
        return latest
    tokens = proposed["tokens"]
    return mx.concatenate([latest.astype(tokens.dtype), tokens], axis=1)


def _most(row: Request, drafted: int) -> int:
    """How many of `drafted` tokens are proposed for a row."""
    limit = row.prompt.num_draft_tokens
    return 0 if not drafts(row) else drafted if limit is None else min(limit, drafted)
