"""The accelerators' ways of running a round, on a CPU: one wait a round, shapes that repeat, and the same evidence."""

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling
from service.engine import device
from service.engine.adapters import bare
from service.engine.costs import Costs, Load
from service.engine.decoder import Decoder
from service.engine.evidence import RoundEvidence
from service.engine.kv.cache import RowCache
from service.engine.kv.paged_layer import PagedLayer
from service.engine.kv.prefix import PrefixCache
from service.engine.planner import Choice, Match, Planner
from service.engine.request import Request
from service.engine.rounds import Plan, Step
from service.engine.sampling import SamplingBatch, transform
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from tests.support.automaton import Automaton
from tests.support.batches import decode
from tests.support.fixed_length import FixedLength, fix_length
from tests.support.oracle import forced, noisy_copy

VOCABULARY, K = 97, 4
EOS = frozenset({3})
ACCELERATORS = pytest.mark.parametrize("strategy", [METAL, CUDA], ids=["Metal", "CUDA"])
ONE_ACCELERATOR = pytest.mark.parametrize(
    "strategy", [pytest.param(METAL, id="Metal", marks=pytest.mark.nightly), pytest.param(CUDA, id="CUDA")]
)
"""Where both do the same."""


def rows_of(count: int, tokens: int, *, seeded: bool = False, eos: frozenset[int] = frozenset()) -> list[Request]:
    """Prompts of unlike length."""
    made: list[Request] = []
    for i in range(count):
        rng = random.Random(i)
        sampling = Sampling(max_tokens=tokens, temperature=0.8, seed=i) if seeded else Sampling(max_tokens=tokens)
        prompt = Prompt(tuple(rng.randrange(4, VOCABULARY) for _ in range(10 + 7 * i)), sampling)
        made.append(Request(str(i), prompt, eos, None))
    return made


def finish(decoder: Decoder, rows: list[Request]) -> None:
    for row in rows:
        decoder.admit(row)
    while decoder.unfinished:
        decoder.round()


@ACCELERATORS
@pytest.mark.parametrize("k", [0, K], ids=["plain", "drafted"])
@pytest.mark.parametrize("collect", [False, True], ids=["silent", "recording"])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_steady_round_waits_once(
    target: Model, draft: nn.Module, strategy: Strategy, k: int, collect: bool, count: int
) -> None:
    with using(strategy):
        decoder = Decoder(target, bare(draft) if k else None, vocabulary=VOCABULARY, k=k, collect=collect)
        for row in rows_of(count, 200):
            decoder.admit(row)
        decoder.round()
        # The steps by themselves where they are not traced, the proposal, the verification.
        launches = 1 if not k else 2 if strategy.replay else k + 2
        for _ in range(12):
            with device.counting() as counts:
                decoder.round()
            assert (counts.waits, counts.launches) == (1, launches)


def test_arrays_are_read_through_the_device_module() -> None:
    """`.item()` waits and is counted nowhere. The linter forbids mx.eval and its like (TID251)."""
    engine = Path(device.__file__).parent
    files = sorted(engine.rglob("*.py"))
    assert len(files) > 30
    assert [file.name for file in files if ".item()" in file.read_text(encoding="utf-8")] == []


