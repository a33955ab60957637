"""A failing draft costs only speed, wherever it fails, and each exception is logged once."""

import logging
import os
import random
import subprocess
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model

from service.core import Prompt, Sampling
from service.engine.adapters import Draft, bare
from service.engine.batch import RETRY
from service.engine.decoder import Decoder
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, PAGE, Strategy, using
from tests.support.automaton import Automaton, masked_alone
from tests.support.hooked_draft import HookedDraft
from tests.support.oracle import forced, noisy_copy, tiny_llama
from tests.support.typed import layers_of, load_arrays

VOCABULARY, K = 97, 3


@cache
def target() -> Model:
    return tiny_llama(0)


@cache
def good() -> nn.Module:
    return noisy_copy(target(), 1, 0.1)


def rows_of(count: int, tokens: int = 24, kind: str = "greedy") -> list[Request]:
    """Requests. kind: greedy, seeded, or grammar: greedy, the first one with a constraint."""
    made: list[Request] = []
    for i in range(count):
        rng = random.Random(i)
        seeded = Sampling(temperature=0.8, seed=i, max_tokens=tokens)
        sampling = seeded if kind == "seeded" else Sampling(max_tokens=tokens)
        constraint = Automaton(i, VOCABULARY) if kind == "grammar" and i == 0 else None
        tokens_of_row = tuple(rng.randrange(4, VOCABULARY) for _ in range(10 + 7 * i))
        prompt = Prompt(tokens_of_row, sampling, constraint=constraint)
        made.append(Request(str(i), prompt, frozenset(), None))
    return made


def decode(decoder: Decoder, rows: list[Request]) -> None:
    for row in rows:
        decoder.admit(row)
    while decoder.rows:
        decoder.round()
    for row in rows:
        tokens, sampling, constraint = row.prompt.tokens, row.prompt.sampling, row.prompt.constraint
        if isinstance(constraint, Automaton):
            assert row.output == masked_alone(target(), tokens, sampling, constraint)
        else:
            assert row.output == forced(target(), tokens, row.output, sampling)


def truncated(folder: Path, kind: str) -> mx.array:
    """(VOCABULARY,) zeros that MLX reads from a file when they are evaluated, from a truncated file. MLX raises one kind of
    error at launch, the other at the host sync."""
    path = folder / f"bias.{kind}"
    if kind == "npy":
        mx.save(str(path), mx.zeros((VOCABULARY,)))
        array = mx.load(str(path))
    else:
        mx.save_safetensors(str(path), {"bias": mx.zeros((VOCABULARY,))})
        array = load_arrays(path)["bias"]
    assert isinstance(array, mx.array)
    os.truncate(path, path.stat().st_size - 8)
    return array


@pytest.fixture(params=[CPU, METAL], ids=["CPU", "Metal"])
def either(request: pytest.FixtureRequest) -> Generator[None]:
    """Rounds that are read before the next is launched, and rounds that follow each other."""
    with using(request.param):
        yield


