"""Prompt look-up: what it proposes, and that the distribution of the output stays the target's."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest
from scipy.stats import chisquare

from service.core import Prompt, Sampling, Source
from service.engine.adapters import bare
from service.engine.costs import Costs
from service.engine.decoder import Decoder
from service.engine.drafters.lookup import (
    AT_ONCE,
    INDEX_TOKENS,
    LENGTHS,
    MEASURED,
    REST,
    Lookup,
    LookupProposal,
    NGramIndex,
)
from service.engine.drafters.proposal import lookup_proposal, merge
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.planner import PROBE, Planner
from service.engine.request import Request
from service.engine.strategy import METAL, using
from tests.support.batches import admit, decode
from tests.support.oracle import filtered_logprobs, forced, noisy_copy, tiny_llama
from tests.support.typed import as_floats, layers_of

VOCABULARY = 97


def find(text: list[int], max_tokens: int = 4) -> LookupProposal | None:
    index = NGramIndex()
    while index.indexed < len(text):
        index.update(text)
    return Lookup(max_tokens).find(text, index)


def test_the_latest_longest_match_is_proposed() -> None:
    assert find([1, 2, 3, 4, 5, 1, 2]) == LookupProposal(2, [3, 4, 5, 1])
    assert find([1, 2, 3, 1, 2, 4, 9, 1, 2]) == LookupProposal(2, [4, 9, 1, 2])
    # A match of four tokens beats a later match of two.
    assert find([7, 8, 1, 2, 30, 31, 32, 33, 1, 2, 50, 51, 7, 8, 1, 2]) == LookupProposal(4, [30, 31, 32, 33])
    assert find([1, 2, 3]) is None and find([1]) is None and find([]) is None


def test_a_repeating_text_is_proposed_to_continue() -> None:
    assert find([5, 6, 7, 5, 6, 7, 5, 6], max_tokens=5) == LookupProposal(4, [7, 5, 6, 7, 5])
    assert find([9] * 12, max_tokens=3) == LookupProposal(8, [9, 9, 9])


def test_an_incremental_index_finds_what_a_fresh_one_finds() -> None:
    rng, ngrams, lookup = random.Random(0), NGramIndex(), Lookup(6)
    text: list[int] = []
    for _ in range(300):
        text += [rng.randrange(4) for _ in range(rng.randint(1, 5))]
        ngrams.update(text)
        assert lookup.find(text, ngrams) == find(text, max_tokens=6)


def test_recent_outputs_are_shared_and_old_ones_evicted() -> None:
    lookup, text = Lookup(3), [90, 91, 92, 93, 94, 95, 96]
    lookup.add_output(text)
    assert lookup.find([1, 90, 91, 92, 93], NGramIndex()) == LookupProposal(4, [94, 95, 96])
    # Two matching tokens of another text are too few; a match in the row itself comes first.
    assert lookup.find([1, 92, 93], NGramIndex()) is None
    own = NGramIndex()
    own.update([90, 91, 92, 93, 5, 6, 90, 91, 92, 93])
    assert lookup.find([90, 91, 92, 93, 5, 6, 90, 91, 92, 93], own) == LookupProposal(4, [5, 6, 90])
    for start in range(3):
        lookup.add_output([start] * INDEX_TOKENS)
    assert lookup.find([1, 90, 91, 92, 93], NGramIndex()) is None


def test_outputs_of_other_salts_are_not_looked_up() -> None:
    target, tokens = tiny_llama(0), tuple(random.Random(1).randrange(4, VOCABULARY) for _ in range(12))
    decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=4)
    prompt = Prompt(tokens, Sampling(temperature=1.0, seed=5, max_tokens=20), cache_salt="a")
    row = Request("a", prompt, frozenset(), None)
    decoder.admit(row)
    while decoder.rows:
        decoder.round()
    assert decoder.lookup is not None
    for salt in ("", "b", "a"):
        other = Prompt((*tokens, *row.output[:5]), Sampling(), cache_salt=salt)
        (found,) = decoder.lookup.propose([Request("b", other, frozenset(), None)], possible=True)
        assert (found is not None) is (salt == "a"), salt


def test_outputs_that_are_forgotten_are_found_no_more() -> None:
    lookup = Lookup(3)
    for start in (80, 90):
        lookup.add_output([start, *range(INDEX_TOKENS)])  # which makes it the older index
    lookup.add_output([70, 71, 72, 73, 74])
    asked = ([80, 0, 1, 2], [90, 0, 1, 2], [70, 71, 72, 73])
    assert [lookup.find(each, NGramIndex()) is not None for each in asked] == [False, True, True]
    lookup.forget()
    assert [lookup.find(each, NGramIndex()) for each in asked] == [None] * 3
    lookup.add_output([70, 71, 72, 73, 74])
    assert lookup.find(asked[2], NGramIndex()) == LookupProposal(4, [74])


def test_outputs_that_may_not_be_stored_are_not_shared() -> None:
    target = tiny_llama(0)
    prompt = tuple(random.Random(1).randrange(4, VOCABULARY) for _ in range(12))
    for store in (True, False):
        decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=4)
        row = Request(
            "a", Prompt(prompt, Sampling(temperature=1.0, seed=5, max_tokens=20), store=store), frozenset(), None
        )
        decoder.admit(row)
        while decoder.rows:
            decoder.round()
        assert decoder.lookup is not None
        assert len({tuple(row.output[i : i + 2]) for i in range(4)}) == 4
        assert (decoder.lookup.find(row.output[:5], NGramIndex()) is not None) is store


def test_what_ended_behind_a_launched_round_is_forgotten_too() -> None:
    """Its row leaves the batch with that round, and would then be stored."""
    target, costs = tiny_llama(0), Costs({(1, 1): 1.0, (1, 5): 9.0}, {1: 1.0}, {1: 0.0}, 0.0, 0.0)
    texts = [tuple(random.Random(seed).randrange(4, VOCABULARY) for _ in range(2 * BLOCK)) for seed in (1, 2)]
    output = decode(target, None, [Prompt(texts[0], Sampling(max_tokens=60))], k=0, vocabulary=VOCABULARY)[0].output
    end = next(token for i, token in enumerate(output) if i > 6 and token not in output[:i])
    for forgotten in (False, True):
        with using(METAL):
            prefix = PrefixCache(2**24)
            decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=4, prefix=prefix)
            decoder.planner = Planner(0, 4, costs)
            ends, goes_on = [
                Request(str(i), Prompt(text, Sampling(max_tokens=60)), eos, None)
                for i, (text, eos) in enumerate(zip(texts, (frozenset({end}), frozenset[int]()), strict=True))
            ]
            decoder.admit(ends, goes_on)
            while ends.finish is None:
                decoder.round()
            assert ends in decoder.rows, "a round is under way in which it has no part"
            if forgotten:
                decoder.forget()
            decoder.round()
            assert decoder.rows == [goes_on] and decoder.lookup is not None
            found = decoder.lookup.find(ends.output[:4], NGramIndex()) is not None
            cached = prefix.cached_length(Owner.TARGET, ends.tokens) > 0
            assert found is cached is not forgotten


def test_nothing_is_indexed_where_no_proposal_fits() -> None:
    with using(replace(METAL, most_tokens=7)):
        decoder = Decoder(tiny_llama(0), None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=4)
        decoder.planner = Planner(0, 4, Costs({(1, 1): 1.0, (1, 5): 1.0}, {1: 1.0}, {1: 0.0}, 0.0, 0.0))
        prompt = tuple(random.Random(2).randrange(4, VOCABULARY) for _ in range(40))
        rows = [
            Request(str(i), Prompt(prompt, Sampling(max_tokens=8 + 16 * (i > 1))), frozenset(), None) for i in range(4)
        ]
        decoder.admit(*rows)
        for _ in range(5):
            decoder.round()
        assert [row.ngrams.indexed for row in rows] == [0] * 4
        while decoder.unfinished:
            decoder.round()
    assert [row.ngrams.indexed > 40 for row in rows] == [False, False, True, True]


def test_texts_of_all_rows_are_indexed_in_steps() -> None:
    rng, lookup = random.Random(3), Lookup(4)
    texts = [[rng.randrange(4, VOCABULARY) for _ in range(AT_ONCE * 3 // 4)] for _ in range(3)]
    rows = [Request(str(i), Prompt(tuple(text), Sampling()), frozenset(), None) for i, text in enumerate(texts)]
    done = [0]
    while done[-1] < 3 * len(texts[0]):
        lookup.propose(rows, possible=True)
        done.append(sum(row.ngrams.indexed for row in rows))
    assert [after - before for before, after in pairwise(done)] == [AT_ONCE, AT_ONCE, AT_ONCE // 4]
    assert lookup.propose(rows, possible=True) == [find(text, max_tokens=4) for text in texts]


@pytest.mark.parametrize("drafted", [0, 3])
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.usefixtures("exact_costs")
def test_with_look_ups_the_tokens_are_the_targets_own(drafted: int, seeded: bool) -> None:
    target, rng = tiny_llama(0), random.Random(3)
    asked = []
    for i in range(10):
        phrase = [rng.randrange(4, VOCABULARY) for _ in range(rng.randint(2, 9))]
        sampling = Sampling(temperature=0.3, seed=i, max_tokens=48) if seeded else Sampling(max_tokens=48)
        asked.append(Prompt(tuple(phrase * rng.randint(1, 5)), sampling))
    rows = decode(
        target, noisy_copy(target, 1, 0.2) if drafted else None, asked, k=drafted, vocabulary=VOCABULARY, adaptive=True,
        lookup=6, eos=frozenset({3}), collect=True,
    )  # fmt: skip
    found = [round for row in rows for round in row.rounds if round.source is Source.LOOKUP]
    assert sum(round.accepted for round in found) > 10 and any(round.accepted < round.drafted for round in found)
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling, frozenset({3}))
        # A rejected look-up is no failure case of the draft.
        drafts = {
            round.start + round.accepted for round in row.rounds if round.source is Source.DRAFT and round.drafted
        }
        assert {case.position for case in row.cases} <= drafts
        assert {round.adapter for round in row.rounds} == {0}


class RaisingDraft(nn.Module):
    """A draft that raises."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        raise RuntimeError("broken draft")

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)


