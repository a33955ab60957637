"""The prefix cache's files: what a next start reads is what was written, and whatever is wrong with it costs time alone."""

import base64
import json
import random
import time
from collections.abc import Callable, Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.llama import Model

from service.core import ModelError, Prompt, Sampling
from service.engine.adapters import Draft, bare
from service.engine.decoder import Decoder
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.kv.prefix_files import LEAST, PROBE, PrefixFiles, Speed
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, Strategy, using
from tests.support.batches import serve
from tests.support.cuda import IN_PAGES, NEEDS_CUDA
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.oracle import forced, noisy_copy, tiny_llama
from tests.support.pages import pages_of
from tests.support.scraped import scraped
from tests.support.tiny_server import generate, in_process_server, write_pair

VOCABULARY, CHUNK, K, MIB = 97, 512, 3, 2**20
FILE_BLOCKS = 20
EOS = frozenset({3})
WHO = "target", "draft"
BOTH = pytest.mark.parametrize("way", [CPU, IN_PAGES], indirect=True, ids=["rectangles", "pages"])


@pytest.fixture(params=[CPU], ids=[""], autouse=True)
def way(request: pytest.FixtureRequest) -> Generator[Strategy]:
    with using(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.kv.prefix.FILE_BLOCKS", FILE_BLOCKS)


@cache
def target() -> Model:
    return tiny_llama(0)


@cache
def draft() -> Draft:
    return bare(noisy_copy(target(), 1, 0.2))


def start(
    folder: Path, *, cap: int = 64 * MIB, who: tuple[str, str] = WHO, budget: int = 64 * MIB, drafts: bool = False
) -> Decoder:
    """A decoder that has just been started, of which it is not known how fast it prefills: it reads what there is."""
    decoder = Decoder(
        target(),
        draft() if drafts else None,
        vocabulary=VOCABULARY,
        k=K,
        prefill_chunk=CHUNK,
        prefix=PrefixCache(budget),
    )
    decoder.prefixes.keep(folder, cap, *who)
    assert decoder.pace.speed.value is not None
    decoder.pace.speed = Speed()
    return decoder


def prefix_of(decoder: Decoder) -> PrefixCache:
    assert decoder.batch.prefix is not None
    return decoder.batch.prefix


def files_of(decoder: Decoder) -> PrefixFiles:
    files = prefix_of(decoder).files
    assert files is not None
    return files


def text(number: int, count: int) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(4, VOCABULARY) for _ in range(count))


def ask(decoder: Decoder, tokens: Sequence[int], *, store: bool = True, **sampling: Any) -> Request:
    """A request's row, whose output is the target's own."""
    (row,) = serve(decoder, [Prompt(tuple(tokens), Sampling(max_tokens=4, **sampling), store=store)], eos=EOS)
    assert row.output == forced(target(), row.prompt.tokens, row.output, row.prompt.sampling, EOS)
    return row


def save(decoder: Decoder) -> None:
    while decoder.prefixes.save():
        pass


def written(folder: Path, *texts: Sequence[int], **how: Any) -> list[Path]:
    """The files that a start leaves which was asked these texts."""
    decoder = start(folder, **how)
    for each in texts:
        ask(decoder, each)
    save(decoder)
    return sorted(folder.glob("prefix-*"))


def held(decoder: Decoder, tokens: Sequence[int]) -> list[mx.array]:
    """The keys and values that the prefix cache has of a text."""
    row = decoder.batch.target.cache(1)
    prefix_of(decoder).load(Owner.TARGET, [tokens], row)
    return [array for both in row.contents(0) for array in both if array is not None]


def assert_sound(decoder: Decoder, tokens: Sequence[int]) -> None:
    """What the prefix cache has of a text is what a prefill makes. Output alone hardly shows it."""
    cached, fresh = held(decoder, tokens), decoder.batch.target.cache(1)
    count = cached[0].shape[1]
    decoder.batch.target(mx.array([tokens[:count]]), fresh)
    fresh.commit(count)
    for mine, theirs in zip(cached, (each for both in fresh.contents(0) for each in both), strict=True):
        assert theirs is not None and mx.allclose(mine, theirs, atol=1e-4)


def whole(count: int) -> int:
    return count // BLOCK * BLOCK