@ACCELERATORS
def test_leaving_and_joining_wait_once_more_at_most(target: Model, draft: nn.Module, strategy: Strategy) -> None:
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True)
        first, second, third = rows_of(3, 60)
        decoder.admit(first)
        decoder.admit(second)
        decoder.round()
        prefill = decoder.start_prefill(third)
        while not decoder.prefill(prefill):
            pass
        with device.counting() as counts:
            decoder.join([prefill])
            decoder.round()
        # The round under way, then the next one is launched and read only when asked for.
        assert counts.waits <= 2 and len(decoder.rows) == 3
        with device.counting() as counts:
            decoder.leave([first])
        assert counts.waits <= 2 and decoder.rows[0] is not first
        while decoder.unfinished:
            decoder.round()
        for row in (second, third):
            assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@pytest.mark.parametrize(
    ("strategy", "k", "seeded"),
    [
        pytest.param(
            strategy,
            k,
            seeded,
            id=f"{name}-{'drafted' if k else 'plain'}-{'seeded' if seeded else 'greedy'}",
            marks=() if (i + bool(k) + seeded) % 2 else pytest.mark.nightly,
        )
        for i, (strategy, name) in enumerate([(METAL, "Metal"), (CUDA, "CUDA")])
        for k in (0, K)
        for seeded in (False, True)
    ],
)
def test_rows_end_anywhere_in_the_pipeline(
    target: Model, draft: nn.Module, strategy: Strategy, k: int, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End tokens are seen only after the next round was launched; what it gave a row that had ended is dropped."""
    rows, ahead = rows_of(6, 90, seeded=seeded, eos=frozenset(range(3, 9))), list[bool]()
    with using(strategy):
        decoder = Decoder(target, bare(draft) if k else None, vocabulary=VOCABULARY, k=k, collect=True)
        launch_after = decoder.runner.launch_after

        def noted(step: Step, plan: Plan) -> Step:
            after = launch_after(step, plan)
            assert isinstance(after, Step)
            ahead.append(after.drafted)
            return after

        monkeypatch.setattr(decoder.runner, "launch_after", noted)
        finish(decoder, rows)
    for row in rows:
        expected = forced(target, row.prompt.tokens, row.output, row.prompt.sampling, row.eos)
        assert row.output == expected and sum(each.emitted for each in row.rounds) == len(row.output)
        assert sum(count for _, count in row.evidence) == len(row.output)
        assert k or len(row.rounds) == len(row.output)
    assert len({len(row.output) for row in rows}) > 2, "they end at different moments"
    # What a seeded row draws depends on how many tokens it has.
    assert ahead and all(each == bool(k) for each in ahead) if not (k and seeded) else not ahead
    if k and not seeded:
        accepted = sum(each.accepted for row in rows for each in row.rounds)
        assert accepted > sum(each.drafted for row in rows for each in row.rounds) / 3


@ACCELERATORS
def test_a_round_that_cannot_be_launched_behind_another_costs_the_draft_alone(
    target: Model, draft: nn.Module, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, calls = rows_of(3, 40), 0
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K)
        logits_and_features = decoder.batch.target.logits_and_features

        def failing(tokens: mx.array, cache: RowCache) -> tuple[mx.array, mx.array | None]:
            nonlocal calls
            drafted = tokens.shape[1] == K + 1
            calls += drafted
            if drafted and calls > 1:
                raise RuntimeError("the second round, traced or not")
            return logits_and_features(tokens, cache)

        monkeypatch.setattr(decoder.batch.target, "logits_and_features", failing)
        finish(decoder, rows)
    assert decoder.draft_failures == 1 and decoder.batch.failed
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@ONE_ACCELERATOR
@pytest.mark.usefixtures("exact_costs")
def test_rounds_without_a_draft_are_timed_between_drafted_ones(target: Model, strategy: Strategy) -> None:
    """Until their cost is known every fifth round goes without; after that one in 64, with another behind it. A draft of the
    target's own size would not pay by the clock."""
    with using(strategy):
        decoder = Decoder(target, bare(target), vocabulary=VOCABULARY, k=3, adaptive=True)
        planner = decoder.planner = Planner(3, 0, Costs({(1, 1): 1.0, (1, 4): 1.0}, {1: 0.01}, {1: 0.0}, 0.0, 0.0))
        costs = planner.costs
        (row,) = rows_of(1, 1000)
        decoder.admit(row)
        while len(row.rounds) < 40:
            decoder.round()
        load = Load(1, len(row.tokens))
        assert costs.established(load, 0, 0) and costs.established(load, 3, 3)
        before = len(row.rounds)
        while len(row.rounds) < before + 128:
            decoder.round()
        plain = [each for each in row.rounds[before:] if not each.drafted]
    assert 2 <= len(plain) <= 6


@ONE_ACCELERATOR
@pytest.mark.usefixtures("exact_costs")
@pytest.mark.parametrize(
    "seeded", [pytest.param(False, id="grammar", marks=pytest.mark.nightly), pytest.param(True, id="seeds")]
)
def test_plain_rounds_are_timed_where_drafted_ones_are_by_themselves(
    target: Model, strategy: Strategy, seeded: bool
) -> None:
    """No round is launched behind a drafted one where rows have a seed, or one of them a grammar; so three plain ones are."""
    with using(strategy):
        decoder = Decoder(target, bare(target), vocabulary=VOCABULARY, k=3, adaptive=True)
        costs = {(1, 1): 1.0, (1, 4): 1.0, (4, 1): 1.0, (4, 4): 1.0}
        planner = decoder.planner = Planner(3, 0, Costs(costs, {1: 0.01}, {1: 0.0}, 0.0, 0.0))
        rows = rows_of(4, 1000, seeded=seeded)
        if not seeded:
            rows[0] = Request("", replace(rows[0].prompt, constraint=Automaton(0, VOCABULARY, most=90)), EOS, None)
        decoder.admit(*rows)
        while len(rows[1].rounds) < 40:
            decoder.round()
        load = Load(4, len(rows[3].tokens), ragged=True)
        assert planner.costs.established(load, 0, 0) and planner.costs.established(load, 3, 3)
        before = len(rows[1].rounds)
        while len(rows[1].rounds) < before + 128:
            decoder.round()
        plain = [each for each in rows[1].rounds[before:] if not each.drafted]
    assert 3 <= len(plain) <= 9


@ONE_ACCELERATOR
@pytest.mark.usefixtures("exact_costs")
def test_a_draft_that_rested_in_a_full_batch_drafts_again_for_the_row_that_is_left(
    target: Model, strategy: Strategy
) -> None:
    """Sixteen rows do not pay, one does. The draft has read nothing of the prompts, and catches up in one call."""
    with using(strategy):
        decoder = Decoder(target, bare(target), vocabulary=VOCABULARY, k=3, adaptive=True)
        verify = {(1, 1): 1.0, (1, 4): 1.1, (16, 1): 1.5, (16, 4): 13.5}
        decoder.planner = Planner(3, 0, Costs(verify, {1: 0.01, 16: 0.1}, {1: 0.0}, 0.0, 0.0))
        short, (long,) = rows_of(15, 40), rows_of(1, 200)
        decoder.admit(*short, long)
        assert decoder.batch.drafter is not None and decoder.batch.drafter.cache.lengths.longest == 0
        while any(row.finish is None for row in short):
            decoder.round()
        together = [each.drafted for row in (*short, long) for each in row.rounds]
        assert sum(map(bool, together)) <= len(together) / 10, "but for probes"
        before = len(long.rounds)
        while decoder.unfinished:
            decoder.round()
        alone = [each.drafted for each in long.rounds[before:]]
    assert alone and any(alone[:50]) and sum(map(bool, alone)) > len(alone) / 2
    for row in (*short, long):
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@ONE_ACCELERATOR
def test_rounds_are_timed_where_the_next_one_is_of_their_kind(
    target: Model, draft: nn.Module, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launching a round of another kind takes longer or shorter than launching one more."""
    seen, parked = list[tuple[int, float | None]](), {12, 13, 20}
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, adaptive=True)
        choices = FixedLength(K)
        fix_length(decoder, choices)
        choose = choices.choose

        def park(*arguments: object, **named: object) -> Choice:
            choice = choose(*arguments, **named)  # pyright: ignore[reportArgumentType, reportCallIssue]
            return replace(choice, drafted=0) if choices.number in parked else choice

        monkeypatch.setattr(choices, "choose", park)
        monkeypatch.setattr(
            choices.costs, "observe", lambda load, drafted, proposed, seconds: seen.append((drafted, seconds))
        )
        (row,) = rows_of(1, 200)
        decoder.admit(row)
        while decoder.unfinished:
            decoder.round()
    drafted = [count for count, _ in seen]
    assert 0 in drafted and K in drafted
    for (kind, seconds), (following, _) in pairwise(seen[1:]):
        assert seconds is None or kind == following
    assert sum(seconds is not None for _, seconds in seen) > len(seen) / 2
    assert seen[0][1] is None, "the first round after rows have come"


@ACCELERATORS
def test_look_ups_hold_a_batch_up_only_where_many_rows_have_one(
    target: Model, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = (5, 6, 7, 8, 9, 10, 11, 12) * 4
    texts = [tuple(random.Random(i).sample(range(20, 90), 20)) for i in range(5)]
    found: list[int] = []
    choose = FixedLength.choose

    def noted(self: FixedLength, load: Load, matches: Sequence[Match | None], *own: object, drafts: bool) -> Choice:
        found.append(sum(match is not None for match in matches))
        return choose(self, load, matches, drafts=drafts)

    monkeypatch.setattr(FixedLength, "choose", noted)
    for copies in (4, 5):
        with using(strategy):
            decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=4)
            fix_length(decoder, FixedLength(4, looks_up=lambda number: True))
            for i, text in enumerate([repeated] * copies + texts):
                decoder.admit(Request(str(i), Prompt(text, Sampling(max_tokens=4)), frozenset(), None))
            decoder.round()
    assert found[:1] == [0] and max(found) == 5, "four rows in nine are not enough"


@ACCELERATORS
def test_the_end_of_a_prompt_is_not_waited_for(target: Model, draft: nn.Module, strategy: Strategy) -> None:
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, prefill_chunk=16, prefix=PrefixCache(2**24))
        row = Request("0", Prompt(tuple(range(4, 54)), Sampling(max_tokens=20)), frozenset(), None)
        prefill = decoder.start_prefill(row)
        waits = list[int]()
        while True:
            with device.counting() as counts:
                done = decoder.prefill(prefill)
            waits.append(counts.waits)
            if done:
                break
        assert len(waits) == 4 and all(waits[:-1]) and waits[-1] == 0
        decoder.join([prefill])
        while decoder.unfinished:
            decoder.round()
    assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


def test_reports_cover_every_token_once_when_rows_change_under_way(target: Model, draft: nn.Module) -> None:
    """A join, a leave or a switch completes the round under way, which is reported by the next call."""
    with using(METAL):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K)
        rows, told = rows_of(5, 40), dict[str, list[int]]()
        for i, row in enumerate(rows):
            decoder.admit(row)
            for _ in range(3):
                report = decoder.round()
                for each, delta in zip(report.rows, report.deltas, strict=True):
                    told.setdefault(each.id, []).extend(delta.tokens)
            if i == 2:
                decoder.switch(bare(target))
        while decoder.unfinished:
            report = decoder.round()
            for each, delta in zip(report.rows, report.deltas, strict=True):
                told.setdefault(each.id, []).extend(delta.tokens)
    assert told == {row.id: row.output for row in rows}
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@pytest.mark.parametrize(
    ("strategy", "seeded"),
    [
        pytest.param(METAL, False, id="greedy-Metal"),
        pytest.param(CUDA, False, id="greedy-CUDA", marks=pytest.mark.nightly),
        pytest.param(METAL, True, id="seeded-Metal", marks=pytest.mark.nightly),
        pytest.param(CUDA, True, id="seeded-CUDA"),
    ],
)
def test_the_evidence_is_the_same_as_on_a_cpu(
    target: Model, draft: nn.Module, strategy: Strategy, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seeded:
        # Few matches are long among so few tokens.
        monkeypatch.setattr("service.engine.drafters.lookup.WAITED_SHARE", 0)
        monkeypatch.setattr("service.engine.drafters.lookup.REST", 0)
    found: list[list[Request]] = []
    for each in (CPU, strategy):
        with using(each):
            rows = rows_of(4, 40, seeded=seeded)
            decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, adaptive=True, lookup=3, collect=True)
            # Behind a round of greedy rows another is launched before anything can be looked up in it.
            fix_length(decoder, FixedLength(K, looks_up=lambda number: seeded and number % 4 == 0))
            finish(decoder, rows)
            found.append(rows)
    for mine, theirs in zip(*found, strict=True):
        assert mine.output == theirs.output
        assert mine.cases and len(mine.cases) == len(theirs.cases)
        for one, other in zip(mine.cases, theirs.cases, strict=True):
            assert (one.position, one.drafted, one.target, one.tie) == (
                other.position,
                other.drafted,
                other.target,
                other.tie,
            )
            assert (one.p, one.q, one.margin) == pytest.approx((other.p, other.q, other.margin), abs=1e-5)
        for (one, count), (other, same) in zip(mine.evidence, theirs.evidence, strict=True):
            assert count == same
            for name in ("logprobs", "sampled", "top_ids", "top_logprobs", "tails"):
                assert np.allclose(getattr(one, name), getattr(other, name), atol=1e-4), name
                assert getattr(one, name).base is None, "nothing of other rows stays with it"


def test_evidence_of_greedy_rows_beside_sampled_ones_is_their_own() -> None:
    """The log-probability of a draw is that after the sampling transform; a greedy token was not drawn."""
    samplings = [Sampling(), Sampling(temperature=0.7), Sampling(), Sampling(temperature=1.5, top_k=40)]
    batch = SamplingBatch.of(samplings, VOCABULARY)
    logits = mx.random.normal((4, 3, VOCABULARY), key=mx.random.key(0)) * 3
    distribution = transform(logits, batch)
    emitted = mx.argmax(logits, axis=-1)
    found = RoundEvidence.of(logits, distribution, batch, emitted, None).positions.sampled.reshape(4, 3)
    drawn = mx.take_along_axis(distribution, emitted[..., None], axis=-1)[..., 0]
    assert mx.allclose(found[1::2], drawn[1::2]) and (drawn < 0).all()
    assert (found[::2] == 0).all()


@contextmanager
def attention_shapes(patch: pytest.MonkeyPatch) -> Generator[set[tuple[int, ...]]]:
    """Shapes of queries, keys and masks of calls over several tokens a row."""
    seen: set[tuple[int, ...]] = set()
    fused = mx.fast.scaled_dot_product_attention

    def noted(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: object = None, **more: object) -> mx.array:
        if q.shape[2] > 1:
            seen.add((*q.shape, *k.shape, *(mask.shape if isinstance(mask, mx.array) else ())))
        return fused(q, k, v, scale=scale, mask=mask, **more)  # pyright: ignore[reportArgumentType, reportCallIssue]

    patch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    yield seen


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_cudas_attention_shapes_repeat(
    target: Model, draft: nn.Module, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN makes a plan for each new shape, in families whose attention is their own. Exact lengths give a new one nearly
    every round."""
    made: dict[str, int] = {}
    for name, strategy in (("exact", METAL), ("whole", CUDA)):
        with using(strategy), monkeypatch.context() as patch, attention_shapes(patch) as seen:
            patch.setattr("service.engine.kv.cache.route", lambda model: False)
            patch.setattr(PagedLayer, "row_call", lambda *arguments: None)
            rows = rows_of(count, 80)
            decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K)
            for row in rows:
                decoder.admit(row)
            seen.clear()
            while decoder.unfinished:
                decoder.round()
            made[name] = len(seen)
        for row in rows:
            assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)
    # Three lengths of calls (a first step over two tokens or over what was missed, the verification) for each number of rows.
    assert made["whole"] <= 3 * count < made["exact"]