@pytest.mark.own_process
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("rows", ["greedy", "seeded", "grammar"])
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.usefixtures("either")
@pytest.mark.promise(5)
def test_an_error_raised_by_the_rounds_evaluation(
    tmp_path: Path, kind: str, rows: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += tokens.shape[1] <= 2
        return logits + truncated(tmp_path, kind) if calls == after + 1 and tokens.shape[1] <= 2 else logits

    with pytest.raises(RuntimeError, match="Unable to read"):
        mx.eval(mx.ones((VOCABULARY,)) + truncated(tmp_path, kind))
    decoder = Decoder(target(), bare(HookedDraft(good(), spoil)), vocabulary=VOCABULARY, k=K)
    with caplog.at_level(logging.ERROR):
        decode(decoder, rows_of(3, kind=rows))
    assert after < calls <= after + K and decoder.draft_failures == 1, "it was not asked again"
    assert [record.exc_info is not None for record in caplog.records] == [True]
    assert "Unable to read" in caplog.text and "adapter 0" in caplog.text
    # A new draft serves.
    decoder.switch(Draft(1, good()))
    again = rows_of(2)
    decode(decoder, again)
    assert sum(each.accepted for row in again for each in row.rounds) > 0


@pytest.mark.own_process
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
@pytest.mark.parametrize("rows", ["greedy", "seeded", "grammar"])
@pytest.mark.usefixtures("either")
@pytest.mark.promise(5)
def test_an_error_raised_during_verification(
    tmp_path: Path, kind: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the device is slower than Python, the proposal's error shows after the target's call was launched."""
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: None)
    calls = 0

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += tokens.shape[1] <= 2
        return logits + truncated(tmp_path, kind) if calls == 6 and tokens.shape[1] <= 2 else logits

    decoder = Decoder(target(), bare(HookedDraft(good(), spoil)), vocabulary=VOCABULARY, k=K)
    progress: list[None] = []
    decoder.runner.on_progress = lambda: progress.append(None)
    decode(decoder, rows_of(3, kind=rows))
    assert decoder.draft_failures == 1
    assert progress, "rows were prefilled again, and a watchdog has to know"


@pytest.mark.own_process
def test_memory_does_for_one_cache_where_all_are_prefilled_again(tmp_path: Path) -> None:
    calls = 0

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += tokens.shape[1] <= 2
        return logits + truncated(tmp_path, "npy") if calls == 6 and tokens.shape[1] <= 2 else logits

    rows = rows_of(6)
    with using(CUDA):
        decoder = Decoder(target(), bare(HookedDraft(good(), spoil)), vocabulary=VOCABULARY, k=K)
        pool = decoder.batch.target.pool
        pool.sized, pages = True, pool.pages
        elsewhere = pool.take(len(pool.free) - 16)
        decode(decoder, rows)
    assert decoder.draft_failures == 1 and sum(-(-len(row.tokens) // PAGE) for row in rows) == 13
    assert pool.pages == pages == 1 + 16 + len(elsewhere), "none more"


@pytest.mark.own_process
def test_an_error_of_the_target_is_the_caller_s(tmp_path: Path) -> None:
    failing = HookedDraft(good(), lambda tokens, logits: logits + truncated(tmp_path, "npy"))
    decoder = Decoder(failing, bare(good()), vocabulary=VOCABULARY, k=K)
    decoder.admit(rows_of(1)[0])
    with pytest.raises(RuntimeError, match="Unable to read"):
        decoder.round()


@pytest.mark.parametrize(
    "chosen",
    [
        "(greedy and npy and CPU) or (grammar and safetensors and Metal) or caller or memory",
        pytest.param("test", marks=pytest.mark.nightly),
    ],
    ids=["some", "all"],
)
def test_errors_of_evaluations(chosen: str) -> None:
    """Runs the tests above in a process of their own: in MLX 0.32.4 on a CPU a failed evaluation may leave a task count that
    never drops, and two of them can make later evaluations of the process hang."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "own_process", "-k", chosen]
    command.append(__file__)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout


def test_every_exception_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def broken(tokens: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("no such layer")

    decoder = Decoder(target(), bare(HookedDraft(good(), broken)), vocabulary=VOCABULARY, k=K)
    with caplog.at_level(logging.ERROR):
        decode(decoder, rows_of(3))
        assert len(caplog.records) == 1 and "no such layer" in caplog.text and "Traceback" in caplog.text
        decoder.switch(Draft(7, HookedDraft(good(), broken)))
        decode(decoder, rows_of(2))
    assert len(caplog.records) == 2 and "adapter 7" in caplog.records[1].getMessage()


# ------------------------------------------------------------------------------------------- logits that are not finite


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.promise(5)
def test_a_row_with_non_finite_draft_logits_continues_without_drafts(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The other rows are drafted for as before, and the row itself is drafted for again after a while."""
    rows, alone = rows_of(count, tokens=3 * RETRY), rows_of(count, tokens=3 * RETRY)
    decode(Decoder(target(), bare(good()), vocabulary=VOCABULARY, k=K), alone)
    steps = 0

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        """NaN for the first row in the second step of the third round."""
        nonlocal steps
        steps += tokens.shape == (count, 1) or tokens.shape == (count, 2)
        first = (mx.arange(tokens.shape[0]) == 0)[:, None, None]
        return mx.where(first, float("nan"), logits) if steps == 2 * K + 2 else logits

    decoder = Decoder(target(), bare(HookedDraft(good(), spoil)), vocabulary=VOCABULARY, k=K)
    with caplog.at_level(logging.WARNING):
        decode(decoder, rows)
    assert decoder.draft_failures == 1 and not decoder.batch.failed
    assert [record.getMessage() for record in caplog.records if "non-finite logits" in record.getMessage()] != []
    assert len(caplog.records) == 1
    for mine, same in zip(rows[1:], alone[1:], strict=True):
        assert mine.rounds == same.rounds, "nothing changed for the others"
    drafted = [each.drafted for each in rows[0].rounds]
    assert drafted[:3] == [K, K, 1], "what stood before counts"
    assert drafted[3 : 3 + RETRY] == [0] * RETRY
    assert drafted[3 + RETRY] == K and sum(each.accepted for each in rows[0].rounds[3 + RETRY :]) > 0


class NanDraft(nn.Module):
    """A draft that writes NaN into its own keys and values for a row that contains a given token, if enabled."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.inner, self.token, self.ill = noisy_copy(target(), 1, 0.1), token, True

    def __call__(self, tokens: mx.array, cache: list[object] | None = None) -> mx.array:
        sick = ((tokens == self.token) & self.ill)[..., None]
        embedded = mx.where(sick, float("nan"), self.inner.model.embed_tokens(tokens))
        return self.inner(tokens, cache=cache, input_embeddings=embedded)

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.inner)


@pytest.mark.parametrize("strategy", [CPU, METAL, CUDA], ids=["CPU", "Metal", "CUDA"])
def test_non_finite_keys_and_values_stay_in_no_row(strategy: Strategy) -> None:
    """A slot that held NaN is reused by other rows, and values past a row's end are multiplied by zero, so both must be
    cleaned; what is behind an end in pages is not read. Once the draft recovers, so does the row."""
    with using(strategy):
        check_that_rows_recover()


def check_that_rows_recover() -> None:
    asked = rows_of(4, tokens=40)
    token = asked[0].prompt.tokens[3]
    weak = NanDraft(token)
    decoder = Decoder(target(), bare(weak), vocabulary=VOCABULARY, k=K)
    for row in asked:
        decoder.admit(row)
    for _ in range(4):
        decoder.round()
    assert decoder.draft_failures >= 1 and not decoder.batch.failed and decoder.batch.drafter is not None
    cache = decoder.batch.drafter.cache
    if cache.pages is None:
        assert all(mx.isfinite(array).all().item() for array in cache.arrays())
    for index, row in enumerate(decoder.batch.rows):
        held = [] if row.padding else [each for both in cache.contents(index) for each in both if each is not None]
        assert all(mx.isfinite(array).all().item() for array in held)
    weak.ill = False
    while decoder.rows:
        decoder.round()
    for row in asked:
        assert row.output == forced(target(), row.prompt.tokens, row.output, row.prompt.sampling)
        clean = token not in row.prompt.tokens
        assert not clean or sum(each.accepted for each in row.rounds) > 0
    more = rows_of(4, tokens=20)
    decode(decoder, more)
    assert all(sum(each.accepted for each in row.rounds) > 0 for row in more)
