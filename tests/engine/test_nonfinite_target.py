"""A target whose logits are not finite ends the request that met them, and leaves nothing behind for any other."""

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten

from service.core import FinishReason, NonFiniteLogits, Prompt, Provenance, Sampling
from service.engine.accept import finite_positions
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, using
from tests.support.cuda import IN_PAGES
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.families import IDENTICAL, RECURRENT, V, build, noisy_draft
from tests.support.hooked_draft import HookedDraft
from tests.support.oracle import naive, noisy_copy, tiny_llama
from tests.support.typed import leaves

VOCABULARY, K = 97, 3
BAD = 96
"""The token whose embedding is not finite, and that the target never chooses."""
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "top_k": 8}
WHO = Provenance("target", "tokenizer", "draft")


@pytest.fixture(params=[CPU, METAL, CUDA, IN_PAGES], ids=["CPU", "Metal", "CUDA", "pages"])
def way(request: pytest.FixtureRequest) -> Generator[None]:
    with using(request.param):
        yield


def spoilt(model: Any, value: float | None, token: int = BAD) -> Any:
    """The model with one embedding row of this value; BAD has the logit 0, which is never among the highest."""
    changed = [(n, a) for n, a in leaves(model.parameters()) if n.endswith("weight") and a.shape[0] == V]
    assert len(changed) == 2, "an embedding and an output head of its own"
    for name, table in changed:
        if "head" in name:
            table[BAD] = 0.0
        elif value is not None:
            table[token] = value
    model.update(tree_unflatten(changed))
    mx.eval(model.parameters())
    return model


def target_of(value: float = float("nan"), token: int = BAD) -> nn.Module:
    return spoilt(tiny_llama(0), value, token)


def text(number: int, length: int, *, bad: bool = False) -> tuple[int, ...]:
    rng = random.Random(number)
    tokens = [rng.randrange(4, BAD) for _ in range(length)]
    if bad:
        tokens[length // 2] = BAD
    return tuple(tokens)


def rows_of(*texts: tuple[int, ...], tokens: int = 12, **sampling: Any) -> list[Request]:
    return [
        Request(str(i), Prompt(each, Sampling(max_tokens=tokens, **sampling)), frozenset(), None)
        for i, each in enumerate(texts)
    ]


@dataclass
class Served:
    """What rounds reported. streamed: the tokens of each request, by its id."""

    failed: list[Request]
    streamed: dict[str, list[int]]


def serve(decoder: Decoder, rows: list[Request]) -> Served:
    decoder.admit(*rows)
    served = Served([], {row.id: [] for row in rows})
    while decoder.unfinished:
        report = decoder.round()
        served.failed += report.failed
        assert not {id(row) for row in report.failed} & {id(row) for row in report.rows}
        for row, delta in zip(report.rows, report.deltas, strict=True):
            served.streamed[row.id] += delta.tokens
    return served


def make(target: nn.Module, draft: Draft | None, prefix: PrefixCache | None = None, **more: Any) -> Decoder:
    settings: dict[str, Any] = {"vocabulary": VOCABULARY, "k": K, "prefill_chunk": 16, "collect": True}
    return Decoder(target, draft, prefix=prefix, key=mx.random.key(0), **(settings | more))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16, mx.float16], ids=["float32", "bfloat16", "float16"])
def test_any_value_that_is_not_finite_is_found(value: float, kind: mx.Dtype) -> None:
    """Wherever it stands among few or many logits; single masked ones are sound."""
    for width in (7, 97, 1000, 49152, 151936):
        for position in {0, 1, width // 2, width - 1}:
            logits = mx.random.normal((3, width)).astype(kind)
            logits[1, position] = value
            logits[0, position] = -float("inf")
            assert finite_positions(logits).tolist() == [True, False, True], (width, position)
    assert finite_positions(mx.full((1, 5), -float("inf"))).tolist() == [False]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "sampling",
    [{}, SEEDED, SEEDED | {"seed": None}],
    ids=["greedy", "seeded", "unseeded"],
)
@pytest.mark.parametrize("drafted", [True, False], ids=["drafted", "plain"])
@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.nightly)], ids=["nan", "inf"]
)
@pytest.mark.promise(5)
def test_the_request_fails_and_its_neighbours_do_not(value: float, drafted: bool, sampling: dict[str, Any]) -> None:
    target, prefix = target_of(value), PrefixCache(2**24)
    draft = bare(noisy_copy(tiny_llama(0), 1, 0.1)) if drafted else None
    decoder = make(target, draft, prefix, adaptive=False)
    for turn in range(2):
        rows = rows_of(text(turn, 40), text(9, 2 * BLOCK + 8, bad=True), text(turn + 2, 70), **sampling)
        served = serve(decoder, rows)
        assert served.failed == [rows[1]]
        assert isinstance(rows[1].error, NonFiniteLogits) and "output token 1" in str(rows[1].error)
        assert rows[1].output == [] == served.streamed["1"] and rows[1].generation(WHO) is None
        for row in (rows[0], rows[2]):
            assert row.finish is FinishReason.LENGTH and row.error is None and row.generation(WHO) is not None
            if not sampling or sampling["seed"] is not None:
                assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling)
        assert prefix.cached_length(Owner.TARGET, rows[1].tokens) == 0
        assert prefix.cached_length(Owner.DRAFT, rows[1].tokens) == 0
        assert prefix.cached_length(Owner.TARGET, rows[2].tokens) >= BLOCK, "others are cached"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("drafted", [True, False], ids=["drafted", "plain"])