# --------------------------------------------------------------------------------------------------------- round trips


def test_what_was_written_with_another_salt_is_not_found(tmp_path: Path) -> None:
    tokens = text(1, BLOCK * FILE_BLOCKS + 5)
    first = start(tmp_path)
    (row,) = serve(first, [Prompt(tokens, Sampling(max_tokens=4), cache_salt="a")], eos=EOS)
    save(first)
    assert len(list(tmp_path.glob("prefix-*"))) == 1
    for salt, count in (("", 0), ("b", 0), ("a", whole(len(tokens)))):
        (row,) = serve(start(tmp_path), [Prompt(tokens, Sampling(max_tokens=4), cache_salt=salt)], eos=EOS)
        assert row.cached_tokens == count, salt


@BOTH
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "seeded"])
def test_a_next_start_goes_on_behind_what_was_written(tmp_path: Path, sampling: dict[str, Any]) -> None:
    tokens = text(1, BLOCK * (FILE_BLOCKS + 6) + 5)
    assert len(written(tmp_path, tokens, drafts=True)) == 2
    decoder = start(tmp_path, drafts=True)
    row = ask(decoder, tokens, **sampling)
    assert row.cached_tokens == decoder.prefixes.tokens_read == whole(len(tokens))
    # The draft's are not kept: it reads the prompt by itself.
    assert any(round_.drafted for round_ in row.rounds)
    assert all((node.owner is Owner.TARGET) or node.file is None for node in prefix_of(decoder).nodes)
    assert_sound(decoder, tokens)
    again = ask(decoder, tokens)
    assert again.cached_tokens == whole(len(tokens)) == decoder.prefixes.tokens_read


def test_a_file_is_read_between_two_rounds(tmp_path: Path) -> None:
    tokens = text(1, BLOCK * (2 * FILE_BLOCKS + 6) + 5)
    written(tmp_path, tokens)
    decoder, read = start(tmp_path), list[int]()
    running, row = (Request("", Prompt(each, Sampling(max_tokens=40)), EOS, None) for each in (text(2, 20), tokens))
    decoder.admit(running)
    prefill = decoder.start_prefill(row)
    while not decoder.prefill(decoder.batch_prompts([prefill], CHUNK)):
        read.append(decoder.prefixes.tokens_read)
        decoder.round()
    assert read == [FILE_BLOCKS * BLOCK, 2 * FILE_BLOCKS * BLOCK, (2 * FILE_BLOCKS + 6) * BLOCK]
    decoder.join([prefill])
    while decoder.rows:
        decoder.round()
    assert row.cached_tokens == whole(len(tokens))
    for each in (running, row):
        assert each.output == forced(target(), each.prompt.tokens, each.output, each.prompt.sampling, EOS)


