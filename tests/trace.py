"""Where the engine's thread spends its time: one line for each of its turns, and what turns of a kind have in common.

    uv run python -m tests.trace FOLDER serve --draft none
    uv run python -m tests.trace FOLDER bench serve --clients 16 --arms plain,static
    uv run python -m tests.trace --show FOLDER/FILE.jsonl [--running 12]

The words after the folder are those of `redraft`; every server that it starts, in this process or another, writes a file of its
own. A kind says what was launched (`ahead`: behind a round that was not read yet) and read, with the tokens proposed for a row
(`probe`: a try of a parked draft; `looked up`), and what else a turn did. The processor's time includes that in which it asks
the device whether it is done.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, TextIO

from service.cli import main as redraft
from service.engine import decoder, device
from service.engine.decoder import Decoder
from service.engine.drafters.model import ModelDrafter
from service.engine.kv.prefix import PrefixCache
from service.engine.replay import Replay
from service.engine.rounds import Outcome, Plan, Step
from service.engine.runner import Runner
from service.engine.thread import EngineThread
from service.evaluation import server_process

CALLS: list[tuple[Any, str]] = [
    (EngineThread, "_schedule"),
    (EngineThread, "_flush"),
    (Decoder, "prefill"),
    (decoder, "prefill_target"),
    (decoder, "prefill_draft"),
    (Decoder, "join"),
    (Decoder, "_complete"),
    (Decoder, "_remove"),
    (Runner, "_propose"),
    (ModelDrafter, "catch_up"),
    (Runner, "_verify"),
    (Runner, "launch"),
    (Runner, "launch_after"),
    (Step, "read"),
    (Replay, "__call__"),
    (Replay, "_new_trace"),
    (PrefixCache, "insert"),
    (PrefixCache, "copy"),
    (device, "launch"),
    (device, "wait"),
]
"""Timed, each with what it calls."""
ALSO = {"prefill": "prefill", "_remove": "leave", "_new_trace": "trace"}
"""What a kind says besides its rounds, by the call that shows it."""


@dataclass(slots=True)
class Turn:
    """A turn of the engine's thread, in milliseconds. running: requests. tokens: emitted. calls: number and time by name."""

    at: float
    wall: float = 0.0
    cpu: float = 0.0
    running: int = 0
    tokens: int = 0
    rounds: list[str] = field(default_factory=list[str])
    calls: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    @property
    def kind(self) -> str:
        """See the module's own text."""
        return ", ".join([*self.rounds, *(word for name, word in ALSO.items() if name in self.calls)]) or "nothing"


class Tracer:
    """Writes the turns of this process's engine to a file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._turn = Turn(0.0)
        for owner, name in CALLS:
            setattr(owner, name, self._timed(getattr(owner, name), f"{owner.__name__}.{name}", name))
        setattr(EngineThread, "_turn", self._whole(EngineThread._turn))  # noqa: B010  (it has other parameters by name)

    def _timed(self, call: Callable[..., Any], label: str, name: str) -> Callable[..., Any]:
        label = label.removeprefix("service.engine.")

        def timed(*positional: Any, **named: Any) -> Any:
            if threading.current_thread().name != "redraft-mlx":
                return call(*positional, **named)
            started_at = time.perf_counter()
            made = call(*positional, **named)
            turn = self._turn
            for key in {label, name} if name in ALSO else {label}:
                count, before = turn.calls.get(key, (0, 0.0))
                turn.calls[key] = (count + 1, before + 1e3 * (time.perf_counter() - started_at))
            if name in ("launch", "launch_after") and isinstance(made, Step):
                choice = made.plan.choice
                words = ["launch" if name == "launch" else "ahead", str(choice.proposed)]
                turn.rounds.append(" ".join(words + ["probe"] * choice.probe + ["looked up"] * any(choice.looked_up)))
            if isinstance(made, Outcome):
                plan: Plan = positional[0].plan
                turn.rounds.append(f"read {plan.choice.proposed}")
                live = [row.finish is None and not row.padding for row in plan.rows]
                turn.tokens += sum(len(new) for new, counts in zip(made.emitted, live, strict=True) if counts)
            return made

        return timed

    def _whole(self, call: Callable[[EngineThread, Any], None]) -> Callable[[EngineThread, Any], None]:
        def whole(thread: EngineThread, engine: Any) -> None:
            started_at, cpu = time.perf_counter(), time.thread_time()
            self._turn = turn = Turn(1e3 * started_at)
            call(thread, engine)
            turn.wall, turn.cpu = 1e3 * (time.perf_counter() - started_at), 1e3 * (time.thread_time() - cpu)
            turn.running = len(thread._scheduler.running)
            if turn.rounds or "prefill" in turn.calls:
                print(json.dumps(asdict(turn)), file=self._file, flush=True)

        return whole


def read(file: Path) -> list[Turn]:
    """The turns of a file."""
    return [Turn(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def table(turns: Sequence[Turn], kinds: int = 20) -> list[str]:
    """The kinds that took longest: number, share of the time, milliseconds a turn, tokens, and its longest calls."""
    groups: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        groups[turn.kind].append(turn)
    total = sum(turn.wall for turn in turns)
    lines = [f"{len(turns)} turns, {total / 1e3:.2f} s, {sum(turn.tokens for turn in turns)} tokens"]
    for kind, alike in sorted(groups.items(), key=lambda item: -sum(turn.wall for turn in item[1]))[:kinds]:
        spent: dict[str, float] = defaultdict(float)
        for turn in alike:
            for name, (_, wall) in turn.calls.items():
                if "." in name:
                    spent[name] += wall / len(alike)
        longest = sorted(spent.items(), key=lambda item: -item[1])[:8]
        walls, cpu, tokens = ([getattr(turn, name) for turn in alike] for name in ("wall", "cpu", "tokens"))
        lines.append(
            f"{kind}: {len(alike)} turns, {sum(walls) / total:.1%}, median {median(walls):.1f} ms, mean {mean(walls):.1f}, "
            f"{mean(cpu):.1f} of the processor, {mean(tokens):.1f} tokens; "
            + ", ".join(f"{name} {wall:.1f}" for name, wall in longest)
        )
    return lines


def main(words: Sequence[str]) -> None:
    if words[0] == "--show":
        least = int(words[words.index("--running") + 1]) if "--running" in words else 0
        print("\n".join(table([turn for turn in read(Path(words[1])) if turn.running >= least])))
        return
    folder = Path(words[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    usual = server_process.python_command

    def traced(*command: str) -> list[str]:
        if command[:3] != ("-m", "service.cli", "serve"):
            return usual(*command)
        return [sys.executable, "-m", "tests.trace", str(folder), *command[2:]]

    server_process.python_command = traced
    config = Path(words[words.index("--config") + 1]) if "--config" in words else None
    name = f"{config.parent.name if config is not None else words[1]}-{os.getpid()}.jsonl"
    with (folder / name).open("w", encoding="utf-8") as file:
        Tracer(file)
        sys.argv = ["redraft", *words[1:]]
        redraft()


if __name__ == "__main__":
    main(sys.argv[1:])
