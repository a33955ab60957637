"""Rows with a grammar: the masked target's own output, whoever proposes, in one batch with rows without one."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model
from scipy.stats import chisquare

from service.core import FinishReason, Prompt, Sampling, Source, TokenLogprobs
from service.engine import device
from service.engine.adapters import Draft, bare
from service.engine.costs import Costs
from service.engine.decoder import Decoder
from service.engine.masks import RoundMasks
from service.engine.planner import Planner
from service.engine.request import Request
from service.engine.rounds import Called, Step
from service.engine.runner import Runner
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from service.engine.target import Target
from service.models.heads import cut
from tests.support.automaton import END, Automaton, masked_alone
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.families import IDENTICAL, RECURRENT, build, noisy_draft
from tests.support.oracle import forced, noisy_copy, read, tiny_llama

VOCABULARY, K = 97, 4
STRATEGIES = pytest.mark.parametrize("strategy", [CPU, METAL, CUDA], ids=["CPU", "Metal", "CUDA"])
GREEDY = Sampling(max_tokens=40)
SEEDED = Sampling(max_tokens=40, temperature=0.9, seed=7, top_p=0.95)


def tokens_of(number: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(12 + 5 * number))


def constrained(number: int, sampling: Sampling, **shape: int) -> Prompt:
    return Prompt(tokens_of(number), sampling, constraint=Automaton(number, VOCABULARY, **shape))


def serve(decoder: Decoder, prompts: Sequence[Prompt]) -> list[Request]:
    rows = [Request(str(i), prompt, frozenset({END}), None) for i, prompt in enumerate(prompts)]
    decoder.admit(*rows)
    while decoder.unfinished:
        decoder.round()
    return rows


def assert_the_target_s_own(target: Model, rows: Sequence[Request]) -> None:
    for row in rows:
        constraint = row.prompt.constraint
        if constraint is None:
            assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling, frozenset({END}))
        else:
            assert isinstance(constraint, Automaton)
            assert row.output == masked_alone(target, row.prompt.tokens, row.prompt.sampling, constraint)


@pytest.mark.parametrize(
    ("adaptive", "kind", "strategy"),
    [
        pytest.param(
            adaptive,
            kind,
            strategy,
            id=f"{'adaptive' if adaptive else 'fixed'}-{kind}-{name}",
            marks=pytest.mark.nightly if (i + j + adaptive) % 4 else (),
        )
        for adaptive in (False, True)
        for i, kind in enumerate(["none", "model", "cut", "wrong"])
        for j, (strategy, name) in enumerate([(CPU, "CPU"), (METAL, "Metal"), (CUDA, "CUDA")])
    ],
)
def test_constrained_rows_beside_free_ones_are_the_masked_target_s_own(
    target: Model, draft: nn.Module, strategy: Strategy, kind: str, adaptive: bool
) -> None:
    prompts = [
        constrained(0, GREEDY),
        Prompt(tokens_of(1), GREEDY),
        constrained(2, SEEDED),
        Prompt(tokens_of(3), SEEDED),
        constrained(4, GREEDY, most=2, forcing=2),
        Prompt(tokens_of(5), replace(SEEDED, seed=None)),
        constrained(6, replace(SEEDED, seed=None)),
    ]
    drafts: dict[str, Draft | None] = {
        "none": None,
        "model": bare(draft),
        "cut": bare(cut_to(noisy_copy(target, 1, 0.1), range(4, 50))),
        "wrong": bare(tiny_llama(9)),
    }
    with using(strategy):
        decoder = Decoder(
            target,
            drafts[kind],
            vocabulary=VOCABULARY,
            k=K,
            collect=True,
            adaptive=adaptive,
            lookup=8 if adaptive else 0,
        )
        rows = serve(decoder, prompts)
    assert decoder.draft_failures == 0
    assert_the_target_s_own(target, [row for row in rows if row.prompt.sampling.seed or row.prompt.sampling.greedy])
    assert all(len(row.output) == 40 for row in rows if row.prompt.constraint is not None)
    used = {round.source for row in rows for round in row.rounds if round.drafted}
    assert adaptive or Source.GRAMMAR not in used
    if kind == "model" and not adaptive:
        drafted = [round for round in rows[0].rounds if round.source is Source.DRAFT and round.drafted]
        assert sum(round.accepted for round in drafted) > 0
    for row in rows:
        for case in row.cases:
            assert case.p > 0.0 or row.prompt.constraint is None
            assert case.drafted != case.target


def assert_logged(target: nn.Module, row: Request) -> None:
    """The log-probabilities of its evidence are the masked target's."""
    automaton = row.prompt.constraint
    logits = np.array(read(target, row.tokens[:-1], make_prompt_cache(target))[len(row.prompt.tokens) - 1 :])
    logged = np.concatenate([each.logprobs[:n] for each, n in row.evidence])
    assert len(logged) == len(row.output)
    for i, token in enumerate(row.output):
        allowed = logits[i].astype(np.float64)
        if isinstance(automaton, Automaton):
            allowed = allowed[automaton.allowed(row.output[:i])]
        wanted = logits[i][token] - np.log(np.exp(allowed - allowed.max()).sum()) - allowed.max()
        assert logged[i] == pytest.approx(wanted, abs=1e-4)


