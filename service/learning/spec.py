"""The job of a child process, received as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from pydantic import ValidationError

from service.core import Provenance, TrainingFailed
from service.settings import GateSettings, TrainingSettings


@dataclass(frozen=True, slots=True)
class Practice:
    """folder: practice text of this and earlier runs. minutes: for writing and training."""

    folder: Path
    minutes: float


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Train one adapter on the texts that a run claimed, publish it, score it and its parent.

    url: of the database. fencing: the run's token at the start of the job. parent: folder of the adapter to train on,
    None for the base draft (parent_id 0). out: root of the adapter folders. general: file of the general set, or None.
    cache: folder of computed targets (see TargetCache). k: longest draft length to score at. practice: train on text
    that the target writes; None: on the claimed texts. window: minimum number of generations to learn from, see
    TrainingSettings. own_texts_only: learn only from the claimed texts, to find out whether they cause a crash. memory:
    bytes lent by serving that the process may take; None: what is free.
    """

    url: str
    run: int
    fencing: int
    target: Path
    draft: Path
    parent: Path | None
    parent_id: int
    out: Path
    general: Path | None
    cache: Path
    training: TrainingSettings
    gate: GateSettings
    k: int
    provenance: Provenance
    window: int
    practice: Practice | None = None
    own_texts_only: bool = False
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Score several adapters on the same logged generations. adapters: id -> folder, None for the base draft. k:
    longest draft length to score at. seconds: time for scoring if `gate.max_tokens` is not set."""

    url: str
    target: Path
    draft: Path
    adapters: Mapping[str, Path | None]
    generations: tuple[str, ...]
    training: TrainingSettings
    gate: GateSettings
    k: int
    provenance: Provenance
    seconds: float = 0.0


JobSpec: TypeAlias = TrainJob | ScoreJob


def parse(line: str) -> JobSpec:
    """Parses a job from a line of JSON. Raises TrainingFailed naming what is missing or wrong."""
    try:
        spec = cast("dict[str, Any]", json.loads(line))
        training = TrainingSettings(**spec.get("training", {}))
        provenance = Provenance(**spec["provenance"])
        common: dict[str, Any] = {
            "url": str(spec["url"]),
            "target": Path(spec["target"]),
            "draft": Path(spec["draft"]),
            "training": training,
            "gate": GateSettings(**spec.get("gate", {})),
            "k": int(spec["k"]),
            "provenance": provenance,
        }
        if spec["kind"] == "train":
            return TrainJob(
                **common,
                run=int(spec["run"]),
                fencing=int(spec["fencing"]),
                parent=_folder(spec["parent"]),
                parent_id=int(spec["parent_id"]),
                out=Path(spec["out"]),
                general=_folder(spec["general"]),
                cache=Path(spec["cache"]),
                window=int(spec.get("window", training.window)),
                practice=_practice(spec.get("practice")),
                own_texts_only=bool(spec.get("own_texts_only", False)),
                memory=None if spec.get("memory") is None else int(spec["memory"]),
            )
        if spec["kind"] == "score":
            return ScoreJob(
                **common,
                adapters={str(name): _folder(folder) for name, folder in spec["adapters"].items()},
                generations=tuple(map(str, spec["generations"])),
                seconds=float(spec.get("seconds", 0.0)),
            )
    except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise TrainingFailed(f"the job description is incomplete or wrong: {error!r}") from error
    raise TrainingFailed(f"unknown kind of job: {spec['kind']!r}")


def _practice(value: Mapping[str, Any] | None) -> Practice | None:
    return None if value is None else Practice(Path(value["folder"]), float(value["minutes"]))


def _folder(value: object) -> Path | None:
    return None if value is None else Path(str(value))