@pytest.mark.usefixtures("exact_costs")
def test_look_ups_continue_after_a_parked_draft_failed() -> None:
    target = tiny_llama(0)
    decoder = Decoder(target, bare(RaisingDraft(target)), vocabulary=VOCABULARY, k=3, adaptive=True, lookup=4)
    # A draft step that costs as much as a target call never pays.
    decoder.planner = Planner(3, 4, Costs({(1, 1): 1.0, (1, 5): 1.0}, {1: 1.0}, {1: 0.0}, 0.0, 0.0))
    row = Request("a", Prompt((5, 6, 7) * 4, Sampling(max_tokens=800)), frozenset(), None)
    decoder.admit(row)
    while decoder.rows:
        decoder.round()
    assert decoder.draft_failures == 1
    late = row.rounds[2 * PROBE :]
    assert len(late) > 2 * PROBE and sum(round.drafted > 0 for round in late) > 0.8 * len(late)
    assert {round.source for round in late if round.drafted} == {Source.LOOKUP}
    assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@pytest.mark.usefixtures("exact_costs")
@pytest.mark.parametrize("draws", [1000, pytest.param(4000, marks=pytest.mark.nightly)])
def test_unseeded_sampling_with_look_ups_keeps_the_targets_distribution(draws: int) -> None:
    """A look-up proposes one token with q = 1: it is accepted with p(x), else the residual is sampled. In a text that repeats
    itself both happen often."""
    target = tiny_llama(4)
    sampling = Sampling(temperature=0.6, top_k=6, max_tokens=2)

    def distribution(tokens: list[int]) -> list[float]:
        return as_floats(mx.exp(filtered_logprobs(target(mx.array([tokens]))[0, -1:], sampling)[0]))

    phrases = ([a, b, c, a, b, c, a, b] for a in range(4, 30) for b in range(30, 40) for c in range(40, 50))
    text = next(phrase for phrase in phrases if 0.2 < distribution(phrase)[phrase[2]] < 0.8)
    prompt = Prompt(tuple(text), sampling)
    decoder = Decoder(target, None, vocabulary=VOCABULARY, k=0, adaptive=True, lookup=3, key=mx.random.key(7))
    # Costs at which look-up is always chosen.
    decoder.planner = Planner(0, 3, Costs({(1, 1): 1.0, (1, 4): 1.0}, {1: 0.0}, {1: 0.0}, 0.0, 0.0))
    counts: Counter[int] = Counter()
    accepted = looked_up = 0
    for start in range(0, draws, 50):
        rows = [Request(str(start + i), prompt, frozenset(), None) for i in range(50)]
        admit(decoder, rows, room=len(rows))
        decoder.round()
        for row in rows:
            counts[row.output[0]] += 1
            accepted += row.rounds[0].accepted > 0
            looked_up += row.rounds[0].source is Source.LOOKUP
        decoder.leave(list(decoder.rows))
    p = distribution(text)
    likely = [i for i in range(VOCABULARY) if p[i] > 0]
    assert set(counts) <= set(likely)
    expected = [draws * p[i] / sum(p[j] for j in likely) for i in likely]
    assert chisquare([counts[i] for i in likely], expected).pvalue > 1e-4
    assert 0 < accepted < looked_up and looked_up > 0.6 * draws


