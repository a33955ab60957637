"""A batch's cached prefixes as the engine uses them, including files that outlive the process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from service.engine.batch import Batch
from service.engine.kv.prefix import BLOCK, Owner, copies
from service.engine.kv.prefix_files import PrefixFiles, Speed, remove_files
from service.engine.prefill import Pace

log = logging.getLogger(__name__)


class Prefixes:
    """pace: the measured prefill speed, with which loading a file is compared. chunk: prompt tokens per call."""

    def __init__(self, batch: Batch, pace: Pace, chunk: int) -> None:
        self._batch = batch
        self._pace = pace
        self._chunk = chunk
        self._folder: Path | None = None
        """Where files may exist, even if none are written or read."""

    def cached_tokens(self, tokens: Sequence[int], salt: str) -> int:
        """Tokens of a text, except its last, that are in the target's prefix cache. salt: core.Prompt.cache_salt."""
        prefix = self._batch.prefix
        return 0 if prefix is None else prefix.cached_length(Owner.TARGET, tokens[:-1], salt)

    def keep(self, folder: Path, cap: int, target: str, draft: str) -> None:
        """Also keep the target's prefixes in files, at most `cap` bytes. target, draft: fingerprints of the models. Does
        nothing without a prefix cache, or for a model with recurrent layers. Raises OSError if the folder cannot be used."""
        self._folder, model = folder, self._batch.target
        cache = model.cache(1)
        if self._batch.prefix is None or cache.states:
            log.warning("no prefixes are kept in %s: this model does not support prefix caching", folder)
            return
        # The contents of a block depend on how the model runs here. The first call compiles; the second one is timed.
        count = max(self._chunk, BLOCK)
        for _ in range(2):
            cache, started_at = model.cache(1), time.perf_counter()
            model(mx.zeros((1, count), dtype=mx.int32), cache)
            model.activations.evaluate(cache.arrays(), count)
            self._pace.speed = Speed(count, time.perf_counter() - started_at)
            cache.commit(count)
        (block,) = copies(cache.storage.blocks(0, count // BLOCK - 1, 1))
        # Features depend on the draft as well as on the target's hidden states.
        name = target if cache.features is None else f"{target} {draft}"
        self._batch.prefix.files = PrefixFiles(folder, cap, name, block)

    def save(self, least: int = 1) -> bool:
        """Write one file; see PrefixCache.save. Returns whether a file was due. After an error, files are neither written nor
        read any more; serving continues."""
        prefix = self._batch.prefix
        try:
            return prefix is not None and prefix.save(least)
        except Exception:
            log.exception("failed to save a cached prefix; files are no longer used")
            assert prefix is not None
            prefix.files = None
            return False

    def forget(self) -> None:
        """Drop all cached prefixes, in memory and in files. Raises OSError if a file cannot be removed."""
        if self._batch.prefix is not None:
            self._batch.prefix.forget()
        if self._folder is not None:
            remove_files(self._folder)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take. May be called from any thread."""
        return 0 if self._batch.prefix is None else self._batch.prefix.nbytes

    @property
    def tokens_read(self) -> int:
        """Tokens that were loaded from files."""
        return 0 if self._batch.prefix is None else self._batch.prefix.tokens_read

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files. May be called from any thread."""
        files = None if self._batch.prefix is None else self._batch.prefix.files
        return 0 if files is None else files.nbytes
