"""Outputs are the target's own with any draft, draft length and batch, and across swaps (float32)."""

import random
from collections.abc import Callable, Iterable
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, Strategy, using
from service.models.heads import cut
from tests.support.batches import decode, serve
from tests.support.heap import holders
from tests.support.oracle import forced, naive, noisy_copy, tiny_llama
from tests.support.typed import layers_of

VOCABULARY = 97
EOS = frozenset({3})


class AlwaysWrong(nn.Module):
    """A draft that proposes the token after the one the target would choose."""

    def __init__(self, target: nn.Module) -> None:
        super().__init__()
        self.inner = target

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        return mx.roll(self.inner(tokens, cache=cache), 1, -1)

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)

    def make_cache(self) -> list[object]:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.inner)


@cache
def target() -> Model:
    return tiny_llama(0)


def cut_to(model: nn.Module, ids: Iterable[int]) -> nn.Module:
    """The model with its head reduced to `ids`."""
    cut(model, list(ids))
    return model


@cache
def draft(kind: str) -> nn.Module:
    return {
        "same": lambda: target(),
        "random": lambda: tiny_llama(7),
        "wrong": lambda: AlwaysWrong(target()),
        "adapter-a": lambda: noisy_copy(target(), 1, 0.2),
        "adapter-b": lambda: noisy_copy(target(), 2, 0.4),
        "swapped": lambda: noisy_copy(target(), 1, 0.2),
        "cut": lambda: cut_to(noisy_copy(target(), 1, 0.1), range(0, VOCABULARY, 2)),
    }[kind]()


def prompts(rng: random.Random, greedy: bool, count: int) -> list[Prompt]:
    made: list[Prompt] = []
    for _ in range(count):
        length = rng.choice([1, 2, 3, rng.randint(4, 60), rng.randint(60, 512)])
        budget = rng.choice([1, 2, rng.randint(3, 40), 64])
        sampling = (
            Sampling(max_tokens=budget)
            if greedy
            else Sampling(
                temperature=rng.choice([0.3, 0.7, 1.0, 1.5]),
                top_p=rng.choice([1.0, 0.9, 0.5]),
                top_k=rng.choice([0, 1, 10]),
                min_p=rng.choice([0.0, 0.05]),
                seed=rng.randrange(2**62),
                max_tokens=budget,
            )
        )
        made.append(Prompt(tuple(rng.randrange(4, VOCABULARY) for _ in range(length)), sampling))
    return made


def swapper(rng: random.Random) -> object:
    versions = [Draft(i, draft(kind)) for i, kind in enumerate(("adapter-a", "adapter-b", "random"))]

    def between(decoder: Decoder) -> None:
        if rng.random() < 0.3:
            decoder.switch(rng.choice(versions))

    return between


def differences(
    kind: str,
    k: int,
    batch: int,
    seed: int,
    greedy: bool,
    count: int,
    *,
    stepwise: bool = False,
    strategy: Strategy = CPU,
) -> tuple[int, list[str]]:
    """Tokens emitted, and differences from the target's own. stepwise: the oracle decodes one token at a time."""
    rng = random.Random(seed)
    asked = prompts(rng, greedy, count)
    between = swapper(rng) if kind == "swapped" else lambda decoder: None
    with using(strategy):
        rows = decode(
            target(),
            draft(kind),
            asked,
            k=k,
            vocabulary=VOCABULARY,
            eos=EOS,
            max_rows=batch,
            seed=seed,
            collect=bool(seed % 2),
            between=between,  # pyright: ignore[reportArgumentType]
        )
    wrong: list[str] = []
    for row in rows:
        asked_for = (row.prompt.tokens, row.prompt.sampling, EOS)
        expected = (
            naive(target(), *asked_for) if stepwise else forced(target(), asked_for[0], row.output, *asked_for[1:])
        )
        if row.output != expected:
            wrong.append(f"{kind} k={k} batch={batch} seed={seed}: {row.output} is not {expected}")
    return sum(len(row.output) for row in rows), wrong


KINDS = ("same", "random", "wrong", "adapter-a", "adapter-b", "swapped", "cut")


