"""Penalties, bad words, least lengths and ends of one's own: the naive decoder's output under the same rules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model
from scipy.stats import chisquare

from service.core import FinishReason, Prompt, Sampling, Source
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.history import History, TokenCounts
from service.engine.request import Request, TextStream
from service.engine.runner import Runner
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from service.models.heads import cut
from tests.support.automaton import Automaton, masked_alone
from tests.support.batches import decode
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.families import RECURRENT, build, noisy_draft
from tests.support.oracle import bent, filtered_logprobs, forced, naive, noisy_copy, read, tiny_llama

VOCABULARY, K = 97, 4
EOS = frozenset({3})
STRATEGIES = pytest.mark.parametrize("strategy", [CPU, METAL, CUDA], ids=["CPU", "Metal", "CUDA"])
GREEDY = Sampling(max_tokens=40)
SEEDED = Sampling(max_tokens=40, temperature=0.9, seed=7, top_p=0.95)
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.4, "presence_penalty": 2.0, "repetition_penalty": 1.2},
]
BIAS = ((7, 3.0), (11, -100.0), (13, 2.5))


def tokens_of(number: int, count: int = 16) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(count + 3 * number))


def words_of(target: Model, prompt: Sequence[int], sampling: Sampling) -> tuple[tuple[int, ...], ...]:
    """Bad words that the target would say: a token, a pair, and four tokens that share their last one with others."""
    said = naive(target, prompt, replace(sampling, max_tokens=30), EOS)
    return ((said[1],), tuple(said[4:6]), tuple(said[9:13]), (said[20], said[12]), (90, said[12]))


def mixed(target: Model) -> list[Prompt]:
    """Rows with penalties, banned words and least lengths beside rows without."""
    prompts = [Prompt(tokens_of(0), GREEDY), Prompt(tokens_of(1), SEEDED)]
    for number, penalty in enumerate(PENALTIES, 2):
        base = GREEDY if number % 2 else SEEDED
        # The prompt repeats itself, so that there are look-ups.
        prompts.append(Prompt(tokens_of(number, 8) * 2, replace(base, **penalty)))
    long = Sampling(max_tokens=40, min_tokens=25, stop_token_ids=(5, 9, 11, 20, 21, 22))
    prompts.append(Prompt(tokens_of(8), long))
    prompts.append(Prompt(tokens_of(9), replace(SEEDED, bad_words=words_of(target, tokens_of(9), SEEDED))))
    everything = replace(GREEDY, min_tokens=10, logit_bias=BIAS, frequency_penalty=0.5, repetition_penalty=1.1)
    prompts.append(Prompt(tokens_of(10), replace(everything, bad_words=words_of(target, tokens_of(10), everything))))
    prompts.append(Prompt(tokens_of(11), replace(SEEDED, seed=None, presence_penalty=1.0)))
    return prompts


def serve(decoder: Decoder, prompts: Sequence[Prompt], eos: frozenset[int] = EOS) -> list[Request]:
    rows = [Request(str(i), prompt, eos, None) for i, prompt in enumerate(prompts)]
    decoder.admit(*rows)
    while decoder.unfinished:
        decoder.round()
    return rows


def assert_naive(target: nn.Module, rows: Sequence[Request], eos: frozenset[int] = EOS) -> None:
    for row in rows:
        if row.prompt.sampling.greedy or row.prompt.sampling.seed is not None:
            assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling, eos)


def cut_to(model: nn.Module, ids: Sequence[int]) -> nn.Module:
    cut(model, list(ids))
    return model


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
def test_rows_with_a_history_beside_others_are_the_naive_decoder_s(
    target: Model, draft: nn.Module, strategy: Strategy, kind: str, adaptive: bool
) -> None:
    drafts: dict[str, Draft | None] = {
        "none": None,
        "model": bare(draft),
        "cut": bare(cut_to(noisy_copy(target, 1, 0.1), range(4, 50))),
        "wrong": bare(tiny_llama(9)),
    }
    prompts = mixed(target)
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
    assert_naive(target, rows)
    changed = [
        row for row in rows[2:-1] if row.output != forced(target, row.prompt.tokens, row.output, plain(row), EOS)
    ]
    assert len(changed) >= 6, "the rules change nothing that is tested here"
    if kind == "model" and not adaptive:
        accepted = [sum(each.accepted for each in row.rounds if each.source is Source.DRAFT) for row in rows]
        assert min(accepted[2:-1]) > 0


def plain(row: Request) -> Sampling:
    sampling = row.prompt.sampling
    return replace(sampling, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, bad_words=(), min_tokens=0)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 12))])
@STRATEGIES
def test_rows_that_come_and_go_keep_their_rules(target: Model, draft: nn.Module, strategy: Strategy, seed: int) -> None:
    """With look-ups, and drafts that are switched off for some rows."""
    prompts = mixed(target)
    random.Random(seed).shuffle(prompts)
    prompts = [replace(each, num_draft_tokens=0) if i % 4 == 3 else each for i, each in enumerate(prompts)]
    with using(strategy):
        rows = decode(
            target, draft, prompts, k=K, vocabulary=VOCABULARY, eos=EOS, max_rows=4, seed=seed, adaptive=True, lookup=6
        )
    assert_naive(target, rows)


@STRATEGIES
def test_constrained_rows_are_penalised_within_their_grammar(
    target: Model, draft: nn.Module, strategy: Strategy
) -> None:
    """What a grammar leaves no choice about is said, banned or not."""
    rules = replace(GREEDY, frequency_penalty=0.6, repetition_penalty=1.2, bad_words=tuple((i,) for i in range(4, 60)))
    prompts = [
        Prompt(tokens_of(0), rules, constraint=Automaton(0, VOCABULARY)),
        Prompt(tokens_of(1), GREEDY, constraint=Automaton(1, VOCABULARY)),
        Prompt(tokens_of(2), replace(SEEDED, presence_penalty=1.5), constraint=Automaton(2, VOCABULARY)),
        Prompt(tokens_of(3), rules),
        Prompt(tokens_of(4), replace(GREEDY, min_tokens=30), constraint=Automaton(4, VOCABULARY, limit=12)),
        Prompt(tokens_of(5), replace(GREEDY, ignore_eos=True), constraint=Automaton(4, VOCABULARY, limit=12)),
    ]
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, adaptive=True, lookup=6)
        rows = serve(decoder, prompts)
    for row in rows:
        constraint = row.prompt.constraint
        if constraint is None:
            assert_naive(target, [row])
        else:
            assert isinstance(constraint, Automaton)
            limited = replace(row.prompt.sampling, max_tokens=min(40, constraint.limit))
            # At its limit a grammar allows the end alone, which the round there may or may not reach.
            assert [token for token in row.output if token not in EOS] == masked_alone(
                target, row.prompt.tokens, limited, constraint, EOS
            )
    assert {token for token in rows[0].output if token < 60}, "the grammar forced nothing that is banned"


@STRATEGIES
def test_a_row_that_was_preempted_goes_on_with_its_counts(target: Model, draft: nn.Module, strategy: Strategy) -> None:
    prompts = mixed(target)[2:10]
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K)
        rows = [Request(str(i), prompt, EOS, None) for i, prompt in enumerate(prompts)]
        decoder.admit(*rows)
        for _ in range(3):
            decoder.round()
        gone = [row for row in rows[::2] if row.finish is None]
        decoder.leave(gone)
        while decoder.unfinished:
            decoder.round()
        decoder.admit(*gone)
        while decoder.unfinished:
            decoder.round()
    assert len(gone) >= 2
    assert_naive(target, rows)


@pytest.mark.parametrize("strategy", [CPU, CUDA], ids=["CPU", "CUDA"])
def test_recurrent_targets_are_penalised_alike(strategy: Strategy) -> None:
    needs = RECURRENT["lfm2"]
    target = build("lfm2", needs)
    draft = noisy_draft("lfm2", needs, target)
    prompts = [Prompt(tokens_of(i), replace(GREEDY, max_tokens=20, **rule)) for i, rule in enumerate(PENALTIES)]
    with using(strategy):
        rows = serve(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=3), prompts)
    assert_naive(target, rows)


@STRATEGIES
def test_a_head_drafts_for_penalised_rows(strategy: Strategy) -> None:
    target = plain_llama(0)
    prompts = [Prompt(tokens_of(i), replace(GREEDY, max_tokens=20, **rule)) for i, rule in enumerate(PENALTIES)]
    prompts.append(Prompt(tokens_of(8), replace(GREEDY, max_tokens=20)))
    with using(strategy):
        decoder = Decoder(target, bare(tiny_head(target, 1)), vocabulary=VOCABULARY, k=3)
        rows = serve(decoder, prompts)
    assert_naive(target, rows)


@pytest.mark.parametrize(
    ("draws", "strategy"),
    [
        pytest.param(600, CPU, id="600-CPU"),
        *(
            pytest.param(6000, strategy, id=f"6000-{name}", marks=pytest.mark.nightly)
            for strategy, name in ((CPU, "CPU"), (METAL, "Metal"), (CUDA, "CUDA"))
        ),
    ],
)
def test_unseeded_sampling_has_the_penalised_distribution(
    target: Model, draft: nn.Module, strategy: Strategy, draws: int
) -> None:
    """The first three outputs of many rows: where the second repeats the first depends on a proposal of the same round."""
    few = ((9, 60.0), (10, 60.5), (14, 61.0))
    rules: dict[str, Any] = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.05}
    sampling = Sampling(max_tokens=3, temperature=1.0, logit_bias=few, **rules)
    prompt, seen = (*tokens_of(2), 9), Counter[tuple[int, ...]]()
    with using(strategy):
        decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=2, key=mx.random.key(5))
        for _ in range(draws // 50):
            rows = serve(decoder, [Prompt(prompt, sampling)] * 48 + [Prompt(prompt, Sampling(max_tokens=3))] * 2)
            seen.update(tuple(row.output) for row in rows[:48])
    wanted: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        wanted = {
            (*said, token): p * share
            for said, p in wanted.items()
            for token, share in distribution(target, prompt, said, sampling).items()
        }
    assert set(seen) <= set(wanted)
    total, common = sum(seen.values()), [text for text in wanted if wanted[text] * sum(seen.values()) >= 5]
    observed = [*(seen[text] for text in common), total - sum(seen[text] for text in common)]
    expected = [*(wanted[text] * total for text in common), total * (1 - sum(wanted[text] for text in common))]
    if expected[-1] < 1:
        observed, expected = observed[:-1], expected[:-1]
    assert chisquare(observed, np.array(expected) / sum(expected) * sum(observed)).pvalue > 1e-4


def distribution(target: Model, prompt: Sequence[int], said: Sequence[int], sampling: Sampling) -> dict[int, float]:
    logits = read(target, [*prompt, *said], make_prompt_cache(target))[-1].astype(mx.float32)
    for token, added in sampling.logit_bias:
        logits[token] += added
    shares = np.exp(np.array(filtered_logprobs(bent(logits, prompt, said, sampling)[None], sampling)[0]))
    return {token: float(shares[token]) for token, _ in sampling.logit_bias}


# ------------------------------------------------------------------------------------------------------------- the ends


def test_no_end_comes_before_the_least_length(target: Model, draft: nn.Module) -> None:
    said = naive(target, tokens_of(0), GREEDY)
    eos, stop = frozenset({said[2]}), (said[5], said[7])
    for least in (0, 1, 3, 6, 9):
        sampling = replace(GREEDY, min_tokens=least, stop_token_ids=stop)
        (row,) = serve(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K), [Prompt(tokens_of(0), sampling)], eos)
        assert_naive(target, [row], eos)
        ends = {*eos, *stop}
        assert not ends & set(row.output[:least])
        assert row.finish is (FinishReason.STOP if row.output[-1] in ends else FinishReason.LENGTH)


def test_an_answer_goes_on_behind_the_model_s_end(target: Model, draft: nn.Module) -> None:
    said = naive(target, tokens_of(0), GREEDY)
    eos = frozenset({said[2]})
    on, stopped = replace(GREEDY, ignore_eos=True), replace(GREEDY, ignore_eos=True, stop_token_ids=(said[9],))
    decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K)
    rows = serve(decoder, [Prompt(tokens_of(0), sampling) for sampling in (GREEDY, on, stopped)], eos)
    assert rows[0].output == said[:3] and rows[0].finish is FinishReason.STOP
    assert rows[1].output == said and rows[1].finish is FinishReason.LENGTH
    assert rows[2].output == said[: said.index(said[9]) + 1] and rows[2].finish is FinishReason.STOP


class Letters:
    """A detokenizer of which token n is the n-th letter."""

    def __init__(self) -> None:
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += chr(97 + token)

    def finalize(self) -> None:
        pass


def spoken(tokens: Sequence[int], sampling: Sampling, logprobs: int | None = None) -> tuple[str, Request]:
    """The text of these tokens, one a round, and the row."""
    text = TextStream(Letters(), sampling.stop, include_stop=sampling.include_stop)
    row, said = Request("", Prompt((0,), sampling, logprobs=logprobs), EOS, text), ""
    for token in tokens:
        if row.finish is None:
            said += row.append_round([token], [], Source.DRAFT, 0).text
    return said, row


@pytest.mark.parametrize(
    ("sampling", "tokens", "wanted", "finish"),
    [
        (Sampling(stop_token_ids=(7,)), (0, 1, 7, 2), "ab", FinishReason.STOP),
        (Sampling(stop_token_ids=(7,), include_stop=True), (0, 1, 7, 2), "abh", FinishReason.STOP),
        (Sampling(stop=("bc",)), (0, 1, 2, 4), "a", FinishReason.STOP),
        (Sampling(stop=("bc",), include_stop=True), (0, 1, 2, 4), "abc", FinishReason.STOP),
        (Sampling(stop=("bc", "c"), include_stop=True), (0, 1, 2, 4), "abc", FinishReason.STOP),
        (Sampling(include_stop=True), (0, 3, 2), "a", FinishReason.STOP),
        (Sampling(ignore_eos=True, max_tokens=4), (0, 3, 2, 3), "ac", FinishReason.LENGTH),
        # As vLLM: a stop string counts where it ends behind so many tokens.
        (Sampling(stop=("bc",), min_tokens=3, max_tokens=6), (0, 1, 2, 1, 2, 4), "abc", FinishReason.STOP),
        (Sampling(stop=("bc",), min_tokens=2, max_tokens=6), (0, 1, 2, 4, 4, 4), "a", FinishReason.STOP),
        (Sampling(stop=("bc",), min_tokens=6, max_tokens=6), (0, 1, 2, 1, 2, 4), "abcbce", FinishReason.LENGTH),
    ],
)
def test_where_a_text_ends(sampling: Sampling, tokens: Sequence[int], wanted: str, finish: FinishReason) -> None:
    said, row = spoken(tokens, sampling)
    assert (said, row.finish) == (wanted, finish)


# ---------------------------------------------------------------------------------------------------- what is recorded


@STRATEGIES
def test_what_is_logged_of_a_penalised_row_is_the_plain_target_s(
    target: Model, draft: nn.Module, strategy: Strategy
) -> None:
    """So that a draft may learn from it. The rounds' own choices are under the penalty."""
    sampling = replace(GREEDY, repetition_penalty=1.4)
    prompts = [Prompt(tokens_of(i), sampling, logprobs=2) for i in range(3)]
    with using(strategy):
        rows = serve(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True), prompts)
    for row in rows:
        logits = read(target, row.tokens[:-1], make_prompt_cache(target))[len(row.prompt.tokens) - 1 :]
        wanted = np.array(nn.log_softmax(logits.astype(mx.float32), axis=-1))
        logged = np.concatenate([each.logprobs[:n] for each, n in row.evidence])
        assert logged == pytest.approx(wanted[np.arange(len(row.output)), row.output], abs=1e-4)
        for case in row.cases:
            # What the target itself wanted most was not the draft's failure.
            assert case.drafted != int(wanted[case.position].argmax())
    preferred = [row.output[i] != int(best) for row in rows for i, best in enumerate(plain_best(target, row))]
    assert sum(preferred) > 10


