"""Recurrent layers in a batch: rows join, leave and accept part of a proposal, and outputs stay the target's own."""

import random
from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest

from service.core import Prompt, Sampling
from service.engine.acceptance import Acceptance, Calibration
from service.engine.adapters import Draft
from service.engine.costs import Costs, Load
from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.recurrent import StateLayer
from service.engine.planner import Choice, DraftSteps, Match, Planner
from service.engine.request import Request
from service.engine.strategy import CUDA, METAL, Strategy, using
from tests.support.batches import decode, serve
from tests.support.families import RECURRENT, V, build, noisy_draft
from tests.support.oracle import naive, tiny_llama

EOS = frozenset({3})
KINDS = ("lfm2", "granitemoehybrid", "falcon_h1", "jamba", "qwen3_5", "rwkv7")
"""Convolutions alone; Mamba-2; next to attention in one layer; Mamba, a delta rule, and two modules on one state."""
SLOWEST = "qwen3_5"
"""Whole batches of it are decoded nightly."""


@cache
def target(name: str) -> nn.Module:
    return build(name, RECURRENT[name])


@cache
def draft(name: str, kind: str) -> nn.Module:
    return tiny_llama(1, vocabulary=V) if kind == "attention" else noisy_draft(name, RECURRENT[name], target(name))


def asked(rng: random.Random, greedy: bool, count: int) -> list[Prompt]:
    made: list[Prompt] = []
    for _ in range(count):
        tokens = tuple(rng.randrange(4, V) for _ in range(rng.choice([1, 2, 3, rng.randint(4, 40)])))
        budget = rng.choice([1, 2, rng.randint(3, 24)])
        seeded = Sampling(temperature=rng.choice([0.5, 1.0]), top_p=0.9, seed=rng.randrange(2**62), max_tokens=budget)
        made.append(Prompt(tokens, Sampling(max_tokens=budget) if greedy else seeded))
    return made


@pytest.mark.parametrize(
    ("name", "k", "greedy"),
    [
        # The daily tests cover each kind once, and one kind at every draft length.
        pytest.param(
            name,
            k,
            greedy,
            id=f"{name}-{k}-{'greedy' if greedy else 'seeded'}",
            marks=()
            if (k == 3 and greedy == (i % 2 == 0) and name != SLOWEST) or (i == 0 and greedy)
            else pytest.mark.nightly,
        )
        for i, name in enumerate(KINDS)
        for k in range(5)
        for greedy in (True, False)
    ],
)
def test_rows_come_and_go(name: str, k: int, greedy: bool) -> None:
    rng = random.Random(f"{name} {k} {greedy}")
    versions = [Draft(i, draft(name, "alike")) for i in range(2)]

    def between(decoder: Decoder) -> None:
        if rng.random() < 0.2:
            decoder.switch(rng.choice(versions))

    prompts = asked(rng, greedy, 8)
    rows = decode(
        target(name), versions[0], prompts, k=k, vocabulary=V, eos=EOS, chunk=7, max_rows=4, seed=k, between=between
    )
    assert [row.output for row in rows] == [naive(target(name), p.tokens, p.sampling, EOS) for p in prompts]


@pytest.mark.parametrize("strategy", [METAL, CUDA], ids=["Metal", "CUDA"])
def test_plain_rounds_are_timed_though_none_is_launched_ahead(strategy: Strategy) -> None:
    with using(strategy):
        decoder = Decoder(target("lfm2"), None, vocabulary=V, k=0, adaptive=True, lookup=4)
        planner = decoder.planner = Planner(0, 4, Costs({(1, 1): 1.0, (1, 5): 1.0}, {1: 0.0}, {1: 0.0}, 0.0, 0.0))
        text = tuple(random.Random(3).sample(range(4, V), 20))
        decoder.admit(Request("0", Prompt(text, Sampling(max_tokens=40)), frozenset(), None))
        while decoder.unfinished:
            decoder.round()
    assert planner.costs.established(Load(1, 30, alone=True), 0, 0)


class RandomLength(Planner):
    """Random draft lengths."""

    def __init__(self, seed: int) -> None:
        cost = {1: 1.0, 2: 1.0}
        super().__init__(4, 4, Costs({(1, 1): 1.0, (1, 5): 1.0}, cost, cost, 0.0, 0.0))
        self.rng = random.Random(seed)

    def choose(
        self,
        load: Load,
        matches: Sequence[Match | None],
        own: Sequence[Acceptance] | None = None,
        *,
        drafts: bool = True,
    ) -> Choice:
        drafted = self.rng.randrange(5)
        most = drafted or self.rng.randrange(5)
        return Choice(drafted, tuple(min(m.available, most) if m and self.rng.random() < 0.5 else 0 for m in matches))

    def steps(
        self, load: Load, choice: Choice, greedy: Sequence[bool], drafts: Sequence[bool] | None = None
    ) -> DraftSteps:
        return DraftSteps(self.drafted, [Calibration() for _ in greedy], lambda drafted, reach: self.rng.random() < 0.6)

    def prefills(self, load: Load) -> bool:
        return self.rng.random() < 0.5