@STRATEGIES
@pytest.mark.parametrize("limit", [1, pytest.param(7, marks=pytest.mark.nightly)])
def test_an_answer_whose_grammar_meets_a_limit_is_cut(
    target: Model, draft: nn.Module, strategy: Strategy, limit: int
) -> None:
    prompts = [constrained(1, GREEDY, limit=limit), constrained(2, GREEDY), Prompt(tokens_of(3), GREEDY)]
    with using(strategy):
        rows = serve(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True), prompts)
    assert_the_target_s_own(target, rows[1:])
    alone = masked_alone(target, tokens_of(1), GREEDY, Automaton(1, VOCABULARY, limit=limit), frozenset({END}))
    assert rows[0].output in (alone, alone[:limit])
    assert rows[0].finish is FinishReason.LENGTH


def cut_to(model: nn.Module, ids: Sequence[int]) -> nn.Module:
    cut(model, list(ids))
    return model


def test_what_a_grammar_forces_is_proposed_without_the_draft(target: Model) -> None:
    decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=8)
    automaton = next(
        each for each in (Automaton(seed, VOCABULARY, forcing=2) for seed in range(99)) if len(each.forced(9)) > 2
    )
    rows = [
        Request("", Prompt(tokens_of(0), GREEDY, constraint=automaton, num_draft_tokens=n), frozenset(), None)
        for n in (None, 2, 0)
    ]
    found = decoder._look_up(rows)
    assert [each and (each.source, each.tokens) for each in found] == [
        (Source.GRAMMAR, automaton.forced(8)),
        (Source.GRAMMAR, automaton.forced(2)),
        None,
    ]


def test_every_draft_token_is_allowed_where_waiting_costs_nothing(target: Model, draft: nn.Module) -> None:
    decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K)
    row = Request("", constrained(0, GREEDY, most=6, forcing=50), frozenset(), None)
    decoder.admit(row)
    automaton = row.prompt.constraint
    assert isinstance(automaton, Automaton)
    proposals: list[tuple[list[int], list[int]]] = []
    propose = decoder.runner._propose

    def noting(*arguments: Any) -> Any:
        made = propose(*arguments)
        assert made is not None
        proposals.append((row.output, np.array(made.tokens)[0].tolist()))
        return made

    decoder.runner._propose = noting  # pyright: ignore[reportAttributeAccessIssue]
    while decoder.unfinished:
        decoder.round()
    assert len(proposals) >= 8
    for output, proposed in proposals:
        for i, token in enumerate(proposed):
            assert token in automaton.allowed([*output, *proposed[:i]])


