"""What recording costs: decoding with evidence collected and written, against decoding without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from service.core import Prompt, Sampling
from service.engine import profile
from service.engine.adapters import Draft, served
from service.engine.costs import Costs
from service.engine.decoder import Decoder
from service.engine.planner import Planner
from service.engine.request import Request
from service.evaluation.prompts import encode_prompts
from service.evaluation.sql_prompts import traffic_prompts
from service.lifecycle.recorder import Recorder
from service.models.pair import Pair
from service.settings import EngineSettings, sqlite_url
from service.store.database import Database, upgrade
from service.store.log.generations import Generations

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
    """Tokens per second of `rows` streams of `tokens` tokens, by ON and OFF, one entry a turn; prefill is not timed.

    With recording the time ends when the database, which is made in `folder`, has everything; a server writes most of that
    during the next answers. The planner chooses draft lengths as in a server, without prompt look-up. on_step: (turns done, of
    all).
    """
    assert pair.draft is not None
    url = sqlite_url(folder / "recording.db")
    upgrade(url)
    database = Database(url)
    recorder = Recorder(Generations(database))
    streams = _Streams(pair, served(pair.draft), engine, recorder, rows, tokens)
    rates: dict[str, list[float]] = {ON: [], OFF: []}

    def prompts(seed: int) -> list[tuple[int, ...]]:
        return encode_prompts(pair, traffic_prompts(rows, seed=seed))

    try:
        # Not counted: the first run pays for what happens once.
        streams.tokens_per_second(prompts(turns), f"{rows}-warm", record=True)
        for turn in range(turns):
            on_step(turn, turns)
            chosen = prompts(turn)
            for name in (ON, OFF) if turn % 2 == 0 else (OFF, ON):
                rates[name].append(streams.tokens_per_second(chosen, f"{rows}-{turn}", record=name == ON))
    finally:
        recorder.close(FLUSH_SECONDS)
        database.close()
    return rates


class _Streams:
    """Decodes streams of equal length together. The costs of rounds are measured once: both ways plan by the same."""

    def __init__(
        self, pair: Pair, draft: Draft, engine: EngineSettings, recorder: Recorder, rows: int, tokens: int
    ) -> None:
        self._pair = pair
        self._draft = draft
        self._engine = engine
        self._recorder = recorder
        self._tokens = tokens
        self._costs: Costs | None = None
        if engine.adaptive and (k := engine.num_draft_tokens):
            self._costs = profile.measure(pair.target.model, draft.model, rows=profile.sizes(rows), most=k)

    def tokens_per_second(self, prompts: Sequence[tuple[int, ...]], name: str, *, record: bool) -> float:
        decoder = self._decoder(record)
        # No end token: every stream is equally long.
        made = [
            Request(f"{name}-{i}", Prompt(prompt, Sampling(max_tokens=self._tokens)), frozenset(), None)
            for i, prompt in enumerate(prompts)
        ]
        for row in made:
            decoder.admit(row)
        started = time.perf_counter()
        while decoder.rows:
            for row in decoder.round().rows:
                if row.finish is not None and (generation := row.generation(self._pair.provenance)) is not None:
                    self._recorder.record(generation)
        self._recorder.flush(FLUSH_SECONDS)
        return sum(row.emitted for row in made) / (time.perf_counter() - started)

    def _decoder(self, record: bool) -> Decoder:
        engine = self._engine
        decoder = Decoder(
            self._pair.target.model,
            self._draft,
            vocabulary=self._pair.vocabulary,
            k=engine.num_draft_tokens,
            prefill_chunk=engine.prefill_chunk,
            tie_margin=engine.tie_margin,
            collect=record,
            adaptive=engine.adaptive,
        )
        if self._costs is not None:
            decoder.planner = Planner(engine.num_draft_tokens, 0, self._costs)
        return decoder
