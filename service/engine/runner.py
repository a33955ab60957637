"""The device side of a round: draft steps, the target call that verifies, acceptance and evidence, launched without a wait."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from service.engine import accept, device
from service.engine.batch import Batch, drafts
from service.engine.drafters.proposal import Proposal, prefer_lookups
from service.engine.evidence import RoundEvidence
from service.engine.kv.cache import RowCache
from service.engine.request import Request
from service.engine.rounds import Outcome, Plan, Step
from service.engine.sampling import SamplingBatch, SharedNoise, transform
from service.engine.strategy import current


class Runner:
    """Runs planned rounds over a batch. vocabulary: width of the target's logits. collect: gather evidence for rows that may be
    stored. key: of rows that sample without a seed.

    An error of the draft, raised while it proposes or while the round is computed, disables the draft, and the round runs
    without it. Errors of the target are raised.
    """

    def __init__(self, batch: Batch, *, vocabulary: int, collect: bool, prefill_chunk: int, key: mx.array) -> None:
        self.key = key
        self._batch = batch
        self._vocabulary = vocabulary
        self._collect = collect
        self._prefill_chunk = prefill_chunk
        self._strategy = current()
        self._sampling: SamplingBatch | None = None

    def launch(self, plan: Plan) -> Step:
        """Launch a round; on a CPU only its graph is made. Raises what the target raises."""
        sampling = self._sampling_of(plan.rows)
        draft_key, verify_key = self._keys(sampling, 2)
        noise = SharedNoise(sampling, [row.emitted for row in plan.rows], self._vocabulary)
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

    def launch_after(self, step: Step, plan: Plan) -> Step:
        """Launch a plain round behind a plain one that was not read yet: the target reads the tokens that the device has just
        chosen."""
        (key,) = self._keys(step.sampling, 1)
        noise = SharedNoise(step.sampling, [row.emitted + 1 for row in plan.rows], self._vocabulary)
        ahead = self._verify(plan, None, step.sampling, noise, key, latest=step.emitted[:, :1])
        ahead.follows = True
        return ahead

    def read(self, step: Step) -> tuple[Step, Outcome]:
        """Wait for a round. Where it fails with a proposal of the draft in it, it is launched again without the draft. Returns
        the step that was read."""
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
        self._batch.disable_draft(error)
        sampling, noise, key = self._fresh_arrays(plan.rows)
        self._prefill_again(plan.rows)
        return self._verify(plan, None, sampling, noise, key)

    def _sampling_of(self, rows: Sequence[Request]) -> SamplingBatch:
        """The rows' sampling, as arrays that are made anew when rows change."""
        settings = tuple(row.prompt.sampling for row in rows)
        if self._sampling is None or self._sampling.rows != settings:
            self._sampling = SamplingBatch.of(settings, self._vocabulary)
        return self._sampling

    def _keys(self, sampling: SamplingBatch, count: int) -> list[mx.array]:
        """Fresh keys where rows sample without a seed."""
        if not sampling.unseeded:
            return [self.key] * count
        self.key, *keys = mx.random.split(self.key, count + 1)
        return keys

    def _fresh_arrays(self, rows: Sequence[Request]) -> tuple[SamplingBatch, SharedNoise, mx.array]:
        """What a round samples with, made anew: MLX may take arrays of an evaluation that failed for computed."""
        self._sampling = None
        sampling = self._sampling_of(rows)
        self.key = mx.random.key(secrets.randbits(63))
        noise = SharedNoise(sampling, [row.emitted for row in rows], self._vocabulary)
        return sampling, noise, mx.random.key(secrets.randbits(63))

    def _prefill_again(self, rows: Sequence[Request]) -> None:
        """Compute the target's keys and values of all rows anew, after an evaluation that failed with them in it."""
        batch, caches = self._batch, list[RowCache]()
        for row in rows:
            cache, text = batch.target.cache(1), row.tokens[:-1]
            for start in range(0, len(text), self._prefill_chunk):
                batch.target(mx.array([text[start : start + self._prefill_chunk]]), cache)
                device.wait(cache.arrays())
                cache.truncate([min(start + self._prefill_chunk, len(text))])
            caches.append(cache)
        batch.cache.compact([])
        batch.cache.join(caches)

    def _propose(self, plan: Plan, sampling: SamplingBatch, noise: SharedNoise, key: mx.array) -> Proposal | None:
        """The draft's proposal, launched; None where it proposes nothing."""
        rows, drafter = plan.rows, self._batch.drafter
        if drafter is None or self._batch.failed or plan.steps.most == 0 or any(len(row.tokens) < 2 for row in rows):
            return None
        if not any(map(drafts, rows)):
            return None
        try:
            proposal = drafter.propose(plan.visible, plan.steps, sampling, noise, key)
            if proposal is not None:
                # What MLX refuses to run is then raised here, before the target's cache depends on it.
                device.launch(proposal.tokens, proposal.usable, [] if proposal.logq is None else proposal.logq)
            return proposal
        except Exception as error:  # noqa: BLE001  (whatever is wrong with a draft costs speed alone)
            self._batch.disable_draft(error)
            return None

    def _verify(
        self,
        plan: Plan,
        drafted: Proposal | None,
        sampling: SamplingBatch,
        noise: SharedNoise,
        key: mx.array,
        latest: mx.array | None = None,
    ) -> Step:
        """One target call over each row's newest token and its proposal: the look-up where the plan says so, else what was
        drafted. latest: (B, 1), the newest tokens where only the device has them. The target's cache then holds the whole
        proposal."""
        rows, choice, cache = plan.rows, plan.choice, self._batch.cache
        lookups = [found.tokens[:n] if found else [] for found, n in zip(plan.found, choice.looked_up, strict=True)]
        most = max(map(len, lookups), default=0) if drafted is None else choice.proposed
        finite = None
        if drafted is not None:
            finite = drafted.usable
            if not all(map(drafts, rows)):
                drafted = replace(drafted, usable=finite & mx.array([drafts(row) for row in rows])[:, None])
        proposal = prefer_lookups(drafted, lookups, most, self._vocabulary, sampling.unseeded)
        if latest is None:
            latest = mx.array(np.array([[row.tokens[-1]] for row in rows], dtype=np.int32))
        tokens = latest
        if proposal is not None:
            tokens = mx.concatenate([latest.astype(proposal.tokens.dtype), proposal.tokens], axis=1)
        logits = self._batch.target.verify(tokens, cache)[..., : self._vocabulary]
        distribution = transform(logits, sampling)
        accepted, following = accept.accept(distribution, sampling, noise.first(tokens.shape[1]), proposal, key)
        emitted = following[:, None]
        if proposal is not None:
            emitted = accept.emitted_tokens(accepted, following, proposal.tokens)
        evidence = None
        if self._collect and any(row.prompt.store for row in rows) and self._strategy.launch_ahead:
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
            others=[*cache.arrays(), self.key],
        )
        if self._strategy.launch_ahead:
            step.launch()
        return step
