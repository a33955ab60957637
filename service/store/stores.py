"""A process's database and everything that reads or writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.settings import Settings
from service.store.access.keys import Keys
from service.store.database import Database, upgrade
from service.store.log.cases import Cases
from service.store.log.generations import Generations
from service.store.log.quarantine import Quarantine
from service.store.log.training_texts import TrainingTexts
from service.store.processes.erasures import Erasures
from service.store.processes.round_costs import MeasuredCosts
from service.store.registry.adapters import Adapters
from service.store.registry.gains import Gains
from service.store.registry.lineage import Lineage
from service.store.registry.runs import Runs
from service.store.replay.buffer import Replay


@dataclass(frozen=True, slots=True)
class Stores:
    """An open database and the objects that read and write its tables. All share its connections and its writer."""

    database: Database
    generations: Generations
    training_texts: TrainingTexts
    cases: Cases
    runs: Runs
    adapters: Adapters
    gains: Gains
    lineage: Lineage
    replay: Replay
    quarantine: Quarantine
    costs: MeasuredCosts
    erasures: Erasures
    keys: Keys

    @classmethod
    def of(cls, database: Database, adapters: Path) -> Stores:
        """The objects for an open database. adapters: root of the adapter folders."""
        return cls(
            database=database,
            generations=Generations(database),
            training_texts=TrainingTexts(database),
            cases=Cases(database),
            runs=Runs(database),
            adapters=Adapters(database, adapters),
            gains=Gains(database),
            lineage=Lineage(database),
            replay=Replay(database),
            quarantine=Quarantine(database),
            costs=MeasuredCosts(database),
            erasures=Erasures(database),
            keys=Keys(database),
        )

    def close(self) -> None:
        """Completes queued writes, then closes the database."""
        self.database.close()


def open_stores(settings: Settings, *, create: bool = False) -> Stores:
    """Opens the database of these settings. create: create or upgrade it first. Raises StoreError."""
    if create:
        upgrade(settings.database_url)
    stores = Stores.of(Database(settings.database_url), settings.adapters_dir)
    if create:
        stores.adapters.adopt()
    return stores