@ONE_ACCELERATOR
def test_joins_swaps_look_ups_and_prefixes_keep_the_targets_tokens(
    target: Model, draft: nn.Module, strategy: Strategy
) -> None:
    rng = random.Random(7)
    head = tuple(rng.randrange(4, VOCABULARY) for _ in range(70))
    asked = [
        Prompt(
            (*head[: rng.choice([0, 40, 70])], *(rng.randrange(4, 20) for _ in range(rng.randint(2, 30)))),
            Sampling(max_tokens=rng.randint(1, 50), temperature=rng.choice([0.0, 0.8]), seed=i),
        )
        for i in range(14)
    ]
    versions = [bare(draft), bare(noisy_copy(target, 2, 0.3))]

    def between(decoder: Decoder) -> None:
        if not isinstance(decoder.planner, FixedLength):
            fix_length(decoder, FixedLength(K, looks_up=lambda number: number % 3 == 0))
        if rng.random() < 0.2:
            decoder.switch(rng.choice(versions))

    with using(strategy):
        rows = decode(
            target,
            draft,
            asked,
            k=K,
            vocabulary=VOCABULARY,
            eos=EOS,
            adaptive=True,
            lookup=K,
            collect=True,
            prefix=PrefixCache(2**24),
            max_rows=5,
            between=between,
        )
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling, EOS)
    assert any(row.cached_tokens for row in rows) and sum(round.accepted for row in rows for round in row.rounds) > 0
