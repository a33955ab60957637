"""Layers with a sliding window hold its last positions alone, in rectangles and in pages, and texts stay mlx-lm's."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from service.core import Prompt, Sampling
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.footprint import row_bytes
from service.engine.kv.budget import Budget, PoolRow, RowBytes
from service.engine.kv.cache import RowCache
from service.engine.kv.groups import WHOLE, Groups, grouped, most_held
from service.engine.kv.lengths import Lengths
from service.engine.kv.pool import PageBlock, Pool
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache, copies
from service.engine.kv.prefix_files import Speed
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.kv.rectangles import Rectangles
from service.engine.kv.window_layer import IN_FLIGHT, WindowLayer
from service.engine.request import Request
from service.engine.strategy import CPU, CUDA, METAL, PAGE, STEP, Strategy, using
from tests.support.batches import serve
from tests.support.cuda import IN_PAGES
from tests.support.families import IDENTICAL, V, build, noisy_draft
from tests.support.oracle import forced
from tests.support.pages import assert_given_back, pages_of, rows_pages, taken

WINDOW, MOST = 16, 256
"""Of the tiny models, and what their rows hold of it."""


def text(length: int, first: int = 5) -> tuple[int, ...]:
    return tuple(4 + (first + 7 * i + i * i // 5) % (V - 8) for i in range(length))


def decoder(name: str, *, prefix: PrefixCache | None = None, chunk: int = 100, **needs: Any) -> tuple[Any, Decoder]:
    target = build(name, IDENTICAL[name] | needs)
    draft = noisy_draft(name, IDENTICAL[name] | needs, target)
    made = Decoder(target, bare(draft), vocabulary=V, k=3, prefill_chunk=chunk, prefix=prefix, key=mx.random.key(0))
    return target, made


def by_group(cache: RowCache) -> list[list[int]]:
    """Pages that each row holds of each group."""
    rows = pages_of(cache)._rows
    return [[sum(page is not None for page in pages) for pages in held or ()] for held in rows]


def check(target: Any, rows: Sequence[Request]) -> None:
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Iterator[Strategy]:
    with using(request.param):
        yield request.param


RECTANGLES, PAGES = pytest.param(CPU, id="rectangles"), pytest.param(IN_PAGES, id="pages")
AT_NIGHT = pytest.mark.nightly
CHUNKS = pytest.mark.parametrize("chunk", [100, pytest.param(400, marks=AT_NIGHT)])


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(name, strategy, id=f"{name}-{kind}", marks=() if kind in daily else AT_NIGHT)
        for name, daily in (
            ("gemma3_text", ("CPU", "CUDA")),
            ("gpt_oss", ("Metal",)),
            ("cohere2", ()),
            ("gemma3n", ()),
            ("olmo3", ()),
        )
        for strategy, kind in ((CPU, "CPU"), (METAL, "Metal"), (CUDA, "CUDA"))
    ],
)
def test_texts_past_the_window_are_the_target_s_own(name: str, strategy: Strategy) -> None:
    """Rows that come to their buffer's end in prefill, while they decode, or not at all; later from the prefix cache."""
    with using(strategy):
        target, made = decoder(name, prefix=PrefixCache(2**26))
        asked = [(text(330), 60), (text(40, 9), 24), (text(235, 3), 60), (text(1), 8), (text(250, 1), 30)]
        prompts = [Prompt(tokens, Sampling(max_tokens=count)) for tokens, count in asked]
        first = serve(made, prompts)
        check(target, first)
        again = [
            Prompt((*first[0].prompt.tokens, *first[0].output, 9, 11), Sampling(max_tokens=24)),
            Prompt((*text(330)[:200], *text(60, 2)), Sampling(max_tokens=24)),
        ]
        later = serve(made, again)
        check(target, later)
        assert later[0].cached_tokens >= 330 + 60 - 2 * BLOCK and later[1].cached_tokens == 200 // BLOCK * BLOCK
        proposed = [each for row in first for each in row.rounds]
        assert 0 < sum(each.accepted for each in proposed) < sum(each.drafted for each in proposed)
        if strategy.paged:
            assert made.batch.target.pool.groups == Groups((WINDOW, None), ((0, 0), (1, 0)))
            assert any(len(shape) == 3 for _, shape, *_ in cast("Any", made.batch.drafter)._replay._traces), (
                "a table of two groups"
            )
            assert_given_back(made)


