"""`redraft eval gate`: does the gate tell apart what a run made better, what it made worse, and what is no different?

Adapters are trained by the settings' recipe on texts that the target wrote once: some on the texts as they are, some on texts
whose targets were dealt out among all positions anew, so that there is nothing to learn from them. Both are judged against the
bare draft. Others are the first of the good ones with noise on its weights, judged against that one. What each is worth is
measured beside, on prompts that neither a run nor the gate sees.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from service.core import BadRequest, Generation, Score, Verdict
from service.engine import profile
from service.engine.costs import USUALLY_HELD, Load
from service.engine.folding import as_served
from service.evaluation.courses import adapted, answered, one_run
from service.evaluation.prompts import PromptLine
from service.evaluation.run import DRAFTED, Step
from service.learning import lora
from service.learning.dataset import Example
from service.learning.fitting import fit
from service.learning.job import CACHE_BYTES
from service.learning.scoring import score
from service.lifecycle import gate
from service.models import vocabulary
from service.models.pair import Pair, load_pair
from service.settings import Settings
from service.store.generations import HELD_OUT, split_of

NOISES = (0.01, 0.02, 0.05, 0.1)
"""Standard deviations of the noise, of each weight matrix's own; the noisy ones take them in turn."""
TRUTHS = "tokens-per-call.json"


class Kind(StrEnum):
    """How a candidate was made."""

    BETTER = "trained"
    SHUFFLED = "trained on shuffled targets"
    NOISY = "the active one with noise"


@dataclass(frozen=True, slots=True)
class Candidate:
    """seed: what it was trained on, or its noise."""

    kind: Kind
    seed: int

    @property
    def name(self) -> str:
        """Unique name of the candidate, such as `better-3`."""
        return f"{self.kind.name.lower()}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Judged:
    """worth: relative change of tokens per target call, at DRAFTED tokens a round, on the separate prompts; not measured of
    what has noise."""

    candidate: Candidate
    verdict: Verdict
    worth: float | None

    def plain(self) -> dict[str, Any]:
        """The candidate, its verdict and its worth by name, JSON-ready; gain, low90 and worth are fractions."""
        verdict = self.verdict
        return {
            "name": self.candidate.name,
            "kind": self.candidate.kind.value,
            "promoted": verdict.promoted,
            "reason": verdict.reason,
            "gain": verdict.gain,
            "low90": verdict.low90,
            "worth": self.worth,
        }


COLUMNS = (
    "adapters",
    "judged",
    "promoted",
    "gain by the gate",
    "tokens per call on other prompts",
    "of these at least +2 %",
)


def cells(judged: Sequence[Judged]) -> tuple[tuple[object, ...], ...]:
    """A row for each kind: least, median and largest gain and worth."""
    found: list[tuple[object, ...]] = []
    for kind in Kind:
        mine = [one for one in judged if one.candidate.kind is kind]
        if not mine:
            continue
        worth = [one.worth for one in mine if one.worth is not None]
        good = [one for one in mine if one.worth is not None and one.worth >= 0.02]
        kept = f"{len(good)}, promoted {sum(one.verdict.promoted for one in good)}" if worth else ""
        spread = (_spread([one.verdict.gain for one in mine]), _spread(worth) if worth else "")
        found.append((kind.value, len(mine), sum(one.verdict.promoted for one in mine), *spread, kept))
    return tuple(found)


def _spread(values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, (0.0, 0.5, 1.0)).tolist()
    return f"{low:+.1%}, {middle:+.1%}, {high:+.1%}"


def run_gate(
    settings: Settings,
    models: tuple[Path, Path],
    general: Path | None,
    learn: Sequence[PromptLine],
    test: Sequence[PromptLine],
    folder: Path,
    *,
    count: int = 20,
    noisy: int = 100,
    cases: int = 400,
    max_tokens: int = 128,
    rows: int = 16,
    on_step: Step = lambda stage, done, of: None,
) -> Generator[Judged]:
    """Each candidate as soon as it is judged. models: target and draft folders. folder: keeps the trained adapters and what
    each is worth; what is there already is taken from there, so that one machine can train and another judge.
    count: adapters trained of either kind, each on `cases` texts of its own draw. noisy: so many with noise.

    Raises RedraftError.
    """
    mx.set_cache_limit(CACHE_BYTES)
    pair = load_pair(*models)
    assert pair.draft is not None
    held = [line for line in learn if split_of(line.prompt) == HELD_OUT][: settings.gate.max_prompts]
    learnt = [line for line in learn if split_of(line.prompt) != HELD_OUT]
    if len(learnt) < cases or len(held) < settings.gate.min_prompts:
        raise BadRequest(f"{len(learnt)} prompts to learn from and {len(held)} held out are too few", field="train")
    costs = profile.measure(pair.target.model, pair.draft.model, rows=[1], most=DRAFTED)

    def told(stage: str, lines: Sequence[PromptLine]) -> list[Generation]:
        return answered(settings, pair, stage, lines, max_tokens, rows, on_step)

    bench = _Bench(
        settings,
        pair,
        models[1],
        general,
        cases,
        seconds=[costs.round(Load(1, USUALLY_HELD), n) for n in range(1, DRAFTED + 1)],
        held=told("held-out texts", held),
        texts=cache(lambda: told("texts to learn from", learnt)),
        other=cache(lambda: told("other prompts", test)),
        folder=folder,
    )
    trained = [Candidate(kind, seed) for seed in range(1, count + 1) for kind in (Kind.BETTER, Kind.SHUFFLED)]
    order = [*trained, *(Candidate(Kind.NOISY, seed) for seed in range(1, noisy + 1))]
    for i, candidate in enumerate(order):
        on_step(candidate.kind, i, len(order))
        yield bench.judged(candidate)