@STRATEGIES
@pytest.mark.parametrize(
    "adaptive", [pytest.param(False, id="fixed", marks=pytest.mark.nightly), pytest.param(True, id="adaptive")]
)
def test_a_head_drafts_for_constrained_rows(strategy: Strategy, adaptive: bool) -> None:
    target = plain_llama(0)
    prompts = [constrained(0, GREEDY), Prompt(tokens_of(1), GREEDY), constrained(2, SEEDED)]
    with using(strategy):
        decoder = Decoder(
            target,
            bare(tiny_head(target, 1)),
            vocabulary=VOCABULARY,
            k=3,
            collect=True,
            adaptive=adaptive,
            lookup=8 if adaptive else 0,
        )
        rows = serve(decoder, prompts)
    assert decoder.draft_failures == 0
    assert_the_target_s_own(target, rows)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param("lfm2", CPU, id="lfm2-CPU"),
        pytest.param("lfm2", METAL, id="lfm2-Metal", marks=pytest.mark.nightly),
        pytest.param("lfm2", CUDA, id="lfm2-CUDA"),
        pytest.param("gemma3_text", CPU, id="gemma3_text-CPU", marks=pytest.mark.nightly),
        pytest.param("gemma3_text", METAL, id="gemma3_text-Metal"),
        pytest.param("gemma3_text", CUDA, id="gemma3_text-CUDA"),
    ],
)
def test_recurrent_and_windowed_targets_keep_to_their_grammar(strategy: Strategy, name: str) -> None:
    needs = (IDENTICAL | RECURRENT)[name]
    target = build(name, needs)
    draft = noisy_draft(name, needs, target)
    prompts = [constrained(0, GREEDY), Prompt(tokens_of(1), GREEDY), constrained(2, SEEDED)]
    with using(strategy):
        rows = serve(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=3), prompts)
    assert_the_target_s_own(target, [rows[0], rows[2]])


@pytest.mark.parametrize("strategy", [METAL, CUDA], ids=["Metal", "CUDA"])
def test_a_round_with_a_constrained_row_waits_at_most_twice(
    target: Model, draft: nn.Module, strategy: Strategy
) -> None:
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True)
        for prompt in (
            constrained(0, replace(GREEDY, max_tokens=60)),
            Prompt(tokens_of(1), replace(GREEDY, max_tokens=60)),
        ):
            decoder.admit(Request("", prompt, frozenset(), None))
        decoder.round()
        for _ in range(8):
            with device.counting() as counts:
                decoder.round()
            assert counts.waits <= 2