ANY = given(
    kind=st.sampled_from(KINDS),
    k=st.integers(0, 8),
    batch=st.integers(1, 8),
    seed=st.integers(0, 10_000),
    greedy=st.booleans(),
    strategy=st.sampled_from([CPU, METAL, CUDA]),
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@ANY
@pytest.mark.promise(1)
def test_any_draft_any_batch(kind: str, k: int, batch: int, seed: int, greedy: bool, strategy: Strategy) -> None:
    _, wrong = differences(kind, k, batch, seed, greedy, count=3, strategy=strategy)
    assert not wrong


@pytest.mark.nightly
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@ANY
@pytest.mark.promise(1)
def test_any_draft_any_batch_at_length(
    kind: str, k: int, batch: int, seed: int, greedy: bool, strategy: Strategy
) -> None:
    _, wrong = differences(kind, k, batch, seed, greedy, count=8, strategy=strategy)
    assert not wrong


@pytest.mark.parametrize(
    ("count", "prompts_each", "stepwise"),
    [(300, 2, False), pytest.param(20_000, 8, True, marks=pytest.mark.nightly)],
    ids=["one pass", "20,000 stepwise"],
)
@pytest.mark.parametrize(
    ("strategy", "greedy"),
    [
        pytest.param(CPU, True, id="CPU-greedy", marks=pytest.mark.nightly),
        pytest.param(CPU, False, id="CPU-seeded", marks=pytest.mark.nightly),
        pytest.param(METAL, True, id="Metal-greedy", marks=pytest.mark.nightly),
        pytest.param(METAL, False, id="Metal-seeded", marks=pytest.mark.nightly),
        pytest.param(CUDA, True, id="CUDA-greedy", marks=pytest.mark.nightly),
        pytest.param(CUDA, False, id="CUDA-seeded"),
    ],
)
@pytest.mark.promise(1)
def test_thousands_of_tokens(
    count: int, prompts_each: int, stepwise: bool, greedy: bool, strategy: Strategy, figure: Callable[[str], None]
) -> None:
    """Every kind of draft in turn, with different draft lengths and batch sizes."""
    tokens, wrong, seed = 0, list[str](), 0
    while tokens < count or seed < len(KINDS):
        kind, k, batch = KINDS[seed % len(KINDS)], (seed * 5) % 9, 1 + (seed * 3) % 8
        case = (kind, k, batch, 50_000 + seed, greedy, prompts_each)
        emitted, differing = differences(*case, stepwise=stepwise, strategy=strategy)
        tokens, wrong, seed = tokens + emitted, wrong + differing, seed + 1
    figure(f"{tokens} tokens ({'greedy' if greedy else 'seeded'}), {len(wrong)} differ")
    assert not wrong


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_one_pass_finds_what_stepwise_decoding_finds(greedy: bool) -> None:
    """Both oracles agree on correct answers, on a wrong token anywhere, and on answers that are too short or too long."""
    rng = random.Random(5)
    for prompt in prompts(rng, greedy, 6):
        right = naive(target(), prompt.tokens, prompt.sampling, EOS)
        assert forced(target(), prompt.tokens, right, prompt.sampling, EOS) == right
        place = rng.randrange(len(right))
        changed = [*right[:place], (right[place] + 1) % VOCABULARY, *right[place + 1 :]]
        for wrong in (changed, right[:-1], [*right, 5]):
            assert forced(target(), prompt.tokens, wrong, prompt.sampling, EOS) != wrong


@pytest.mark.promise(1)
def test_the_check_itself_can_fail() -> None:
    """The same comparison catches a decoder that accepts proposals without verification."""
    asked = prompts(random.Random(3), True, 4)
    rows = decode(draft("random"), None, asked, k=0, vocabulary=VOCABULARY, eos=EOS)
    assert any(row.output != forced(target(), row.prompt.tokens, row.output, row.prompt.sampling, EOS) for row in rows)


class FailingDraft(nn.Module):
    """A draft that raises or returns NaN after a number of calls."""

    def __init__(self, inner: nn.Module, after: int, how: str) -> None:
        super().__init__()
        self.inner, self.after, self.how, self.calls = inner, after, how, 0

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        self.calls += 1
        logits = self.inner(tokens, cache=cache)
        if self.calls <= self.after:
            return logits
        if self.how == "raises":
            raise RuntimeError("broken draft")
        return logits * float("nan")

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)