def test_two_proposals_are_merged_row_by_row() -> None:
    one = lookup_proposal([[1, 2], [3]], 2, VOCABULARY, unseeded=True)
    other = lookup_proposal([[4, 5], [6, 7]], 2, VOCABULARY, unseeded=True)
    both = merge(one, other, [False, True])
    assert both.tokens.tolist() == [[1, 2], [6, 7]] and both.usable.all().item() and both.logq is not None
    assert mx.argmax(both.logq, axis=-1).tolist() == [[1, 2], [6, 7]]
    assert one.usable.tolist() == [[True, True], [True, False]]
    assert lookup_proposal([[1]], 1, VOCABULARY, unseeded=False).logq is None


def test_look_ups_that_were_not_worth_a_wait_are_not_waited_for_again_at_once() -> None:
    lookup, found = Lookup(4), [LookupProposal(LENGTHS[0], [1, 2]), None]
    assert lookup.waits(found, 2) and not lookup.waits(found, 3)
    lookup.waited(used=True)
    assert lookup.waits(found, 2)
    for measures, rounds in ((False, REST), (True, MEASURED)):
        lookup.waited(used=False, measures=measures)
        for _ in range(rounds):
            assert not lookup.waits(found, 2)
            lookup.propose([], possible=True)
        assert lookup.waits(found, 2)


def test_a_long_text_is_indexed_in_steps() -> None:
    text, index, lookup = [*range(3 * AT_ONCE), 5, 6, 7, 8], NGramIndex(), Lookup(2)
    for number in range(1, 4):
        index.update(text)
        assert index.indexed == number * AT_ONCE
    index.update(text)
    found = lookup.find(text, index)
    assert found is not None and found.tokens == [9, 10] and index.indexed == len(text)
