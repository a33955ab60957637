"""A process that claims, promotes or rolls back whenever it is told to, at the same moment as others. Lines in: the draft whose
run to claim. Lines out: the run's id, or 0."""

import sys
from dataclasses import replace

from service.core import Trigger
from service.store.database import Database
from service.store.processes.members import Members
from service.store.registry.runs import Runs
from tests.support.store_rows import WHO

database = Database(sys.argv[1])
members = Members(database)
members.join()
runs = Runs(database)
print("ready", flush=True)
for line in sys.stdin:
    run = runs.claim(
        trigger=Trigger.CASES, who=replace(WHO, draft=line.strip()), parent=0, limit=9, owner=members.token
    )
    print(0 if run is None else run.id, flush=True)
members.leave()
database.close()