@CHUNKS
def test_memory_stays_where_it_is_beyond_the_window(chunk: int) -> None:
    target, made = decoder("gemma3_text", chunk=chunk)
    row = Request("0", Prompt(text(380), Sampling(max_tokens=100)), frozenset(), None)
    made.admit(row)
    seen = set[tuple[int, int]]()
    while row.finish is None:
        made.round()
        if row.finish is None:
            layers = made.batch.cache.attention
            seen |= {(layer.window or 0, cast("Any", layer).keys.shape[2]) for layer in layers}
            if len(row.tokens) in range(400, 470):
                assert made.batch.drafter is not None
                assert made.memory.kv_bytes == row_bytes(target, made.batch.drafter.draft.model).of(512)
    assert seen == {(WINDOW, MOST), (0, 512)}, "made at once for the prompt and a share of its answer"
    check(target, [row])


@CHUNKS
@pytest.mark.parametrize(
    "strategy", [pytest.param(IN_PAGES, id="pages", marks=AT_NIGHT), pytest.param(CUDA, id="CUDA")]
)
def test_pages_stay_as_many_beyond_the_window(chunk: int, strategy: Strategy) -> None:
    """Five layers in three groups, two of them with a window: the last one has a place to spare."""
    with using(strategy):
        target, made = decoder("gemma3_text", chunk=chunk, num_hidden_layers=5)
        row, seen = Request("0", Prompt(text(380), Sampling(max_tokens=100)), frozenset(), None), list[list[int]]()
        cache = made.batch.target.cache(1)
        pages = pages_of(cache)
        assert pages.groups == Groups((WINDOW, WINDOW, None), ((0, 0), (2, 0), (0, 1), (2, 1), (1, 0)))
        for start in range(0, 380, chunk):
            count = min(chunk, 380 - start)
            made.batch.target(mx.array([text(380)[start : start + count]]), cache)
            mx.eval(cache.arrays())
            cache.commit(count)
            assert max(by_group(cache)[0][:2]) <= -(-(most_held(WINDOW) + chunk) // PAGE)
        del cache, pages
        made.admit(row)
        while row.finish is None:
            made.round()
            if row.finish is None:
                assert made.batch.drafter is not None
                caches = (made.batch.cache, made.batch.drafter.cache)
                seen += [by_group(each)[0] for each in caches]
                row_is = row_bytes(target, made.batch.drafter.draft.model)
                held = sum(sum(seen[-2 + i]) * pages_of(each).pool.page_bytes for i, each in enumerate(caches))
                assert held <= row_is.of(-(-(len(row.tokens) + IN_FLIGHT) // PAGE) * PAGE)
        check(target, [row])
        assert max(max(one, other) for one, other, _ in seen) <= most_held(WINDOW) // PAGE < 7
        assert max(whole for *_, whole in seen) >= 480 // PAGE
        made.batch.prefix = None
        assert_given_back(made)


@pytest.mark.parametrize("way", [pytest.param(CPU, id="rectangles", marks=AT_NIGHT), PAGES], indirect=True)
def test_a_prefix_is_used_where_the_window_before_its_end_is_there(way: Strategy) -> None:
    """Of a long answer the first positions are out of the window when it is cached: another text that goes on from there is
    prefilled from the prompt's end, and leaves the whole of it."""
    target, made = decoder("gemma3_text", prefix=PrefixCache(2**26))
    # Pages go with the window, a rectangle holds MOST positions.
    (row,) = serve(made, [Prompt(text(64), Sampling(max_tokens=200 if way.paged else 400))])
    said = (*row.prompt.tokens, *row.output)
    halfway = Prompt((*said[:200], 7, 8, 9), Sampling(max_tokens=8))
    cached = [0, 0, 0]
    for i, prompt in enumerate((halfway, halfway, Prompt((*said, 7), Sampling(max_tokens=8)))):
        (later,) = serve(made, [prompt])
        check(target, [later])
        cached[i] = later.cached_tokens
    assert cached == [32, 192, (len(said) - 1) // BLOCK * BLOCK]


@pytest.mark.parametrize("way", [RECTANGLES, PAGES], indirect=True)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "own", [pytest.param(True, id="inserted again", marks=AT_NIGHT), pytest.param(False, id="evicted meanwhile")]
)
def test_blocks_that_a_row_never_held_are_not_taken_for_whole(own: bool) -> None:
    """A row that was loaded behind blocks without the window's layers, and one whose blocks were evicted while it ran."""
    target, made = decoder("gemma3_text", prefix=PrefixCache(2**26))
    assert made.batch.prefix is not None
    if own:
        (row,) = serve(made, [Prompt(text(64), Sampling(max_tokens=400))])
        said = (*row.prompt.tokens, *row.output)
        serve(made, [Prompt((*said[:340], 7, 8, 9), Sampling(max_tokens=4))])
        parts = Prompt((*said[:230], 7, 8, 9), Sampling(max_tokens=30))
    else:
        row = Request("0", Prompt(text(300), Sampling(max_tokens=8)), frozenset(), None)
        made.admit(row)
        made.batch.prefix.clear(Owner.TARGET)
        while row.finish is None:
            made.round()
        parts = Prompt((*text(300)[:170], 7, 8, 9), Sampling(max_tokens=30))
    (later,) = serve(made, [parts])
    check(target, [later])
    # Nothing is asked of the cache for blocks that nobody has any more.
    before = made.batch.prefix.cached_length(Owner.TARGET, text(300))
    made.batch.prefix.budget = made.batch.prefix.nbytes + 6 * 2**14
    (again,) = serve(made, [Prompt((*row.prompt.tokens, *row.output, *text(40, 11)), Sampling(max_tokens=4))])
    check(target, [again])
    assert made.batch.prefix.cached_length(Owner.TARGET, text(300)) >= before


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param((CPU, CPU), id="rectangles"),
        pytest.param((IN_PAGES, IN_PAGES), id="pages", marks=AT_NIGHT),
        pytest.param((IN_PAGES, CPU), id="pages, then rectangles", marks=AT_NIGHT),
    ],
)
def test_files_hold_what_the_window_held(tmp_path: Path, ways: tuple[Strategy, Strategy]) -> None:
    """Of a prompt's blocks all layers, of the first of a long answer those without a window; read at the next start."""
    said = list[int]()
    for start, strategy in enumerate(ways):
        with using(strategy):
            files_of_a_start(tmp_path, start, said)


def files_of_a_start(tmp_path: Path, start: int, said: list[int]) -> None:
    target, made = decoder("gemma3_text", prefix=PrefixCache(2**26))
    made.prefixes.keep(tmp_path, 2**26, "target", "draft")
    # Whatever is faster with a tiny model.
    made.pace.speed = Speed()
    if not start:
        (row,) = serve(made, [Prompt(text(600), Sampling(max_tokens=300))])
        said += [*row.prompt.tokens, *row.output]
        while made.prefixes.save():
            pass
    else:
        ends = Prompt((*said, 9), Sampling(max_tokens=8)), Prompt((*said[:580], 9), Sampling(max_tokens=8))
        rows = [serve(made, [prompt])[0] for prompt in ends]
        check(target, rows)
        assert [row.cached_tokens for row in rows] == [(len(said) - 1) // BLOCK * BLOCK, 576]
        assert made.prefixes.tokens_read == rows[0].cached_tokens


class Rows:
    """A layer with a window beside one that holds everything, each fed the same; every key says whose and where it is."""

    def __init__(self) -> None:
        self.number = 0
        self.names: list[int] = []
        self.caches = [self._cache(WindowLayer(Lengths([]), WINDOW)), self._cache(RectangleLayer(Lengths([]), WINDOW))]

    @staticmethod
    def _cache(layer: RectangleLayer) -> Rectangles:
        made = Rectangles(layer.lengths)
        made.layers.append(layer)
        return made

    def _set(self, cache: Rectangles, lengths: Sequence[int]) -> None:
        cache.lengths.set(lengths)
        cache.layers[0].ahead = 0

    def feed(self, count: int, caches: Sequence[Rectangles] | None = None, names: Sequence[int] | None = None) -> None:
        """`count` tokens of every row; what each query sees must be the same."""
        found = list[list[list[list[float]]]]()
        for cache in caches or self.caches:
            layer, lengths = cache.layers[0], cache.lengths
            new = np.array(
                [
                    [1000.0 * name + n + layer.ahead + i for i in range(count)]
                    for name, n in zip(names or self.names, lengths.host, strict=True)
                ],
                dtype=np.float32,
            )[:, None, :, None]
            mask = layer.make_mask(count, return_array=True)
            keys, values = layer.update_and_fetch(mx.array(new), mx.array(-new))
            assert (np.array(keys) == -np.array(values)).all()
            width = keys.shape[2]
            sees = np.ones((1, 1, count, width), dtype=bool) if mask is None else np.array(cast("mx.array", mask))
            assert sees.shape[-1] == width
            sees = np.broadcast_to(sees, (len(lengths.host), 1, count, width))
            held = np.array(keys)[:, 0, :, 0]
            found.append([[sorted(held[b][see].tolist()) for see in sees[b, 0]] for b in range(len(lengths.host))])
        assert found[0] == found[1]

    def truncate(self, lengths: Sequence[int]) -> None:
        for cache in self.caches:
            self._set(cache, lengths)
        self.check_held()

    def check_held(self) -> None:
        """What a row claims to hold, and would leave in the prefix cache, is its own."""
        layer, lengths = self.caches[0].layers[0], self.caches[0].lengths.host
        for row, (name, end) in enumerate(zip(self.names, lengths, strict=True)):
            first = layer.first_held(row)
            assert first <= max(0, end - -(-WINDOW // BLOCK) * BLOCK - (end % BLOCK))
            held = layer.span(row, first, end)[0]
            if held is not None and end > first:
                assert np.array(held)[0, 0, :, 0].tolist() == [1000.0 * name + at for at in range(first, end)]

    def join(self, counts: Sequence[int]) -> None:
        """Rows that were prefilled by themselves, as long as these."""
        names = list(range(self.number, self.number + len(counts)))
        self.number += len(counts)
        joining = list[Rectangles]()
        others = [Rows().caches[i] for i in (0, 1)]
        for other in others:
            self._set(other, [0] * len(counts))
        if longest := max(counts):
            half = max(1, longest // 2)
            self.feed(half, others, names)
            for other in others:
                self._set(other, [min(n, half) for n in counts])
            # Rows that ended in the first call read padding.
            self.feed(longest - half, others, names) if longest > half else None
        for mine, other in zip(self.caches, others, strict=True):
            self._set(other, list(counts) if longest else [0] * len(counts))
            joining.append(other)
            have = len(self.names)
            mine.join([other], [len(counts)], range(have, have + len(counts)), have + len(counts))
            self._set(mine, [*mine.lengths.host, *other.lengths.host])
        self.names += names
        self.check_held()

    def keep(self, rows: Sequence[int], *, tight: bool) -> None:
        for cache in self.caches:
            copies = cache.copy_moved(rows, tight=tight)
            mx.eval([each for each in copies if each is not None])
            cache.compact(rows, copies, tight=tight)
            self._set(cache, [cache.lengths.host[row] for row in rows])
        self.names = [self.names[row] for row in rows]


EVENTS = st.one_of(
    st.tuples(st.just("round"), st.integers(1, 17), st.integers(0, 2**16)),
    st.tuples(st.just("long"), st.integers(60, 300), st.integers(0, 2**16)),
    st.tuples(st.just("join"), st.lists(st.integers(0, 400), min_size=1, max_size=3), st.just(0)),
    st.tuples(st.just("leave"), st.booleans(), st.integers(0, 2**16)),
    st.tuples(st.just("zero"), st.just(0), st.integers(0, 2**16)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=3), st.lists(EVENTS, max_size=12))
def test_every_query_sees_what_it_would_if_all_were_held(first: list[int], events: list[tuple[str, Any, int]]) -> None:
    rows = Rows()
    rows.join(first)
    for kind, what, luck in events:
        lengths = rows.caches[0].lengths.host
        if kind == "join":
            rows.join(what)
        elif not lengths:
            continue
        elif kind == "leave":
            gone = luck % len(lengths)
            rows.keep([row for row in range(len(lengths)) if row != gone], tight=what)
        elif kind == "zero":
            for cache in rows.caches:
                cache.zero_tail(luck % len(lengths), lengths[luck % len(lengths)])
        else:
            # A round in two calls, as a draft's; of a long call each row has tokens of its own.
            rows.feed(what)
            if kind == "round" and luck % 2:
                rows.feed(1 + luck % 17)
            written = rows.caches[0].layers[0].ahead
            rows.truncate([n + (luck >> row) % (written + 1) for row, n in enumerate(lengths)])
    held = rows.caches[0].layers[0]
    assert held.keys is None or held.keys.shape[2] <= cast("WindowLayer", held).most == 128 + STEP
    assert IN_FLIGHT + WINDOW < 128 + STEP


# ----------------------------------------------------------------------------------------------------------------- pages


class Layers(nn.Module):
    """Layers with these windows, whose keys are what a test gives them."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__()
        self.windows = [0 if window is None else window for window in windows]

    def make_cache(self) -> list[object]:
        return [RotatingKVCache(max_size=window) if window else KVCache() for window in self.windows]

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> None:
        for layer in cache:
            layer.update_and_fetch(mx.zeros((*tokens.shape, 1))[:, None], mx.zeros((*tokens.shape, 1))[:, None])


class PagedRows:
    """Rows in pages, every key of which says whose and where it is, in which layer. Pages that nobody holds are NaN: no call
    may read them, under a mask or not."""

    def __init__(self, windows: Sequence[int | None], *, features: bool) -> None:
        self.model, self.pool, self.number = Layers(windows), Pool(8), 0
        self.windows, self.features = windows, features
        self.cache, self.names, self.prefix = self.new(0), list[int](), PrefixCache(2**20)

    def new(self, rows: int) -> RowCache:
        return RowCache(self.model, rows, features=self.features, pool=self.pool)

    def poison(self) -> None:
        self.pool.launch()
        free = mx.array([0, *self.pool.free])
        for slot, arrays in enumerate(self.pool.layers):
            for array in arrays:
                if array is not None:
                    array[free] = mx.nan
            self.pool.layers[slot] = arrays

    def feed(self, count: int, cache: RowCache | None = None, names: Sequence[int] | None = None) -> None:
        """`count` tokens of every row: each query sees what it should."""
        cache, names = cache or self.cache, names or self.names
        pages_of(cache).reserve(cache.ahead + count)
        self.poison()
        starts = [n + cache.ahead for n in cache.lengths.host]
        for i, layer in enumerate(cache.attention[: len(self.windows)]):
            new = [[key(name, i, at) for at in range(n, n + count)] for name, n in zip(names, starts, strict=True)]
            array = mx.array(np.array(new, dtype=np.float32)[:, None, :, None])
            mask = layer.make_mask(count, return_array=True)
            assert isinstance(mask, mx.array)
            keys, values = (np.array(each)[:, 0, :, 0] for each in layer.update_and_fetch(array, -array))
            assert np.isfinite(keys).all() and (keys == -values).all()
            sees = np.broadcast_to(np.array(mask), (len(names), 1, count, keys.shape[1]))[:, 0]
            for row, (name, start) in enumerate(zip(names, starts, strict=True)):
                for query in range(count):
                    end = start + query + 1
                    first = max(0, end - (layer.window or end))
                    assert keys[row, sees[row, query]].tolist() == [key(name, i, at) for at in range(first, end)]
        if self.features:
            made = [[[key(name, 9, n + i)] for i in range(count)] for name, n in zip(names, starts, strict=True)]
            cache.append_features(mx.array(made))
            assert cache.features is not None
            ends = [n + count for n in starts]
            found = cache.features.features_at(mx.array([[min(at, n - 1) for at in range(max(ends))] for n in ends]))
            for row, (name, end) in enumerate(zip(names, ends, strict=True)):
                held = np.array(found)[row, :end, 0].tolist()
                assert held == [key(name, 9, at) for at in range(end)], "a draft may read all of them"

    def join(self, counts: Sequence[int], source: int | None, chunk: int) -> None:
        """Rows that are prefilled together, behind a cached prefix of a row that was there or not."""
        names, cache = list(range(self.number, self.number + len(counts))), self.new(len(counts))
        self.number += len(counts)
        if source is not None:
            # Whoever begins alike has the same name.
            names = [source] * len(counts)
            self.prefix.load(Owner.TARGET, [text_of(source, n) for n in counts], cache)
        counts = [max(n, have) for n, have in zip(counts, cache.lengths.host, strict=True)]
        while any(done < n for done, n in zip(cache.lengths.host, counts, strict=True)):
            self.feed(chunk, cache, names)
            cache.truncate([min(done + chunk, n) for done, n in zip(cache.lengths.host, counts, strict=True)])
            for row, name in enumerate(names):
                self.prefix.insert(Owner.TARGET, text_of(name, 2000), cache, row)
        cache.truncate(cache.lengths.host)
        self.cache.append(cache)
        self.names += names

    def leave(self, row: int) -> None:
        self.prefix.insert(Owner.TARGET, text_of(self.names[row], 2000), self.cache, row)
        staying = [other for other in range(len(self.names)) if other != row]
        self.cache.compact(staying, self.cache.copy_moved(staying))
        self.names = [self.names[each] for each in staying]

    def check(self) -> None:
        """Nobody holds more than it sees, what it holds is its own, and nothing is lost."""
        pages, lengths = pages_of(self.cache), self.cache.lengths.host
        for row, held in enumerate(by_group(self.cache)):
            for window, count in zip(pages.groups.windows, held, strict=True):
                assert window is None or count <= (most_held(window) + MOST_FED) // PAGE
            contents = self.cache.contents(row)
            assert len(contents) == len(self.cache.attention)
            for i, (layer, (keys, values)) in enumerate(zip(self.cache.attention, contents, strict=True)):
                first = max(0, lengths[row] - (layer.window or lengths[row]))
                number = 9 if values is None else i
                wanted = [key(self.names[row], number, at) for at in range(first, lengths[row])]
                assert np.array(keys)[0, :, 0].tolist() == wanted
        blocks = [cast("PageBlock", node.block).pages for node in self.prefix.nodes]
        rows = [page for held in pages._rows for group in held or () for page in group]
        held = {page.number for page in (*rows, *(page for each in blocks for page in each)) if page is not None}
        assert taken(self.pool) == len(held) and sum(rows_pages(self.cache)) == sum(page is not None for page in rows)
        assert self.prefix.nbytes == sum(node.nbytes for node in self.prefix.nodes)


MOST_FED = 320
"""Tokens that rows are fed in a call, rounded up."""


def key(name: int, layer: int, at: int) -> float:
    return 100_000.0 * name + 10_000.0 * layer + at


def text_of(name: int, length: int) -> list[int]:
    return [name, *range(1, length)]


PAGED = st.one_of(
    st.tuples(st.just("round"), st.integers(1, 17), st.integers(0, 2**16)),
    st.tuples(st.just("long"), st.integers(60, 300), st.integers(0, 2**16)),
    st.tuples(st.just("again"), st.integers(1, 8), st.integers(0, 2**16)),
    st.tuples(st.just("join"), st.lists(st.integers(1, 400), min_size=1, max_size=3), st.integers(0, 2**16)),
    st.tuples(st.just("leave"), st.booleans(), st.integers(0, 2**16)),
    st.tuples(st.just("copy"), st.booleans(), st.integers(0, 2**16)),
)


GROUPED = pytest.mark.parametrize(
    ("windows", "features"),
    [([16, None, 16, None, 16], True), ([16], False), ([None, 40, 16], False)],
    ids=["with features", "alone", "two windows"],
)
HISTORY = given(first=st.lists(st.integers(1, 400), min_size=1, max_size=3), events=st.lists(PAGED, max_size=10))


@GROUPED
@settings(max_examples=8, deadline=None)
@HISTORY
def test_pages_hold_what_every_query_sees(
    windows: list[int | None], features: bool, first: list[int], events: list[tuple[str, Any, int]]
) -> None:
    check_pages(windows, features, first, events)


@pytest.mark.nightly
@GROUPED
@settings(max_examples=60, deadline=None)
@HISTORY
def test_pages_hold_what_every_query_sees_in_many_histories(
    windows: list[int | None], features: bool, first: list[int], events: list[tuple[str, Any, int]]
) -> None:
    check_pages(windows, features, first, events)


def check_pages(
    windows: list[int | None], features: bool, first: list[int], events: list[tuple[str, Any, int]]
) -> None:
    with using(IN_PAGES):
        rows = PagedRows(windows, features=features)
        rows.join(first, None, 100)
        for kind, what, luck in events:
            lengths = rows.cache.lengths.host
            if kind == "join":
                rows.join(what, luck % rows.number if luck % 3 else None, 40 + luck % 200)
            elif not lengths:
                continue
            elif kind == "leave":
                rows.leave(luck % len(lengths))
            elif kind == "again":
                # As a draft, which reads its last tokens anew.
                rows.cache.rewind([max(0, n - what) for n in lengths])
                rows.feed(what + luck % 9)
                rows.cache.truncate(lengths)
            elif kind == "copy":
                # As through a file.
                path = rows.prefix._match(Owner.TARGET, text_of(rows.names[luck % len(lengths)], 2000), "")
                for node, block in zip(
                    path, rows.pool.fill(copies([node.block for node in path])) if path else [], strict=True
                ):
                    assert cast("PageBlock", node.block).whole == block.whole and node.nbytes == block.nbytes
                    node.block = block
            else:
                rows.feed(what)
                if kind == "round" and luck % 2:
                    rows.feed(1 + luck % 17)
                written = rows.cache.ahead
                rows.cache.truncate([n + (luck >> row) % (written + 1) for row, n in enumerate(lengths)])
            rows.check()


def test_layers_are_grouped_by_window() -> None:
    alike = ["kind"] * 26
    gemma = grouped([None if i % 6 == 5 else 512 for i in range(26)], alike, features=False)
    assert gemma.windows == (512,) * 6 + (None,) and len(set(gemma.places)) == 26
    assert {slot for _, slot in gemma.places} == {0, 1, 2, 3} and gemma.reach == 512 // PAGE
    assert [gemma.place(i)[0] for i in (5, 11, 17, 23)] == [6] * 4 and gemma.place(25) == (5, 1)
    features = grouped([16, None], alike[:2], features=True)
    assert features.places == ((0, 0), (1, 0), (1, 3)), "they need all positions, in an array of their own"
    shared = grouped([16, None, 16], ["kind", "kind", None], features=False)
    assert shared.places == ((0, 0), (1, 0), (1, 3)), "a layer without keys"
    assert grouped([16, 16], alike[:2], features=False) == Groups((16,))
    for windows, kinds, has in (
        ([None, None], ["kind"] * 2, False),
        ([None, 16], ["one", "other"], False),
        ([16, 16], ["kind"] * 2, True),
        ([], [], False),
    ):
        assert grouped(windows, kinds, features=has) == WHOLE


def test_what_fits_in_pages_of_windows() -> None:
    """A target with a window beside a draft without: pools are as large as a long row needs them, and none is overdrawn."""
    target, draft = PoolRow(1000, (128, 128, None)), PoolRow(100, (None,))
    budget = Budget(10**6, RowBytes(0, pools=(target, draft)), chunk=256)
    with using(CUDA):
        assert target.pages([1024]) == 32 + 2 * 4 and target.pages([1024], chunk=256) == 32 + 2 * 12
        assert target.pages([130], chunk=256) == 5 + 2 * 5, "no more than its positions"
        assert target.pages([1024, 1024], [1024, 64], 256) == 98 + 2 * (8 + 12 + 2 + 8)
        longest, (most, other) = budget.longest(), budget.pages
        assert 1000 * most + 100 * other <= 10**6
        assert 0.8 * most < target.pages([longest], chunk=256) <= most and -(-longest // PAGE) <= other
        assert budget.fits([longest]) and not budget.fits([longest, longest]) and budget.longest(4) < longest
        assert 0.8 < budget.used([longest]) <= 1.0


def test_rows_with_windows_keep_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts and answers of which few fit: pools do not grow, and the youngest go back."""
    monkeypatch.setattr("service.engine.memory.HEADROOM", 1)
    with using(CUDA):
        target, made = decoder("gemma3_text", prefix=PrefixCache(2**26))
        assert made.batch.drafter is not None
        row = row_bytes(target, made.batch.drafter.draft.model)
        assert [pool.groups for pool in row.pools] == [(most_held(WINDOW), None)] * 2
        made.memory.limit(Budget(4 * row.of(256), row, chunk=100))
        sizes = [pool.pages for pool in made.batch.pools]
        rows = [
            Request(str(i), Prompt(text(n, i), Sampling(max_tokens=60)), frozenset(), None)
            for i, n in enumerate((210, 150, 230, 40, 190))
        ]
        waiting, gone, together = rows.copy(), 0, 0
        while waiting or made.rows:
            while waiting and made.memory.has_room([len(waiting[0].tokens)]):
                made.admit(waiting.pop(0))
            back = made.preempt([])
            gone, waiting = gone + len(back), [*back, *waiting]
            together = max(together, len(made.rows))
            if made.rows:
                made.round()
            assert [pool.pages for pool in made.batch.pools] == sizes
        check(target, rows)
        assert gone and together > 1
        assert_given_back(made)