@pytest.mark.parametrize("k", [0, K], ids=["plain", "drafted"])
def test_masks_are_made_while_the_target_runs(
    target: Model, draft: nn.Module, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    events: list[str] = []

    def noting(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            events.append(event)
            return call(*arguments)

        return noted

    with using(CUDA):
        decoder = Decoder(target, bare(draft) if k else None, vocabulary=VOCABULARY, k=k, collect=True)
        decoder.admit(Request("", constrained(0, replace(GREEDY, max_tokens=60)), frozenset(), None))
        for _ in range(4):
            decoder.round()
        for place, name in ((device, "launch"), (device, "wait"), (Target, "verify"), (RoundMasks, "bits")):
            monkeypatch.setattr(place, name, noting(name, getattr(place, name)))
        decoder.round()
    # What is waited for is the round before, or what was drafted.
    assert events[events.index("verify") :] == ["verify", "launch", "wait", "bits", "launch"]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By call of a round with a grammar, whether it was launched behind a round that was not read."""
    found, decide = list[int](), Runner.decide

    def noting(runner: Runner, called: Called) -> Step:
        found.append(called.before is not None)
        return decide(runner, called)

    monkeypatch.setattr(Runner, "decide", noting)
    return found


@pytest.mark.parametrize("strategy", [METAL, CUDA], ids=["Metal", "CUDA"])
@pytest.mark.parametrize("adaptive", [False, True], ids=["plain", "look-ups"])
def test_few_constrained_rows_do_not_hold_the_next_round_up(
    target: Model, strategy: Strategy, adaptive: bool, behind: list[int]
) -> None:
    short, long = (replace(GREEDY, max_tokens=n) for n in (9, 40))
    prompts = [constrained(0, short), constrained(4, replace(SEEDED, max_tokens=20))]
    prompts += [Prompt(tokens_of(i), long) for i in (1, 2, 3)]
    prompts += [Prompt(tokens_of(i), replace(SEEDED, seed=i)) for i in (5, 6)]
    with using(strategy):
        decoder = Decoder(
            target, None, vocabulary=VOCABULARY, k=0, collect=True, adaptive=adaptive, lookup=4 if adaptive else 0
        )
        rows = serve(decoder, prompts)
    assert_the_target_s_own(target, rows)
    assert sum(behind) > 15


@pytest.mark.parametrize("strategy", [METAL, CUDA], ids=["Metal", "CUDA"])
@pytest.mark.parametrize("eagle", [False, True], ids=["model", "head"])
def test_drafted_rounds_follow_each_other_around_few_constrained_rows(
    strategy: Strategy, eagle: bool, behind: list[int]
) -> None:
    target = plain_llama(0) if eagle else tiny_llama(0)
    draft = tiny_head(target, 1) if eagle else noisy_copy(target, 1, 0.1)
    drawn = replace(SEEDED, seed=None)
    prompts = [constrained(0, GREEDY), constrained(4, drawn), Prompt(tokens_of(5), drawn)]
    prompts += [Prompt(tokens_of(i), GREEDY) for i in (1, 2, 3)]
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True)
        rows = [Request(str(i), prompt, frozenset({END}), None) for i, prompt in enumerate(prompts)]
        decoder.admit(*rows)
        for _ in range(3):
            decoder.round()
        for _ in range(5):
            with device.counting() as counts:
                decoder.round()
            assert counts.waits == 2, "for the round before, and for what was drafted"
        while decoder.unfinished:
            decoder.round()
    assert sum(behind) > 7
    greedy = [row for row in rows if row.prompt.sampling.greedy]
    assert_the_target_s_own(target, greedy)
    for row in greedy:
        assert_logged(target, row)
    for row in rows:
        automaton = row.prompt.constraint
        if isinstance(automaton, Automaton):
            assert all(token in automaton.allowed(row.output[:i]) for i, token in enumerate(row.output))
        assert eagle or sum(each.accepted for each in row.rounds) > 0


@pytest.mark.parametrize(
    ("strategy", "eagle", "cancelled"),
    [
        pytest.param(
            strategy, bool(i), k, id=f"{row}-{drafts}-{name}", marks=pytest.mark.nightly if (i + j + k) % 2 else ()
        )
        for i, drafts in enumerate(["no draft", "parked head"])
        for j, (strategy, name) in enumerate([(METAL, "Metal"), (CUDA, "CUDA")])
        for k, row in enumerate(["a free row leaves", "a constrained row leaves"])
    ],
)
def test_rows_come_and_go_in_the_pipeline(strategy: Strategy, eagle: bool, cancelled: int, behind: list[int]) -> None:
    """Texts and logged log-probabilities are the masked target's, whoever ends, leaves or joins."""
    target = plain_llama(0) if eagle else tiny_llama(0)
    prompts = [constrained(i, GREEDY) if i in (1, 4) else Prompt(tokens_of(i), GREEDY) for i in range(7)]
    rows = [Request(str(i), prompt, frozenset({END}), None) for i, prompt in enumerate(prompts)]
    with using(strategy):
        draft = bare(tiny_head(target, 1)) if eagle else None
        decoder = Decoder(target, draft, vocabulary=VOCABULARY, k=3, collect=True)
        decoder.draft_length = 0
        decoder.admit(*rows[:5])
        for _ in range(8):
            decoder.round()
        assert rows[cancelled].finish is None
        rows[cancelled].finish = FinishReason.CANCELLED
        decoder.leave([rows[cancelled]])
        for _ in range(4):
            decoder.round()
        decoder.admit(*rows[5:])
        for _ in range(3):
            decoder.round()
        decoder.draft_length = 3 if eagle else 0
        while decoder.unfinished:
            decoder.round()
    assert sum(behind) > 10
    for row in rows:
        prompt, automaton = row.prompt, row.prompt.constraint
        if isinstance(automaton, Automaton):
            wanted = masked_alone(target, prompt.tokens, prompt.sampling, automaton, frozenset({END}))
        else:
            wanted = forced(target, prompt.tokens, row.output, prompt.sampling, frozenset({END}))
        assert row.output == wanted[: len(row.output)]
        assert row is rows[cancelled] or len(row.output) == len(wanted)
        assert_logged(target, row)


@pytest.mark.usefixtures("exact_costs")
@pytest.mark.parametrize(
    ("rows", "lookup", "waits"),
    [
        pytest.param(1, 0, False, id="no look-ups"),
        pytest.param(40, 4, False, id="more than may be proposed for"),
        pytest.param(4, 4, True, id="few rows with look-ups"),
    ],
)
def test_grammars_are_waited_for_where_what_they_force_may_be_proposed(
    target: Model, rows: int, lookup: int, waits: bool, behind: list[int]
) -> None:
    with using(CUDA):
        decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=lookup > 0, lookup=lookup)
        # More tokens cost nothing: whether they are proposed is no matter of time.
        decoder.planner = Planner(0, lookup, Costs({(1, 1): 1.0}, {1: 0.0}, {1: 0.0}, 0.0, 0.0)) if lookup else None
        served = serve(decoder, [constrained(i, replace(GREEDY, max_tokens=8), forcing=2) for i in range(rows)])
    assert_the_target_s_own(target, served[:4])
    assert (sum(behind) == 0) == waits
    assert any(each.source is Source.GRAMMAR for row in served for each in row.rounds) == waits


def test_rows_that_have_ended_have_no_mask() -> None:
    rows = [Request("", constrained(i, GREEDY), frozenset(), None) for i in range(2)]
    rows[0].finish = FinishReason.LENGTH
    masks = RoundMasks.of(rows, VOCABULARY)
    assert masks is not None
    ended, other = np.array(masks.bits([[], []]))
    assert np.all(ended == 0xFFFFFFFF) and not np.all(other == 0xFFFFFFFF)
    rows[1].finish = FinishReason.LENGTH
    assert RoundMasks.of(rows, VOCABULARY) is None


@STRATEGIES
def test_what_is_logged_is_of_the_masked_target(target: Model, draft: nn.Module, strategy: Strategy) -> None:
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True)
        row = Request("", replace(constrained(3, GREEDY), logprobs=4), frozenset(), None)
        decoder.admit(row)
        sent: list[TokenLogprobs] = []
        while decoder.unfinished:
            sent += [each for delta in decoder.round().deltas for each in delta.logprobs]
    assert [each.token for each in sent] == row.output
    assert all(value > -math.inf for each in sent for _, value in each.top)
    assert_logged(target, row)