@pytest.mark.parametrize(
    "ways",
    [
        (CPU, CPU),
        (IN_PAGES, IN_PAGES),
        (CPU, IN_PAGES),
        (IN_PAGES, CPU),
        pytest.param((CUDA, CUDA), marks=NEEDS_CUDA),
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_keys_and_values_are_the_same_to_the_bit(
    tmp_path: Path, ways: tuple[Strategy, Strategy], dtype: mx.Dtype
) -> None:
    model, tokens, found = tiny_llama(2), text(2, 600), list[list[mx.array]]()
    model.set_dtype(dtype)
    for strategy in ways:
        with using(strategy):
            decoder = Decoder(model, None, vocabulary=VOCABULARY, k=0, prefix=PrefixCache(64 * MIB))
            decoder.prefixes.keep(tmp_path, 64 * MIB, *WHO)
            serve(decoder, [Prompt(tokens, Sampling(max_tokens=1))])
            assert decoder.prefixes.tokens_read == (whole(599) if found else 0)
            found.append(held(decoder, tokens))
            save(decoder)
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype == dtype and mx.array_equal(one, other)


@BOTH
def test_texts_that_part_share_their_files(tmp_path: Path) -> None:
    common = text(1, 20 * BLOCK)
    one, other, third = (*common, *text(2, 300)), (*common, *text(3, 300)), (*common[: 18 * BLOCK], *text(4, 200))
    files = written(tmp_path, one, other)
    sizes = sorted(path.stat().st_size // files_of(start(tmp_path)).block_bytes for path in files)
    assert sizes == [9, 9, 20]
    decoder = start(tmp_path)
    assert [ask(decoder, each).cached_tokens for each in (other, one)] == [whole(939)] * 2
    assert ask(start(tmp_path), third).cached_tokens == 18 * BLOCK
    # What is in memory is not read.
    decoder = start(tmp_path)
    ask(decoder, one[: 5 * BLOCK + 1])
    assert ask(decoder, one).cached_tokens == whole(939)
    assert decoder.prefixes.tokens_read == whole(939) - 5 * BLOCK
    assert_sound(decoder, one)


def test_features_are_kept_with_the_draft_that_made_them(tmp_path: Path) -> None:
    model, tokens = plain_llama(1), text(1, 600)
    head = tiny_head(model, 2)

    def cached(name: str) -> int:
        decoder = Decoder(
            model, bare(head), vocabulary=VOCABULARY, k=K, prefill_chunk=CHUNK, prefix=PrefixCache(64 * MIB)
        )
        decoder.prefixes.keep(tmp_path, 64 * MIB, "target", name)
        (row,) = serve(decoder, [Prompt(tokens, Sampling(max_tokens=8))])
        assert row.output == forced(model, tokens, row.output, row.prompt.sampling, frozenset())
        save(decoder)
        return row.cached_tokens

    assert [cached("one"), cached("one"), cached("other")] == [0, whole(599), 0]


def test_as_much_is_read_as_the_budget_allows(tmp_path: Path) -> None:
    tokens = text(1, 700)
    written(tmp_path, tokens)
    block_bytes = files_of(start(tmp_path)).block_bytes
    decoder = start(tmp_path, budget=10 * block_bytes)
    assert ask(decoder, tokens).cached_tokens == 10 * BLOCK
    assert prefix_of(decoder).nbytes <= 10 * block_bytes


@pytest.mark.parametrize("way", [IN_PAGES], indirect=True, ids=["pages"])
def test_pages_that_reading_takes_out_of_the_text_itself_leave_a_sound_tree(tmp_path: Path) -> None:
    tokens = text(1, 700)
    written(tmp_path, tokens)
    decoder = start(tmp_path)
    ask(decoder, tokens[: 10 * BLOCK + 1])
    prefix, cache = prefix_of(decoder), decoder.batch.target.cache(1)
    piece = files_of(decoder).find(tokens, 10)[0]
    pool = pages_of(cache).pool
    pool.set_size(pool.pages - 1)
    taken = pool.take(len(pool.free) - 3)
    assert not prefix.read(tokens, piece, cache)
    assert prefix.cached_length(Owner.TARGET, tokens) < 10 * BLOCK
    del taken
    assert ask(decoder, tokens).cached_tokens == whole(699)


# -------------------------------------------------------------------------------------------------- what is not used


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5000] ^= 1
    path.write_bytes(content)


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def other_tokens(path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    tokens = bytearray(base64.b64decode(json.loads(content[8 : 8 + length])["__metadata__"]["tokens"]))
    old = base64.b64encode(tokens)
    tokens[0] += 1
    path.write_bytes(content.replace(old, base64.b64encode(tokens)))


@pytest.mark.parametrize(
    ("damage", "started"),
    [
        (cut, False),
        (cut, True),
        (flip, False),
        (flip, True),
        (garbage, False),
        (garbage, True),
        (other_tokens, False),
    ],
)
def test_a_damaged_file_is_logged_and_removed_and_not_used(
    tmp_path: Path, damage: Callable[[Path], None], started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = text(1, 600)
    (path,) = written(tmp_path, tokens)
    decoder = start(tmp_path) if started else None
    damage(path)
    if decoder is None:
        decoder = start(tmp_path)
        assert path.exists() == (damage is flip)
    changed = (tokens[0] + 1, *tokens[1:])
    assert ask(decoder, changed if damage is other_tokens else tokens).cached_tokens == 0
    assert not path.exists() and f"removing damaged file {path}" in caplog.text
    assert decoder.prefixes.disk_bytes == 0


def test_a_file_that_somebody_removed_is_not_missed(tmp_path: Path) -> None:
    (path,) = written(tmp_path, text(1, 600))
    decoder = start(tmp_path)
    path.unlink()
    assert ask(decoder, text(1, 600)).cached_tokens == 0


def test_files_of_another_target_are_left_and_age(tmp_path: Path) -> None:
    (path,) = written(tmp_path, text(1, 600))
    size = path.stat().st_size
    decoder = start(tmp_path, who=("another", "draft"), cap=size * 3 // 2)
    assert ask(decoder, text(1, 600)).cached_tokens == 0
    assert path.exists() and decoder.prefixes.disk_bytes == size
    save(decoder)
    (mine,) = tmp_path.glob("prefix-*")
    assert mine != path and decoder.prefixes.disk_bytes == mine.stat().st_size <= size * 3 // 2


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    first, second, third = (text(number, 600) for number in (1, 2, 3))
    files = written(tmp_path, first, second)
    cap = sum(path.stat().st_size for path in files) + 20_000
    decoder = start(tmp_path, cap=cap)
    ask(decoder, first)
    # From memory: a use of its file all the same.
    ask(decoder, first)
    written(tmp_path, third, cap=cap)
    assert decoder.prefixes.disk_bytes <= cap
    assert [ask(start(tmp_path), each).cached_tokens for each in (first, second, third)] == [whole(599), 0, whole(599)]
    start(tmp_path, cap=cap // 2 + 20_000)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_text_does_not_push_out_its_own_beginning(tmp_path: Path) -> None:
    size = written(tmp_path / "all", text(1, BLOCK * FILE_BLOCKS + 1))[0].stat().st_size
    tokens = text(1, 3 * BLOCK * FILE_BLOCKS)
    assert len(written(tmp_path / "capped", tokens, cap=2 * size + 40_000)) == 2
    assert ask(start(tmp_path / "capped"), tokens).cached_tokens == 2 * BLOCK * FILE_BLOCKS


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "prefixes"
    (path,) = written(folder, text(1, 600))
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert [each.name for each in folder.iterdir()] == [path.name]
    left = folder / ".prefix-0.part.safetensors"
    left.write_bytes(b"cut off")
    other = folder / "notes.txt"
    other.write_text("not ours")
    folder.chmod(0o755)
    start(folder, cap=1)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert not left.exists() and not path.exists() and other.exists()


# ------------------------------------------------------------------------------------------------ what is not written


def test_requests_that_may_not_be_stored_leave_no_file(tmp_path: Path) -> None:
    decoder = start(tmp_path)
    ask(decoder, text(1, 600), store=False)
    save(decoder)
    assert not list(tmp_path.iterdir())
    ask(decoder, text(2, 600))
    ask(decoder, (*text(2, 600), *text(3, 600)), store=False)
    save(decoder)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size < 20 * files_of(decoder).block_bytes
    # They may begin with what others have left.
    assert ask(start(tmp_path), text(2, 600), store=False).cached_tokens == whole(599)


def test_short_texts_are_not_written_and_those_that_grow_in_large_pieces(tmp_path: Path) -> None:
    decoder = start(tmp_path)
    ask(decoder, text(1, LEAST - BLOCK))
    save(decoder)
    ask(decoder, text(2, 1000))
    assert not decoder.prefixes.save(1024) and not list(tmp_path.iterdir())
    ask(decoder, text(2, 1000) + text(3, 100))
    assert decoder.prefixes.save(1024) and not decoder.prefixes.save(1024)
    ask(decoder, text(2, 1000) + text(3, 300))
    assert not decoder.prefixes.save(1024) and decoder.prefixes.save()
    assert len(list(tmp_path.iterdir())) == 2
    assert ask(start(tmp_path), text(2, 1000) + text(3, 300)).cached_tokens == whole(1299)


def test_what_files_have_is_not_written_again(tmp_path: Path) -> None:
    tokens = text(1, 700)
    files = written(tmp_path, tokens)
    before = [path.stat().st_ino for path in files]
    decoder = start(tmp_path)
    files_of(decoder).speed.observe(1.0, 1e6)
    decoder.pace.speed.observe(1e6, 1.0)
    assert ask(decoder, (*tokens, *text(2, 300))).cached_tokens == 0
    save(decoder)
    assert set(before) < {path.stat().st_ino for path in tmp_path.iterdir()}
    assert decoder.prefixes.disk_bytes < 33 * files_of(decoder).block_bytes
    assert ask(start(tmp_path), (*tokens, *text(2, 300))).cached_tokens == whole(999)


def test_blocks_that_were_evicted_are_not_written(tmp_path: Path) -> None:
    block_bytes = files_of(start(tmp_path)).block_bytes
    decoder = start(tmp_path, budget=52 * block_bytes)
    ask(decoder, text(1, 600))
    ask(decoder, text(2, 600))
    ask(decoder, text(3, 600))
    save(decoder)
    cached = [ask(start(tmp_path), text(number, 600)).cached_tokens for number in (1, 2, 3)]
    assert cached == [LEAST, whole(599), whole(599)]


@BOTH
def test_what_is_forgotten_is_gone_from_memory_and_disk(tmp_path: Path) -> None:
    one, other = text(1, 700), text(2, 600)
    written(tmp_path, one, who=("another target", ""))
    decoder = start(tmp_path, drafts=True)
    for each in (one, other):
        ask(decoder, each)
    save(decoder)
    ask(decoder, (*other, *text(3, 100)))
    (tmp_path / ".prefix-0.part.safetensors").write_bytes(b"of a process that was killed")
    (tmp_path / "notes.txt").write_text("somebody else's")
    assert all(prefix_of(decoder).cached_length(owner, each) for owner in Owner for each in (one, other))
    decoder.forget()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert prefix_of(decoder).nodes == ()
    assert (prefix_of(decoder).nbytes, decoder.prefixes.disk_bytes) == (0, 0)
    save(decoder)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"], "what was not written yet is forgotten too"
    assert [ask(decoder, each).cached_tokens for each in (one, other)] == [0, 0]
    save(decoder)
    assert ask(start(tmp_path), one).cached_tokens == whole(699), "what comes later is written again"


def test_files_that_are_no_longer_used_are_forgotten_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = start(tmp_path)
    ask(decoder, text(1, 600))
    save(decoder)
    ask(decoder, text(2, 600))

    def fail(*arguments: object) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(files_of(decoder), "write", fail)
        assert not decoder.prefixes.save()
    assert prefix_of(decoder).files is None
    assert len(list(tmp_path.iterdir())) == 1
    decoder.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_costs_the_files_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = start(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    ask(decoder, text(1, 600))
    save(decoder)
    assert "no space left" in caplog.text and not list(tmp_path.iterdir())
    assert ask(decoder, text(1, 600)).cached_tokens == whole(599)


# ------------------------------------------------------------------------------------------------------ what is faster


def test_long_texts_are_read_until_it_is_known_what_is_faster(tmp_path: Path) -> None:
    tokens = text(1, 900)
    written(tmp_path, tokens)
    assert ask(start(tmp_path), tokens[:LEAST]).cached_tokens == 0
    assert ask(start(tmp_path), tokens[: LEAST + 1]).cached_tokens == LEAST


def test_files_are_read_only_where_that_is_faster_than_prefilling(tmp_path: Path) -> None:
    tokens = text(1, 600)
    written(tmp_path, tokens)
    for faster in (0.5, 2.0):
        decoder = start(tmp_path)
        files, per_token = files_of(decoder), files_of(decoder).block_bytes / BLOCK
        files.speed.observe(1e6, 1.0)
        decoder.pace.speed.observe(faster * 1e6 / per_token, 1.0)
        assert ask(decoder, tokens).cached_tokens == (0 if faster > 1 else whole(599))
    files.speed, tried = Speed(1e6, 1.0), [files.pays(LEAST, 1e9) for _ in range(4 * PROBE)]
    assert sum(tried) == 4
    assert not any(files.pays(LEAST - 1, 1e9) for _ in range(4 * PROBE))


def test_no_more_than_a_file_is_read_to_learn_that_prefilling_is_faster(tmp_path: Path) -> None:
    """Of the next text nothing is; of one in PROBE again a file, for a disk that was slow need not stay so."""
    tokens = text(1, 2 * FILE_BLOCKS * BLOCK + 200)
    written(tmp_path, tokens)
    decoder = start(tmp_path)
    decoder.pace.speed = Speed(1e12, 1.0)
    assert ask(decoder, tokens, store=False).cached_tokens == FILE_BLOCKS * BLOCK
    assert [bool(prefix_of(decoder).find(tokens, 1e12)) for _ in range(PROBE)] == [*[False] * 7, True]


def test_an_error_of_writing_costs_the_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = start(tmp_path)
    ask(decoder, text(1, 600))
    monkeypatch.setattr("service.engine.kv.prefix.copies", lambda blocks: 1 // 0)
    assert not decoder.prefixes.save() and prefix_of(decoder).files is None
    assert ask(decoder, text(1, 600)).cached_tokens == whole(599)


def test_files_that_were_removed_are_written_again(tmp_path: Path) -> None:
    decoder = start(tmp_path)
    ask(decoder, text(1, 600))
    save(decoder)
    for path in tmp_path.iterdir():
        path.unlink()
    assert files_of(decoder).read(files_of(decoder).find(text(1, 600), 0)[0], 0, 1) is None
    ask(decoder, (*text(1, 600), *text(2, 64)))
    save(decoder)
    assert list(tmp_path.iterdir())


def test_chunks_shorter_than_a_block_are_as_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.test_prefix_files.CHUNK", BLOCK // 2)
    written(tmp_path, text(1, 600))
    assert ask(start(tmp_path), text(1, 600)).cached_tokens == whole(599)


def test_the_speeds_are_those_of_real_reads_and_prefills(tmp_path: Path) -> None:
    written(tmp_path, text(2, 600))
    decoder = start(tmp_path)
    files, size = files_of(decoder), decoder.prefixes.disk_bytes
    assert files.speed.value is None
    started_at = time.perf_counter()
    ask(decoder, text(1, 600))
    assert decoder.pace.speed.value is not None
    assert decoder.pace.speed.value > 599 / (time.perf_counter() - started_at)
    save(decoder)
    # As fast as the first file was written, until something is read.
    assert files.speed.units == decoder.prefixes.disk_bytes - size
    decoder.pace.speed = Speed()
    started_at = time.perf_counter()
    assert ask(decoder, text(2, 600)).cached_tokens == whole(599)
    assert files.speed.units == whole(599) // BLOCK * files.block_bytes
    assert 0 < files.speed.seconds < time.perf_counter() - started_at


# -------------------------------------------------------------------------------------------------------------- server


def test_a_server_that_starts_again_answers_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is written while nothing runs, others at the end; read whatever is faster with a tiny model."""
    monkeypatch.setattr(PrefixFiles, "faster", lambda files, prefill: None)
    pair, folder = write_pair(tmp_path), tmp_path / "prefixes"
    long, short = (("".join(chr(97 + token % 26) for token in text(n, count))) for n, count in ((1, 1200), (2, 600)))
    engine = {"prefix_cache_dir": str(folder), "prefill_chunk": 256}
    server = in_process_server(tmp_path, pair, engine=engine)
    server.start()
    try:
        assert not list(folder.iterdir())
        answers = [generate(server, each) for each in (long, short)]
        end = time.monotonic() + 30
        while not list(folder.glob("prefix-*")):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert scraped(server.request("GET", "/metrics").text)["redraft:prefix_cache_disk_bytes"] > 0
    finally:
        server.stop()
    assert len(list(folder.iterdir())) == 3
    server = in_process_server(tmp_path, pair, engine=engine)
    server.start()
    try:
        again = [generate(server, each) for each in (long, short)]
        shown = scraped(server.request("GET", "/metrics").text)
    finally:
        server.stop()
    assert [each["tokens"] for each in again] == [each["tokens"] for each in answers]
    assert [each["timings"]["cache_n"] for each in answers] == [0, 0]
    cached = [each["timings"]["cache_n"] for each in again]
    assert cached == [whole(each["timings"]["prompt_n"] - 1) for each in answers]
    assert shown["redraft:prefix_cache_disk_hits_total"] == sum(cached)


def test_a_server_whose_folder_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    server = in_process_server(tmp_path, write_pair(tmp_path), engine={"prefix_cache_dir": str(tmp_path / "taken")})
    with pytest.raises(ModelError, match=r"engine\.prefix_cache_dir"):
        server.start()
    server.stop()