@dataclass(slots=True)
class _Bench:
    """The pair, its texts, and where adapters are kept."""

    settings: Settings
    pair: Pair
    draft_folder: Path
    general: Path | None
    cases: int
    seconds: Sequence[float]
    held: Sequence[Generation]
    texts: Callable[[], Sequence[Generation]]
    other: Callable[[], Sequence[Generation]]
    folder: Path
    _scores_of: dict[str, list[Score]] = field(default_factory=dict[str, list[Score]])

    def judged(self, candidate: Candidate) -> Judged:
        noisy = candidate.kind is Kind.NOISY
        active = Candidate(Kind.BETTER, 1) if noisy else None
        if (name := _name(active)) not in self._scores_of:
            self._scores_of[name] = self._scored(active)
        verdict = gate.judge(
            self._scored(candidate),
            self._scores_of[name],
            self.settings.gate,
            seconds=self.seconds,
            seed=candidate.seed,
        )
        return Judged(candidate, verdict, None if noisy else self._per_call(candidate) / self._per_call(None) - 1.0)

    def _scored(self, candidate: Candidate | None, told: Sequence[Generation] | None = None) -> list[Score]:
        """Of the held-out texts unless said. None: the bare draft."""
        assert self.pair.draft is not None
        with self._wearing(candidate):
            model = as_served(self.pair.draft.model, vocabulary.read(self.draft_folder))
            return score(model, told or self.held, k=DRAFTED, vocabulary=self.pair.vocabulary)

    def _per_call(self, candidate: Candidate | None) -> float:
        name, known = _name(candidate), self._truths()
        if name not in known:
            scores = self._scored(candidate, self.other())
            known[name] = sum(s.tokens for s in scores) / sum(s.calls[-1] for s in scores)
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / TRUTHS).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        return known[name]

    def _truths(self) -> dict[str, float]:
        path = self.folder / TRUTHS
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @contextmanager
    def _wearing(self, candidate: Candidate | None) -> Generator[None]:
        """The pair's draft with the candidate on it for a while."""
        assert self.pair.draft is not None
        worn = Candidate(Kind.BETTER, 1) if candidate and candidate.kind is Kind.NOISY else candidate
        path = self.folder / worn.name if worn else None
        if worn and path and not (path / lora.CONFIG).is_file():
            self._train(worn, path)
        with adapted(self.pair.draft.model, path, self.pair.provenance.draft) as draft:
            if candidate and candidate.kind is Kind.NOISY:
                _disturb(draft, NOISES[(candidate.seed - 1) % len(NOISES)], candidate.seed)
            yield

    def _train(self, candidate: Candidate, path: Path) -> None:
        assert self.pair.draft is not None
        draft, training, who = self.pair.draft.model, self.settings.training, self.pair.provenance
        fresh = random.Random(candidate.seed).sample(self.texts(), self.cases)
        examples = one_run(self.settings, self.pair, self.general, fresh, candidate.seed)
        if candidate.kind is Kind.SHUFFLED:
            examples = shuffled(examples, candidate.seed)
        shape = lora.wrap(draft, rank=training.rank, scale=training.scale, seed=candidate.seed)
        try:
            fit(draft, examples, training, seed=candidate.seed)
            lora.save(draft, shape, path, draft=who.draft, target=who.target)
        finally:
            lora.detach(draft)


def _name(candidate: Candidate | None) -> str:
    return candidate.name if candidate else "bare"


def shuffled(examples: Sequence[Example], seed: int) -> list[Example]:
    """The same texts, each position with the target's distribution at some other position of some text."""
    ids, logprobs, tail = (
        np.concatenate([getattr(example, name) for example in examples]) for name in ("ids", "logprobs", "tail")
    )
    order = np.random.default_rng(seed).permutation(len(tail))
    ends = np.cumsum([example.positions for example in examples])
    parts = np.split(order, ends[:-1])
    return [
        replace(example, ids=ids[at], logprobs=logprobs[at], tail=tail[at])
        for example, at in zip(examples, parts, strict=True)
    ]


def _disturb(draft: nn.Module, share: float, seed: int) -> None:
    """Noise on every matrix of the adapter, of `share` times its own deviation. Drawn by numpy: the same on any machine."""
    rng = np.random.default_rng(seed)
    noisy: list[tuple[str, mx.array]] = []
    for name, array in lora.weights_of(draft).items():
        held = np.array(array.astype(mx.float32))
        noise = rng.standard_normal(held.shape) * share * held.std()
        noisy.append((name, mx.array((held + noise).astype(np.float32)).astype(array.dtype)))
    draft.load_weights(noisy, strict=False)