def plain_best(target: Model, row: Request) -> list[int]:
    logits = read(target, row.tokens[:-1], make_prompt_cache(target))[len(row.prompt.tokens) - 1 :]
    return np.array(mx.argmax(logits, axis=-1)).tolist()


def test_a_bent_row_is_not_recorded(target: Model, draft: nn.Module) -> None:
    prompts = [Prompt(tokens_of(0), GREEDY), Prompt(tokens_of(1), replace(GREEDY, presence_penalty=1.0), bent=True)]
    rows = serve(Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K, collect=True), prompts)
    assert [bool(row.evidence) for row in rows] == [True, False]
    assert not rows[1].cases


# ---------------------------------------------------------------------------------------------------------------- costs


def test_batches_without_such_a_row_compute_nothing_of_it(
    target: Model, draft: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    decided = Runner._decided

    def noting(runner: Runner, arguments: Sequence[object], *others: Any) -> object:
        made.append(arguments[7])
        return decided(runner, arguments, *others)

    monkeypatch.setattr(Runner, "_decided", noting)
    decoder = Decoder(target, bare(draft), vocabulary=VOCABULARY, k=K)
    serve(decoder, [Prompt(tokens_of(0), GREEDY), Prompt(tokens_of(1), replace(SEEDED, stop_token_ids=(5,)))])
    assert made and not any(made)
    made.clear()
    serve(decoder, [Prompt(tokens_of(0), replace(GREEDY, min_tokens=6))])
    # Once the answer is long enough nothing is left to compute.
    assert made[0] and not made[-1]


def test_counts_follow_a_growing_text() -> None:
    rng, counts, whole = random.Random(1), TokenCounts(), TokenCounts()
    text = [rng.randrange(200) for _ in range(500)]
    for end in range(100, 501, 8):
        counts.update(text[:end], 100, with_prompt=False)
        whole.update(text[:end], 100, with_prompt=True)
    said = Counter(text[100:])
    assert dict(zip(counts.ids[: counts.size].tolist(), counts.counts[: counts.size].tolist(), strict=True)) == said
    wanted = {token: said[token] for token in text}
    assert dict(zip(whole.ids[: whole.size].tolist(), whole.counts[: whole.size].tolist(), strict=True)) == wanted


def test_equal_tokens_in_a_proposal_are_counted_at_every_position() -> None:
    """The definition over the whole vocabulary, at positions behind proposals that repeat tokens of the text and each other."""
    rng, width = np.random.default_rng(0), 40
    rules: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    words = ((4,), (1, 2), (2, 2), (9, 1, 2), (5, 6, 7, 8, 2))
    samplings = [
        Sampling(**rules, bad_words=words),
        Sampling(),
        Sampling(**rules),
        Sampling(frequency_penalty=2.0, min_tokens=5, stop_token_ids=(0,), bad_words=words[:1]),
    ]
    rows = [Request(str(i), Prompt((7, 2, 9), sampling), EOS, None) for i, sampling in enumerate(samplings)]
    outputs = [[1, 1, 9], [3], [], [0, 30]]
    proposed = [[1, 2, 2, 2], [1, 2, 2, 2], [0, 0, 7, 0], [30, 0, 30, 12]]
    for row, output in zip(rows, outputs, strict=True):
        row.tokens += output
    logits = mx.array(rng.normal(size=(4, 5, width)).astype(np.float32) * 3)
    history = History.of(rows, width)
    assert history is not None
    found = np.array(History.of_tree(history.tree()).apply(logits, mx.array(proposed), masked=False))
    for i, row in enumerate(rows):
        for at in range(5):
            said = [*outputs[i], *proposed[i][:at]]
            wanted = np.array(bent(logits[i, at], row.prompt.tokens, said, row.prompt.sampling, EOS))
            assert found[i, at].tolist() == pytest.approx(wanted.tolist(), rel=1e-6), (i, at)
    assert History.of([rows[1]], width) is None
