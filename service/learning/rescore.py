"""The target's distribution for texts that were logged without it, kept in files so that it is paid for once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from zipfile import BadZipFile

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import Generation, Targets
from service.engine.top_logprobs import pack, tail_mass, top_logits
from service.learning.forced import response_logits
from service.learning.masks import NO_MASKS, Masks, usable
from service.store.log.rows import grammar_hash


class TargetCache:
    """Files of targets, one a text, under a folder named after the target's fingerprint."""

    def __init__(self, root: Path, target: str) -> None:
        self.folder = root / target

    def load(self, generation: Generation) -> Targets | None:
        """None when it is not there, damaged, or of another length."""
        try:
            with self._file(generation).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                targets = pack([stored["ids"]], [stored["logprobs"]], [stored["tail"]])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None
        return targets if targets.positions == len(generation.output) else None

    def store(self, generation: Generation, targets: Targets) -> None:
        """Write aside, then rename: a reader sees all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
            np.savez(
                file,
                ids=np.frombuffer(targets.ids, dtype="<u4").reshape(-1, targets.top),
                logprobs=np.frombuffer(targets.logprobs, dtype="<f2").reshape(-1, targets.top),
                tail=np.frombuffer(targets.tail, dtype="<f2"),
            )
        # An erasure removes what lies here, of whatever text.
        with suppress(FileNotFoundError):
            os.replace(file.name, self._file(generation))

    def _file(self, generation: Generation) -> Path:
        digest = hashlib.sha256((grammar_hash(generation) or "").encode())
        for part in (generation.prompt.tokens, generation.output):
            digest.update(len(part).to_bytes(8, "little") + np.array(part, dtype="<u4").tobytes())
        return self.folder / f"{digest.hexdigest()}.npz"


def remove_files(root: Path) -> None:
    """Remove the files of every TargetCache under `root`, whatever text and target they are of. Raises OSError."""
    for path in root.glob("*/*"):
        if path.suffix in {".npz", ".part"}:
            path.unlink(missing_ok=True)


def with_targets(
    generations: Sequence[Generation],
    *,
    cache: TargetCache,
    load_target: Callable[[], tuple[nn.Module, int]],
    masks: Masks = NO_MASKS,
    between: Callable[[], object] = lambda: None,
) -> list[Generation]:
    """The same generations, each with targets. The target (a model and the width its logits are cut to) is loaded only
    when the cache lacks some. masks: of answers that had to follow a grammar. Generations without prompt or output, and those
    whose masks are not known, stay as they are."""
    done = [g if g.targets is not None else replace(g, targets=cache.load(g)) for g in generations]
    able = {generation.id for generation in usable(generations, masks)}
    missing = [i for i, g in enumerate(done) if g.targets is None and g.prompt.tokens and g.output and g.id in able]
    if missing:
        model, vocabulary = load_target()
        found = rescore(model, [done[i] for i in missing], vocabulary=vocabulary, masks=masks, between=between)
        for i, targets in zip(missing, found, strict=True):
            cache.store(done[i], targets)
            done[i] = replace(done[i], targets=targets)
    return done


def rescore(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    vocabulary: int,
    masks: Masks = NO_MASKS,
    between: Callable[[], object] = lambda: None,
) -> list[Targets]:
    """Top 32 log-probabilities and tail mass at T = 1 of every output position, in one teacher-forced pass; over what its masks
    allow where an answer had to follow a grammar."""
    texts = [(generation.prompt.tokens, generation.output) for generation in generations]
    parts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in texts]
    held = [masks.get(generation.id) for generation in generations]
    for span in response_logits(model, texts, vocabulary=vocabulary, between=between, masks=held):
        ids, values = top_logits(span.logits)
        logprobs = values - mx.logsumexp(span.logits, axis=-1, keepdims=True)
        tail = tail_mass(logprobs)
        mx.eval(ids, logprobs, tail)
        rows = np.array(ids), np.array(logprobs), np.array(tail)
        for text in dict.fromkeys(span.text):
            mine = np.array(span.text) == text
            parts[text].append((rows[0][mine], rows[1][mine], rows[2][mine]))
    return [pack(*zip(*pieces, strict=True)) for pieces in parts]