@pytest.mark.parametrize(
    ("draws", "strategy", "free"),
    [
        pytest.param(500, CPU, 0, id="500-CPU"),
        pytest.param(120, CUDA, 26, id="120-few"),
        *(
            pytest.param(5000, strategy, free, id=f"5000-{name}", marks=pytest.mark.nightly)
            for strategy, free, name in ((CPU, 0, "CPU"), (METAL, 0, "Metal"), (CUDA, 0, "CUDA"), (METAL, 30, "few"))
        ),
    ],
)
def test_unseeded_sampling_has_the_masked_target_s_distribution(
    target: Model, draft: nn.Module, strategy: Strategy, draws: int, free: int
) -> None:
    """free: rows without a grammar in each batch of 50."""
    sampling = Sampling(max_tokens=2, temperature=1.0)
    prompt, automaton = tokens_of(2), Automaton(5, VOCABULARY, most=6, forcing=50)
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=2)
        seen: Counter[tuple[int, ...]] = Counter()
        for _ in range(draws // (50 - free)):
            prompts = [Prompt(prompt, sampling, constraint=automaton.copy()) for _ in range(50 - free)]
            rows = serve(decoder, [*prompts, *(Prompt(prompt, sampling) for _ in range(free))])
            seen.update(tuple(row.output) for row in rows[: 50 - free])
    wanted: dict[tuple[int, ...], float] = {}
    for first, p in masked_distribution(target, prompt, [], automaton):
        for second, q in masked_distribution(target, prompt, [first], automaton):
            wanted[first, second] = p * q
    assert set(seen) <= set(wanted)
    common = [pair for pair in wanted if wanted[pair] * draws >= 5]
    observed = [*(seen[pair] for pair in common), sum(seen.values()) - sum(seen[pair] for pair in common)]
    expected = [*(wanted[pair] * draws for pair in common), draws - sum(wanted[pair] * draws for pair in common)]
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    assert chisquare(observed, np.array(expected) / sum(expected) * sum(observed)).pvalue > 1e-4


def masked_distribution(
    target: Model, prompt: Sequence[int], output: Sequence[int], automaton: Automaton
) -> list[tuple[int, float]]:
    logits = np.array(read(target, [*prompt, *output], make_prompt_cache(target))[-1]).astype(np.float64)
    allowed = automaton.allowed(output)
    weights = np.exp(logits[allowed] - logits[allowed].max())
    return list(zip(allowed, weights / weights.sum(), strict=True))
