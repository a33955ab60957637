"""What rows and the prefix cache hold of a pool's pages."""

from __future__ import annotations

from service.engine.decoder import Decoder
from service.engine.kv.cache import RowCache
from service.engine.kv.pages import Pages
from service.engine.kv.pool import Page, PageBlock, Pool
from service.engine.kv.prefix import PrefixCache
from tests.support.typed import as_ints


def pages_of(cache: RowCache) -> Pages:
    """Those of a cache that is in pages."""
    assert cache.pages is not None
    return cache.pages


def rows_pages(cache: RowCache) -> list[int]:
    """How many pages each row holds; padding rows hold none."""
    rows = pages_of(cache)._rows  # pyright: ignore[reportPrivateUsage]
    return [sum(page is not None for pages in held or () for page in pages) for held in rows]


def taken(pool: Pool) -> int:
    """Pages that somebody holds. Page 0 is nobody's."""
    assert len(set(pool.free)) == len(pool.free) and 0 not in pool.free and max(pool.free, default=0) < pool.pages
    return pool.pages - 1 - len(pool.free)


def cached(prefix: PrefixCache | None, pool: Pool) -> int:
    """Pages that the prefix cache holds."""
    blocks = [] if prefix is None else [node.block for node in prefix.nodes]
    pages = [block.pages for block in blocks if isinstance(block, Page | PageBlock) and block.pool is pool]
    return sum(page is not None for each in pages for page in each)


def numbers_of(cache: RowCache, row: int) -> list[int]:
    """The numbers of the pages that hold a row, up to its end."""
    return as_ints(pages_of(cache).numbers(row))


def assert_given_back(decoder: Decoder) -> None:
    """Without rows, only the prefix cache holds pages."""
    assert not decoder.rows
    for pool in decoder.batch.pools:
        assert taken(pool) == cached(decoder.batch.prefix, pool)
