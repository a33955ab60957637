"""The general set: short texts on many topics, written by the target. A server that has seen only one topic replays
them so that its draft does not forget the others. A fifth of them is the gate's golden set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from service.core import FinishReason, Generation, Prompt, Provenance, Sampling, TrainingFailed

GENERAL = "general"
"""Kind of the general set's texts."""
_GOLDEN_ONE_IN = 5


@dataclass(frozen=True, slots=True)
class GeneralSet:
    """Texts that the target wrote greedily. tokens: all of them concatenated, prompt then output. lengths: (n,) int32,
    tokens of prompt and output together. prompt_lengths: (n,) int32."""

    tokens: NDArray[np.uint32]
    prompt_lengths: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @classmethod
    def of(cls, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> GeneralSet:
        """The set of these (prompt, output) token ids."""
        pairs = list(texts)
        return cls(
            tokens=np.array([token for prompt, output in pairs for token in (*prompt, *output)], dtype=np.uint32),
            prompt_lengths=np.array([len(prompt) for prompt, _ in pairs], dtype=np.int32),
            lengths=np.array([len(prompt) + len(output) for prompt, output in pairs], dtype=np.int32),
        )

    def save(self, path: Path) -> None:
        """Writes a compressed .npz; token ids take 16 bits if all of them fit."""
        narrow = self.tokens.size == 0 or int(self.tokens.max()) < 2**16
        np.savez_compressed(
            path,
            tokens=self.tokens.astype(np.uint16 if narrow else np.uint32),
            prompt_lengths=self.prompt_lengths,
            lengths=self.lengths,
        )

    @classmethod
    def load(cls, path: Path) -> GeneralSet:
        """Reads what `save` wrote. Raises TrainingFailed when the file is missing or damaged, or its lengths are
        inconsistent."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                tokens, prompt_lengths, lengths = stored["tokens"], stored["prompt_lengths"], stored["lengths"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise TrainingFailed(f"the general replay set {path.name} cannot be read: {error}") from error
        loaded = cls(tokens.astype(np.uint32), prompt_lengths.astype(np.int32), lengths.astype(np.int32))
        if not loaded._adds_up():
            raise TrainingFailed(f"the lengths in the general replay set {path.name} are inconsistent")
        return loaded

    def _adds_up(self) -> bool:
        if self.prompt_lengths.shape != self.lengths.shape or int(self.lengths.sum()) != self.tokens.size:
            return False
        return not bool((self.prompt_lengths > self.lengths).any() or (self.prompt_lengths < 0).any())

    def generations(self, provenance: Provenance, *, golden: bool) -> list[Generation]:
        """The texts as generations without targets, except those with an empty prompt or output.

        golden: True for the fifth that is only measured on, False for the rest. The order depends only on the content:
        the first n of a set are always the same texts, so that the target's probabilities are computed once.
        """
        found: list[tuple[bytes, Generation]] = []
        for prompt, output in self._pairs():
            prompt_digest = _digest(prompt)
            # By prompt, so that no prompt is in both parts.
            if not prompt or not output or (prompt_digest[0] % _GOLDEN_ONE_IN == 0) is not golden:
                continue
            key = hashlib.sha256(prompt_digest + _bytes(output)).digest()
            found.append((key, _generation(key.hex()[:16], prompt, output, provenance)))
        return [generation for _, generation in sorted(found, key=lambda item: item[0])]

    def _pairs(self) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        ends = np.cumsum(self.lengths)
        for end, length, prompt in zip(ends.tolist(), self.lengths.tolist(), self.prompt_lengths.tolist(), strict=True):
            tokens = tuple(self.tokens[end - length : end].tolist())
            yield tokens[:prompt], tokens[prompt:]


def _bytes(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def _digest(tokens: tuple[int, ...]) -> bytes:
    return hashlib.sha256(_bytes(tokens)).digest()


def _generation(key: str, prompt: tuple[int, ...], output: tuple[int, ...], provenance: Provenance) -> Generation:
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
        provenance=provenance,
        created_at=datetime.fromtimestamp(0, UTC),
    )
