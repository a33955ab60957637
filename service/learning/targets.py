"""The target's distribution for texts that were logged without it, computed once and stored in files."""

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
from service.learning.masks import NO_MASKS, Masks, usable
from service.learning.teacher_forcing import response_logits
from service.store.log.rows import grammar_hash


class TargetCache:
    """One file of targets per text, in a folder under `root` that is named after the target's fingerprint."""

    def __init__(self, root: Path, target: str) -> None:
        self.folder = root / target

    def load(self, generation: Generation) -> Targets | None:
        """The targets of a generation's text and grammar; None when the file is missing, damaged or of another length."""
        try:
            with self._file(generation).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                targets = pack([stored["ids"]], [stored["logprobs"]], [stored["tail"]])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            return None
        return targets if targets.positions == len(generation.output) else None

    def store(self, generation: Generation, targets: Targets) -> None:
        """Writes to a temporary file, then renames it: a reader sees the whole file or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
            try:
                np.savez(
                    file,
                    ids=np.frombuffer(targets.ids, dtype="<u4").reshape(-1, targets.top),
                    logprobs=np.frombuffer(targets.logprobs, dtype="<f2").reshape(-1, targets.top),
                    tail=np.frombuffer(targets.tail, dtype="<f2"),
                )
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
        # A concurrent erasure removes all files, including this one.
        with suppress(FileNotFoundError):
            os.replace(file.name, self._file(generation))

    def _file(self, generation: Generation) -> Path:
        digest = hashlib.sha256((grammar_hash(generation) or "").encode())
        for part in (generation.prompt.tokens, generation.output):
            digest.update(len(part).to_bytes(8, "little") + np.array(part, dtype="<u4").tobytes())
        return self.folder / f"{digest.hexdigest()}.npz"


def remove_files(root: Path) -> None:
    """Removes the files of every TargetCache under `root`, for all texts and targets. Raises OSError."""
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
    """The same generations with targets: their own, those in the cache, or computed now and stored in the cache.

    load_target: loads the target and the width of its logits; called only if the cache lacks some. masks: of answers
    that had to follow a grammar. Generations without prompt or output, or with unknown masks, stay without targets.
    """
    found = [g if g.targets is not None else replace(g, targets=cache.load(g)) for g in generations]
    able = {generation.id for generation in usable(generations, masks)}
    missing = [i for i, g in enumerate(found) if g.targets is None and g.prompt.tokens and g.output and g.id in able]
    if missing:
        model, vocabulary = load_target()
        computed = compute_targets(
            model, [found[i] for i in missing], vocabulary=vocabulary, masks=masks, between=between
        )
        for i, targets in zip(missing, computed, strict=True):
            cache.store(found[i], targets)
            found[i] = replace(found[i], targets=targets)
    return found


def compute_targets(
    model: nn.Module,
    generations: Sequence[Generation],
    *,
    vocabulary: int,
    masks: Masks = NO_MASKS,
    between: Callable[[], object] = lambda: None,
) -> list[Targets]:
    """The TOP_TARGETS largest log-probabilities and the tail mass at T = 1 at every output position, in one
    teacher-forced pass of the target, restricted to the allowed tokens where an answer had to follow a grammar.
    vocabulary: width of the target's logits."""
    texts = [(generation.prompt.tokens, generation.output) for generation in generations]
    parts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in texts]
    text_masks = [masks.get(generation.id) for generation in generations]
    for span in response_logits(model, texts, vocabulary=vocabulary, between=between, masks=text_masks):
        ids, values = top_logits(span.logits)
        logprobs = values - mx.logsumexp(span.logits, axis=-1, keepdims=True)
        tail = tail_mass(logprobs)
        mx.eval(ids, logprobs, tail)
        arrays = np.array(ids), np.array(logprobs), np.array(tail)
        for text in dict.fromkeys(span.text):
            here = np.array(span.text) == text
            parts[text].append((arrays[0][here], arrays[1][here], arrays[2][here]))
    return [pack(*zip(*pieces, strict=True)) for pieces in parts]
