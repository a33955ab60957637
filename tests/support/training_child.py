"""Training jobs: a real database, models on disk, and the job in a process of its own or in this one."""

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from service.core import Generation, Provenance, RunState, Sampling, TrainingRun, Trigger
from service.learning import job
from service.learning.channel import ORPHANED, Channel
from service.learning.general_set import GeneralSet
from service.models import eagle, vocabulary
from service.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from service.settings import GateSettings, TrainingSettings
from service.store.database import Database
from service.store.log.generations import Generations
from service.store.log.training_texts import TrainingTexts
from service.store.registry.runs import Runs
from tests.support.eagle_models import plain_llama, tiny_head
from tests.support.logged_texts import served
from tests.support.model_folders import save_model
from tests.support.oracle import noisy_copy, tiny_llama

Message = dict[str, Any]
GATE: Message = {"min_prompts": 5, "min_tokens": 100}
TRAINING: Message = {"epochs": 6, "replay": 0.25, "learning_rate": 1e-2, "rank": 8, "max_length": 96, "niceness": 7}

SMALL_PRACTICE: Message = {"LENGTH": 64, "TURN": 12, "MOST_ROWS_CPU": 16, "ROWS_A_MINUTE_CPU": 1e4, "BATCH": 8}
"""Values of service.learning.practice, for texts of tiny models."""


@dataclass
class LoggedPair:
    """A pair and a general set on disk, and generations logged with them."""

    root: Path
    target: Path
    draft: Path
    general: Path
    who: Provenance
    logged: list[Generation]


def make_logged_pair(root: Path, reduced: Sequence[int]) -> LoggedPair:
    """A tiny pair whose draft has a reduced vocabulary, 60 generations, half of the domain sql, and a general set."""
    target = tiny_llama(1, sharpness=8.0)
    draft = noisy_copy(target, 2, 0.5)
    samplings = [Sampling(max_tokens=24), Sampling(temperature=0.8, seed=3, max_tokens=24), Sampling(temperature=0.7)]
    samplings = [replace(samplings[i % 3], max_tokens=24) for i in range(60)]
    general = served(target, draft, [Sampling(max_tokens=16)] * 40, k=3, seed=7)
    made = _saved(root, (target, draft), reduced, served(target, draft, samplings, k=3), general)
    for i, one in enumerate(made.logged):
        made.logged[i] = replace(one, prompt=replace(one.prompt, domain="sql" if i % 2 else None))
    return made


def make_logged_head(root: Path, reduced: Sequence[int] | None = None) -> LoggedPair:
    """A tiny target and a head, 30 generations, and a general set of the first. reduced: the head's vocabulary; None: it has
    none."""
    target = plain_llama(1, sharpness=8.0)
    samplings = [Sampling(max_tokens=24), Sampling(temperature=0.8, seed=3, max_tokens=24)] * 15
    logged = served(target, tiny_llama(5), samplings, k=2)
    return _saved(root, (target, tiny_head(target, 2)), reduced, logged, logged[:5])


def _saved(
    root: Path,
    models: tuple[llama.Model, llama.Model | eagle.Model],
    reduced: Sequence[int] | None,
    logged: Sequence[Generation],
    general: Sequence[Generation],
) -> LoggedPair:
    """Target and draft on disk, and what was logged with them."""
    folders = save_model(models[0], root / "target"), save_model(models[1], root / "draft")
    if reduced is not None:
        vocabulary.write(reduced, folders[1])
    return log_pair(root, folders, logged, general)


def log_pair(
    root: Path, folders: tuple[Path, Path], logged: Sequence[Generation], general: Sequence[Generation]
) -> LoggedPair:
    """A pair on disk, and what was logged with it; every tenth text is without the target's distribution."""
    who = Provenance(model_fingerprint(folders[0]), tokenizer_fingerprint(folders[0]), model_fingerprint(folders[1]))
    named = [
        replace(
            g,
            id=f"g{i}",
            prompt=replace(g.prompt, first_user=f"question {i}"),
            provenance=who,
            targets=None if i % 10 == 1 else g.targets,
        )
        for i, g in enumerate(logged)
    ]
    GeneralSet.of((g.prompt.tokens, g.output) for g in general).save(root / "general.npz")
    return LoggedPair(root, *folders, root / "general.npz", who, named)


def use_many_templates(pair: LoggedPair) -> LoggedPair:
    """The pair with prompts of up to 40 templates: those after them differ from others in a number alone."""
    for i, one in enumerate(pair.logged):
        words = f"{'abcdefghij'[i % 10] * (1 + i % 40)} {i}"
        pair.logged[i] = replace(one, prompt=replace(one.prompt, first_user=words))
    return pair