def test_an_answer_fails_where_its_own_token_spoils_it(drafted: bool) -> None:
    """The tokens up to it were sound and have been sent."""
    prompt = text(1, 20)
    whole = spoilt(tiny_llama(0), None)
    sound = naive(whole, prompt, Sampling(max_tokens=24))
    at = next(i for i in range(6, 24) if sound[i] not in prompt and sound[i] not in sound[:i])
    target = target_of(token=sound[at])
    draft = bare(noisy_copy(tiny_llama(0), 1, 0.1)) if drafted else None
    rows = rows_of(prompt, text(2, 30), tokens=24)
    assert sound[at] not in (*rows[1].prompt.tokens, *naive(whole, rows[1].prompt.tokens, rows[1].prompt.sampling))
    served = serve(make(target, draft), rows)
    assert served.failed == [rows[0]] and rows[0].output == served.streamed["0"]
    # A round emits nothing where its last position fails, so the accepted tokens before that are not sent either.
    assert sound[: at + 1 - K] == served.streamed["0"][: at + 1 - K] and len(served.streamed["0"]) <= at + 1
    assert rows[0].generation(WHO) is None
    for row in rows[1:]:
        assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling)


def proposing(inner: nn.Module, token: int) -> Draft:
    """A draft that wants this token now and then."""

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        wanted = (tokens % 8 == 0)[..., None] & (mx.arange(logits.shape[-1]) == token)
        return mx.where(wanted, mx.array(60.0, dtype=logits.dtype), logits)

    return bare(HookedDraft(inner, spoil))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.promise(5)
def test_a_rejected_token_that_spoils_the_target_costs_speed_alone(sampling: dict[str, Any]) -> None:
    """Its keys and values stay behind the row's end, where attention gives them the weight zero."""
    target = target_of()
    decoder = make(target, proposing(noisy_copy(tiny_llama(0), 1, 0.1), BAD), PrefixCache(2**24))
    for turn in range(2):
        rows = rows_of(text(turn, 30), text(turn + 3, 50), text(turn + 6, 9), tokens=40, **sampling)
        served = serve(decoder, rows)
        assert not served.failed
        for row in rows:
            assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling)
        drafted = [each for row in rows for each in row.rounds if each.drafted]
        assert any(each.accepted < each.drafted for each in drafted) and any(each.accepted for each in drafted)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "nemotron_h", "mamba2", "gpt_oss"])
def test_families_with_windows_and_states(name: str) -> None:
    needs = (IDENTICAL | RECURRENT)[name]
    sound = build(name, needs)
    draft = noisy_draft(name, needs, sound)
    target = spoilt(sound, float("nan"))
    decoder = make(target, proposing(draft, BAD) if name in IDENTICAL else bare(draft))
    rows = rows_of(text(0, 30), text(1, 40, bad=True), text(2, 50), tokens=30)
    served = serve(decoder, rows)
    assert served.failed == [rows[1]]
    for row in (rows[0], rows[2]):
        assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling)


@pytest.mark.usefixtures("way")
def test_a_head_that_reads_the_targets_hidden_states() -> None:
    target = plain_llama(0)
    head = tiny_head(target, 2)
    spoilt(target, float("nan"))
    decoder = make(target, bare(head), PrefixCache(2**24))
    for turn in range(2):
        rows = rows_of(text(turn, 30), text(7, 60, bad=True), text(turn + 2, 50), tokens=30)
        served = serve(decoder, rows)
        assert served.failed == [rows[1]]
        for row in (rows[0], rows[2]):
            assert row.output == naive(target, row.prompt.tokens, row.prompt.sampling)


@pytest.mark.usefixtures("way")
def test_a_cached_prefix_keeps_what_is_sound_and_shared() -> None:
    """Blocks before the bad token stay while another text goes on from them; those behind it go, whoever cached them."""
    target, prefix = target_of(), PrefixCache(2**24)
    decoder = make(target, None, prefix)
    start = text(4, 2 * BLOCK)
    alone, shared = rows_of((*start, *text(5, BLOCK + 1))), rows_of((*start, *text(6, BLOCK + 1, bad=True)))
    serve(decoder, alone)
    assert serve(decoder, shared).failed == shared
    assert prefix.cached_length(Owner.TARGET, shared[0].tokens) == 2 * BLOCK
    assert prefix.cached_length(Owner.TARGET, alone[0].tokens) >= 3 * BLOCK
    # Cancelled requests leave their prompts, which nobody has found bad yet. Both begin with the same bad block.
    first = text(8, BLOCK, bad=True)
    cancelled = rows_of((*first, *text(9, BLOCK + 1)), (*first, *text(10, BLOCK + 1)))
    for row in cancelled:
        decoder.admit(row)
        row.finish = FinishReason.CANCELLED
        decoder.leave([row])
        assert prefix.cached_length(Owner.TARGET, row.tokens) == 2 * BLOCK
    again = rows_of((*cancelled[0].prompt.tokens, 5))
    assert serve(decoder, again).failed == again
    assert [prefix.cached_length(Owner.TARGET, row.tokens) for row in cancelled] == [0, 0]
