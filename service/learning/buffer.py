"""What a run trains on beside its new cases, so that it does not unlearn the rest.

The buffer starts from a general set that the target wrote itself: a service that has only ever seen one topic still
remembers the others. Domains seen earlier come from the store's reservoir.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from service.core import FinishReason, Generation, Prompt, Provenance, Sampling, TrainingFailed
from service.store.log.rows import id_bytes
from service.store.log.sampler import Text, capped, text

GENERAL = "general"
"""Kind of the general set's texts."""
_FIFTH = 5
COVERED = 0.1
"""Share of the new texts from which on a domain needs no replay."""


@dataclass(frozen=True, slots=True)
class GeneralSet:
    """Short texts the target wrote greedily. tokens: all of them end to end, prompt then output; lengths: (n,) int32 of
    prompt and output together; prompt_lengths: (n,) int32."""

    tokens: NDArray[np.uint32]
    prompt_lengths: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @classmethod
    def of(cls, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> GeneralSet:
        """From (prompt, output) pairs."""
        pairs = list(texts)
        return cls(
            tokens=np.array([token for prompt, output in pairs for token in (*prompt, *output)], dtype=np.uint32),
            prompt_lengths=np.array([len(prompt) for prompt, _ in pairs], dtype=np.int32),
            lengths=np.array([len(prompt) + len(output) for prompt, output in pairs], dtype=np.int32),
        )

    def save(self, path: Path) -> None:
        """Compressed .npz; ids in 16 bits where they fit."""
        narrow = self.tokens.size == 0 or int(self.tokens.max()) < 2**16
        np.savez_compressed(
            path,
            tokens=self.tokens.astype(np.uint16 if narrow else np.uint32),
            prompt_lengths=self.prompt_lengths,
            lengths=self.lengths,
        )

    @classmethod
    def load(cls, path: Path) -> GeneralSet:
        """Raises TrainingFailed when the file is missing, damaged, or does not add up."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = stored["tokens"], stored["prompt_lengths"], stored["lengths"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise TrainingFailed(f"the general replay set {path.name} cannot be read: {error}") from error
        made = cls(arrays[0].astype(np.uint32), arrays[1].astype(np.int32), arrays[2].astype(np.int32))
        whole = made.prompt_lengths.shape == made.lengths.shape and int(made.lengths.sum()) == made.tokens.size
        if not whole or bool((made.prompt_lengths > made.lengths).any() or (made.prompt_lengths < 0).any()):
            raise TrainingFailed(f"the general replay set {path.name} does not add up")
        return made

    def generations(self, who: Provenance, *, golden: bool) -> list[Generation]:
        """The held-back fifth (golden: only ever measured on) or the rest, in an order fixed by content: any first n of
        a set are the same texts every time, so that their targets are computed once."""
        found: list[tuple[bytes, Generation]] = []
        ends = np.cumsum(self.lengths)
        for end, length, lead in zip(ends.tolist(), self.lengths.tolist(), self.prompt_lengths.tolist(), strict=True):
            tokens = tuple(self.tokens[end - length : end].tolist())
            prompt, output = tokens[:lead], tokens[lead:]
            if not prompt or not output:
                continue
            digest = hashlib.sha256(np.array(prompt, dtype="<u4").tobytes()).digest()
            # By prompt: the same prompt is never on both sides.
            if (digest[0] % _FIFTH == 0) is golden:
                key = hashlib.sha256(digest + np.array(output, dtype="<u4").tobytes()).digest()
                found.append((key, _generation(key.hex()[:16], prompt, output, who)))
        return [generation for _, generation in sorted(found, key=lambda item: item[0])]


def _generation(key: str, prompt: tuple[int, ...], output: tuple[int, ...], who: Provenance) -> Generation:
    return Generation(
        id=f"{GENERAL}-{key}",
        prompt=Prompt(prompt, Sampling(max_tokens=len(output)), kind=GENERAL),
        output=output,
        finish=FinishReason.STOP,
        rounds=(),
        cases=(),
        logprobs=(),
        sampled_logprobs=(),
        targets=None,
        provenance=who,
        created_at=datetime.fromtimestamp(0, UTC),
    )


def replay_count(fresh: int, share: float) -> int:
    """Replayed examples beside `fresh` new ones, so that they are `share` of all. With a share of 1 nothing new is
    used: as many replayed ones take its place."""
    return fresh if share >= 1.0 else round(fresh * share / (1.0 - share))


def replay(
    fresh: Sequence[Generation],
    *,
    share: float,
    general: Sequence[Generation],
    reservoir: Callable[[int], Sequence[Generation]],
    seed: int,
) -> list[Generation]:
    """Which generations to replay beside `fresh`.

    The domains that make no tenth of the fresh ones, and the general set as one more, get equal parts; what one lacks the
    other gives. reservoir(n) gives n stored generations in any order, drawn uniformly over domains.
    """
    count = replay_count(len(fresh), share)
    if count == 0:
        return []
    known = {generation.id for generation in fresh}
    shares = Counter(_place(generation) for generation in fresh)
    covered = {place for place, held in shares.items() if general and held >= COVERED * len(fresh)}
    domains: dict[tuple[str | None, str | None], list[Generation]] = {}
    for generation in reservoir(2 * count):
        if generation.id not in known and _place(generation) not in covered:
            domains.setdefault(_place(generation), []).append(generation)
    rng = random.Random(seed)
    for held in domains.values():
        rng.shuffle(held)
    drawn = [one for each in zip_longest(*domains.values()) for one in each if one is not None]
    parts = len(domains) + (1 if general else 0)
    stored = drawn[: max(count * len(domains) // parts, count - len(general))] if parts else []
    return [*stored, *general[: count - len(stored)]]


def _place(generation: Generation) -> tuple[str | None, str | None]:
    """The reservoir it belongs to: by its tag, or by its kind."""
    return generation.prompt.domain, generation.prompt.kind


def lesson(
    fresh: Sequence[Generation],
    *,
    share: float,
    general: Sequence[Generation],
    reservoir: Callable[[int], Sequence[Generation]],
    seed: int,
) -> list[Generation]:
    """What a run learns from: the new, newest first, each text once and nobody more than his share, and what is replayed
    beside it, nobody more than his share of that. With a share of 1 nothing is new."""
    new = limited(fresh)

    def bounded(count: int) -> list[Generation]:
        return limited(reservoir(count))

    return [
        *(new if share < 1.0 else []),
        *replay(new, share=share, general=general, reservoir=bounded, seed=seed),
    ]


def limited(generations: Sequence[Generation]) -> list[Generation]:
    """Each text once, and nobody more than his share, in the order given (store.sampler.capped)."""
    stay = {one.id for one in capped([_text(str(i), g) for i, g in enumerate(generations)])}
    return [g for i, g in enumerate(generations) if str(i) in stay]


def _text(name: str, made: Generation) -> Text:
    prompt = made.prompt
    return text(
        name,
        prompt=id_bytes(prompt.tokens),
        output=id_bytes(made.output),
        client=prompt.client,
        first_user=prompt.first_user,
    )