@pytest.mark.parametrize(
    ("greedy", "after", "how"),
    [
        # The daily tests cover each moment with both kinds of failure, once greedy and once sampled.
        pytest.param(greedy, after, how, marks=() if (greedy + i + (how == "nan")) % 2 else pytest.mark.nightly)
        for greedy in (True, False)
        for i, after in enumerate([0, 1, 3, 7])
        for how in ("raises", "nan")
    ],
)
@pytest.mark.promise(5)
def test_a_broken_draft_costs_speed_only(how: str, after: int, greedy: bool) -> None:
    asked = prompts(random.Random(after), greedy, 6)
    counted: list[int] = []
    rows = decode(
        target(),
        FailingDraft(draft("adapter-a"), after, how),
        asked,
        k=3,
        vocabulary=VOCABULARY,
        eos=EOS,
        between=lambda decoder: counted.append(decoder.draft_failures),
    )
    for row in rows:
        assert row.output == forced(target(), row.prompt.tokens, row.output, row.prompt.sampling, EOS)
    # A draft that raises is not called again; non-finite logits disable it for one row at a time.
    assert counted[-1] == 1 if how == "raises" else counted[-1] >= 1


def test_a_new_draft_ends_the_degradation() -> None:
    broken = FailingDraft(draft("adapter-a"), 0, "raises")
    seen: list[bool] = []

    def between(decoder: Decoder) -> None:
        seen.append(decoder.batch.failed)
        if len(seen) == 10:
            decoder.switch(bare(draft("same")))

    prompt = Prompt(tuple(range(4, 30)), Sampling(max_tokens=64))
    (row,) = decode(target(), broken, [prompt], k=3, vocabulary=VOCABULARY, between=between)
    assert True in seen and seen[-1] is False
    assert row.output == forced(target(), prompt.tokens, row.output, prompt.sampling)
    assert sum(r.accepted for r in row.rounds[10:]) > 0


def test_a_cut_draft_serves_a_batch_from_its_first_round() -> None:
    decoder = Decoder(target(), bare(draft("cut")), vocabulary=VOCABULARY, k=3)
    asked = [Prompt(tuple(range(5 + i, 15 + 2 * i)), Sampling(max_tokens=12)) for i in range(3)]
    rows = [Request(str(i), prompt, EOS, None) for i, prompt in enumerate(asked)]
    for row in rows:
        decoder.admit(row)
    while decoder.rows:
        decoder.round()
    assert decoder.draft_failures == 0
    assert sum(round.accepted for row in rows for round in row.rounds) > 0


def test_a_decoder_without_rows_refers_to_nothing_of_its_last_ones() -> None:
    """By every strategy, with a draft of a reduced vocabulary, which follows the tokens of its rows."""
    strategies = (CPU, METAL, CUDA)

    def secret(number: int) -> tuple[int, ...]:
        return tuple(random.Random(77 + number).randrange(4, VOCABULARY) for _ in range(40))

    def stop(*numbers: int) -> str:
        return "-".join(("stop", *map(str, numbers), "9f2c"))

    def serve_it(number: int) -> Decoder:
        decoder = Decoder(target(), bare(draft("cut")), vocabulary=VOCABULARY, k=3, collect=True)
        sampling = [Sampling(max_tokens=limit, stop=(stop(number, row),)) for row, limit in enumerate((5, 20))]
        serve(decoder, [Prompt(secret(number), each) for each in sampling])
        return decoder

    decoders: list[Decoder] = []
    for number, strategy in enumerate(strategies):
        with using(strategy):
            decoders.append(serve_it(number))
    assert not any(decoder.unfinished for decoder in decoders)
    numbers = range(len(strategies))
    assert holders(lambda: ([list(secret(each)[8:16]) for each in numbers], [stop(each, 1) for each in numbers])) == []
