"""Layers with a sliding window hold its last positions alone, in rectangles, and texts stay mlx-lm's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.core import Prompt, Sampling
from service.engine.adapters import bare
from service.engine.decoder import Decoder
from service.engine.footprint import row_bytes
from service.engine.kv.lengths import Lengths
from service.engine.kv.prefix import BLOCK, Owner, PrefixCache
from service.engine.kv.prefix_files import Speed
from service.engine.kv.rectangle_layer import RectangleLayer
from service.engine.kv.rectangles import Rectangles
from service.engine.kv.window_layer import IN_FLIGHT, WindowLayer
from service.engine.request import Request
from service.engine.strategy import CPU, METAL, STEP, Strategy, using
from tests.support.batches import serve
from tests.support.families import IDENTICAL, V, build, noisy_draft
from tests.support.oracle import forced

WINDOW, MOST = 16, 256
"""Of the tiny models, and what their rows hold of it."""


def text(length: int, first: int = 5) -> tuple[int, ...]:
    return tuple(4 + (first + 7 * i + i * i // 5) % (V - 8) for i in range(length))


def decoder(name: str, *, prefix: PrefixCache | None = None, chunk: int = 100) -> tuple[Any, Decoder]:
    target = build(name, IDENTICAL[name])
    draft = noisy_draft(name, IDENTICAL[name], target)
    made = Decoder(target, bare(draft), vocabulary=V, k=3, prefill_chunk=chunk, prefix=prefix, key=mx.random.key(0))
    return target, made


def check(target: Any, rows: Sequence[Request]) -> None:
    for row in rows:
        assert row.output == forced(target, row.prompt.tokens, row.output, row.prompt.sampling)


@pytest.mark.parametrize("strategy", [CPU, METAL], ids=["CPU", "Metal"])
@pytest.mark.parametrize(
    "name",
    ["gemma3_text", "gpt_oss", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("cohere2", "gemma3n", "olmo3"))],
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


@pytest.mark.parametrize("chunk", [100, 400])
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
                assert made.kv_bytes == row_bytes(target, made.batch.drafter.draft.model).of(512)
    assert seen == {(WINDOW, MOST), (0, 384), (0, 512)}
    check(target, [row])


def test_a_prefix_is_used_where_the_window_before_its_end_is_there() -> None:
    """Of a long answer the first positions are out of the window when it is cached: another text that goes on from there is
    prefilled from the prompt's end, and leaves the whole of it."""
    target, made = decoder("gemma3_text", prefix=PrefixCache(2**26))
    (row,) = serve(made, [Prompt(text(64), Sampling(max_tokens=400))])
    said = (*row.prompt.tokens, *row.output)
    halfway = Prompt((*said[:200], 7, 8, 9), Sampling(max_tokens=8))
    cached = [0, 0, 0]
    for i, prompt in enumerate((halfway, halfway, Prompt((*said, 7), Sampling(max_tokens=8)))):
        (later,) = serve(made, [prompt])
        check(target, [later])
        cached[i] = later.cached_tokens
    assert cached == [32, 192, (len(said) - 1) // BLOCK * BLOCK]


@pytest.mark.parametrize("own", [True, False], ids=["inserted again", "evicted meanwhile"])
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


def test_files_hold_what_the_window_held(tmp_path: Path) -> None:
    """Of a prompt's blocks all layers, of the first of a long answer those without a window; read at the next start."""
    asked, said = Prompt(text(600), Sampling(max_tokens=300)), list[int]()
    for start in range(2):
        target, made = decoder("gemma3_text", prefix=PrefixCache(2**26))
        made.keep_prefixes(tmp_path, 2**26, "target", "draft")
        # Whatever is faster with a tiny model.
        made.pace.speed = Speed()
        if not start:
            (row,) = serve(made, [asked])
            said += [*row.prompt.tokens, *row.output]
            while made.save_prefixes():
                pass
        else:
            ends = Prompt((*said, 9), Sampling(max_tokens=8)), Prompt((*said[:580], 9), Sampling(max_tokens=8))
            rows = [serve(made, [prompt])[0] for prompt in ends]
            check(target, rows)
            assert [row.cached_tokens for row in rows] == [(len(said) - 1) // BLOCK * BLOCK, 576]
            assert made.prefix_tokens_read == rows[0].cached_tokens


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