@pytest.mark.parametrize(
    ("name", "kind", "count", "tokens"),
    [
        *((name, ("alike", "attention")[i % 2], 4, 24) for i, name in enumerate(KINDS) if name != SLOWEST),
        *(
            pytest.param(name, kind, 6, 40, marks=pytest.mark.nightly)
            for name in KINDS
            for kind in ("alike", "attention")
        ),
    ],
)
def test_lengths_and_sources_may_change_every_round(name: str, kind: str, count: int, tokens: int) -> None:
    rng, lengths = random.Random(kind), RandomLength(1)
    prompts = [Prompt(p.tokens * 3, Sampling(max_tokens=tokens)) for p in asked(rng, True, count)]
    decoder = Decoder(
        target(name), Draft(0, draft(name, kind)), vocabulary=V, k=4, prefill_chunk=7, adaptive=True, lookup=4
    )
    decoder.planner = lengths
    rows = serve(decoder, prompts, max_rows=3, seed=1)
    assert [row.output for row in rows] == [naive(target(name), p.tokens, p.sampling) for p in prompts]
    assert len({(round.drafted, round.source) for row in rows for round in row.rounds}) > 4


def logits(model: nn.Module, tokens: list[int]) -> mx.array:
    return model(mx.array([tokens]), cache=RowCache(model, 1).layers)[0, -1]


@pytest.mark.parametrize("name", KINDS)
def test_a_proposal_is_rolled_back_over_several_calls(name: str) -> None:
    """As after four draft steps of which the target accepted two tokens."""
    model = target(name)
    held = RowCache(model, 2)
    model(mx.array([[5, 6, 7], [8, 9, 0]]), cache=held.layers)
    held.rewind([3, 2])
    for step in range(1, 5):
        model(mx.array([[10 + step], [20 + step]]), cache=held.layers)
        held.rewind([3 + step, 2 + step])
    held.truncate([5, 2])
    ours = model(mx.array([[30], [31]]), cache=held.layers)
    alone = [logits(model, [5, 6, 7, 11, 12, 30]), logits(model, [8, 9, 31])]
    for row, expected in enumerate(alone):
        assert mx.allclose(ours[row, -1], expected, rtol=1e-3, atol=1e-4).item()


def test_a_committed_state_is_not_rolled_back() -> None:
    held = RowCache(target("lfm2"), 1)
    target("lfm2")(mx.array([[5, 6, 7]]), cache=held.layers)
    held.truncate([3])
    with pytest.raises(ValueError, match="committed"):
        held.rewind([2])


def test_keeping_all_tokens_replays_nothing() -> None:
    model, held = target("lfm2"), RowCache(target("lfm2"), 2)
    model(mx.array([[5, 6], [7, 8]]), cache=held.layers)
    after = [layer.cache[0] for layer in held.states]
    held.truncate([2, 2])
    assert all(layer.cache[0] is array for layer, array in zip(held.states, after, strict=True))


def test_keeping_no_token_restores_the_same_arrays() -> None:
    model, held = target("jamba"), RowCache(target("jamba"), 2)
    model(mx.array([[5, 6], [7, 8]]), cache=held.layers)
    held.truncate([2, 2])
    before = [list(layer.cache) for layer in held.states]
    model(mx.array([[9, 10], [11, 12]]), cache=held.layers)
    held.rewind([2, 2])
    for layer, slots in zip(held.states, before, strict=True):
        assert all(now is then for now, then in zip(layer.cache, slots, strict=True))


def test_recording_changes_no_name_array_or_result() -> None:
    plain, recording = build("granitemoehybrid", RECURRENT["granitemoehybrid"]), target("granitemoehybrid")
    kind = type(plain)
    assert RowCache(plain, 1).states and isinstance(plain, kind) and type(plain).__module__ == kind.__module__
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in recording.named_modules()]
    assert mx.array_equal(plain(mx.array([[5, 6, 7]])), recording(mx.array([[5, 6, 7]]))).item()


def test_calls_are_released_after_a_round() -> None:
    """A layer's inputs are kept until the round is verified, not for the life of the row."""
    decoder = Decoder(target("lfm2"), Draft(0, draft("lfm2", "alike")), vocabulary=V, k=3)
    decoder.admit(Request("0", Prompt((5, 6, 7), Sampling(max_tokens=12)), EOS, None))
    states: list[StateLayer] = decoder.batch.cache.states
    while decoder.rows:
        decoder.round()
        assert decoder.batch.drafter is not None
        assert not any(layer.calls for layer in (*states, *decoder.batch.drafter.cache.states))
