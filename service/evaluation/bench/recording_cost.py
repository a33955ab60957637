"""What remembering traffic costs: decoding with evidence collected and written against decoding without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from service.core import Prompt, Sampling
from service.engine import profile
from service.engine.adapters import served
from service.engine.decoder import Decoder
from service.engine.planner import Planner
from service.engine.request import Request
from service.evaluation.sql_prompts import traffic
from service.lifecycle.recorder import Recorder
from service.models.pair import Pair
from service.models.text import TextEncoder
from service.settings import EngineSettings, sqlite_url
from service.store.database import Database, upgrade
from service.store.generations import Generations

ON, OFF = "record_on", "record_off"
FLUSH_SECONDS = 60.0


def measure_recording(
    pair: Pair,
    engine: EngineSettings,
    folder: Path,
    rows: int,
    *,
    turns: int,
    tokens: int,
    on_step: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, list[float]]:
    """Tokens per second of `rows` streams of `tokens` tokens, prompts read beforehand, one entry a turn for each way.

    With recording the time ends when the database (made in `folder`) has everything: in a server most of that goes on
    behind the next answers. What is drafted is chosen as in a server (nothing is looked up), in either way by the same
    costs.
    """
    assert pair.draft is not None
    encoder, draft = TextEncoder(pair.target.tokenizer), served(pair.draft)
    url = sqlite_url(folder / "recording.db")
    upgrade(url)
    database = Database(url)
    recorder = Recorder(Generations(database))
    rates: dict[str, list[float]] = {ON: [], OFF: []}
    k, costs = engine.num_draft_tokens, None
    if engine.adaptive and k:
        costs = profile.measure(pair.target.model, draft.model, rows=profile.sizes(rows), most=k)

    def run(prompts: Sequence[tuple[int, ...]], record: bool, name: str) -> float:
        decoder = Decoder(
            pair.target.model,
            draft,
            vocabulary=pair.vocabulary,
            k=k,
            prefill_chunk=engine.prefill_chunk,
            tie_margin=engine.tie_margin,
            collect=record,
            adaptive=engine.adaptive,
        )
        if costs is not None:
            # As served; and both arms by the same costs, or the ratio would be one of two measurements of them.
            decoder.planner = Planner(k, 0, costs)
        # No end token: every stream is equally long.
        made = [
            Request(f"{name}-{i}", Prompt(prompt, Sampling(max_tokens=tokens)), frozenset(), None)
            for i, prompt in enumerate(prompts)
        ]
        for row in made:
            decoder.admit(row)
        begun = time.perf_counter()
        while decoder.rows:
            for row in decoder.round().rows:
                if row.finish is not None and (generation := row.generation(pair.provenance)) is not None:
                    recorder.record(generation)
        recorder.flush(FLUSH_SECONDS)
        return sum(row.emitted for row in made) / (time.perf_counter() - begun)

    def texts(seed: int) -> list[tuple[int, ...]]:
        return [encoder.encode_chat([{"role": "user", "content": line.prompt}]) for line in traffic(rows, seed=seed)]

    try:
        # Who comes first would pay for what happens once.
        run(texts(turns), True, f"{rows}-warm")
        for turn in range(turns):
            on_step(turn, turns)
            prompts = texts(turn)
            for name in (ON, OFF) if turn % 2 == 0 else (OFF, ON):
                rates[name].append(run(prompts, name == ON, f"{rows}-{turn}"))
    finally:
        recorder.close(FLUSH_SECONDS)
        database.close()
    return rates