class Home:
    """A database that holds the logged generations, and a folder for adapters. url: of an empty one."""

    def __init__(self, logged_pair: LoggedPair, root: Path, url: str) -> None:
        self.logged_pair = logged_pair
        self.out = root / "adapters"
        self.out.mkdir()
        self.cache = root / "targets"
        self.url = url
        self.database = Database(url)
        Generations(self.database).add(logged_pair.logged).result(60)
        self.runs = Runs(self.database)

    def spec(self, *, training: Message | None = None, gate: Message | None = None, **changes: object) -> Message:
        """A claimed run's job."""
        run = self.runs.claim(trigger=Trigger.MANUAL, who=self.logged_pair.who, parent=0, limit=30)
        assert run is not None
        self.runs.move(run.id, run.fencing, RunState.TRAINING)
        return self.spec_of(run, training=training, gate=gate) | changes

    def spec_of(self, run: TrainingRun, *, training: Message | None = None, gate: Message | None = None) -> Message:
        """The job of a run that is being trained."""
        return {
            "kind": "train",
            "tie_margin": 1e-3,
            "url": self.url,
            "run": run.id,
            "fencing": run.fencing,
            "target": str(self.logged_pair.target),
            "draft": str(self.logged_pair.draft),
            "parent": None,
            "parent_id": 0,
            "out": str(self.out),
            "general": str(self.logged_pair.general),
            "cache": str(self.cache),
            "training": TrainingSettings(**(TRAINING | (training or {}))).model_dump(),
            "gate": GateSettings(**(GATE | (gate or {}))).model_dump(),
            "k": 3,
            "provenance": asdict(self.logged_pair.who),
        }

    def practice_spec(self, folder: Path, minutes: float) -> Message:
        """The job of a claimed practice run. folder: of practice text."""
        who = self.logged_pair.who
        seeds = TrainingTexts(self.database).seeds(who, 100)
        run = self.runs.claim(trigger=Trigger.PRACTICE, who=who, parent=0, limit=100, seeds=seeds)
        assert run is not None
        self.runs.move(run.id, run.fencing, RunState.TRAINING)
        spec = self.spec_of(run, training={"practice_rank": 12})
        return spec | {"practice": {"folder": str(folder), "minutes": minutes}}

    def published(self) -> list[str]:
        return sorted(path.name for path in self.out.iterdir())


class Child:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout

    def send_line(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def message(self) -> Message:
        line = self.stdout.readline()
        assert line, f"the child ended: {self.process.wait(30)}"
        return json.loads(line)

    def read_to_end(self) -> list[Message]:
        """All messages of a job that ends by itself; after it the child waits, and ends with its stdin."""
        found = [self.message()]
        while found[-1]["type"] not in {"done", "failed"}:
            found.append(self.message())
        self.stdin.close()
        assert self.process.wait(30) == ORPHANED
        return found

    def until_training(self) -> Message:
        """Its first progress, which what it learns from comes before."""
        while (message := self.message())["type"] == "texts":
            pass
        assert message["type"] == "progress", message
        return message


@contextmanager
def child(spec: object) -> Generator[Child]:
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "service.learning.job"],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    # Reading from it ends, even if it hangs.
    end = threading.Timer(180, process.kill)
    end.start()
    try:
        with process:
            running = Child(process)
            running.send_line(spec if isinstance(spec, str) else json.dumps(spec))
            try:
                yield running
            finally:
                process.kill()
    finally:
        end.cancel()
        assert process.poll() is not None


class RecordingChannel(Channel):
    """A channel without streams: the messages of a job as a list. Nothing watches for the parent's end."""

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        super().__init__(-1, io.StringIO())
        self.messages: list[Message] = []
        self._on_message = on_message

    def send(self, kind: str, message: Mapping[str, object] | None = None) -> None:
        # As they come out of the pipe.
        self.messages.append(json.loads(json.dumps({"type": kind, **(message or {})})))
        self._on_message(self.messages[-1])


def perform(spec: Message, on_message: Callable[[Message], None] = lambda message: None) -> list[Message]:
    """The messages of a job that runs in this process, which keeps its priority. A child's 4 s of imports are saved."""
    channel = RecordingChannel(on_message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "lower_priority", lambda niceness: None)
        before = mx.set_cache_limit(job.CACHE_BYTES)
        try:
            job.perform(channel, json.dumps(spec))
        finally:
            mx.set_cache_limit(before)
    return channel.messages


def of_type(messages: list[Message], kind: str) -> list[Message]:
    return [message for message in messages if message["type"] == kind]
