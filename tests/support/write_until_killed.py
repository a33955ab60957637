"""Writes generations and says each one's id when it is stored, until it is killed. Arguments: URL, prefix of the ids."""

import itertools
import sys

from service.store.database import Database
from service.store.generations import Generations
from tests.support.store_rows import case, generation, targets

store = Generations(Database(sys.argv[1]))
for number in itertools.count():
    name = f"{sys.argv[2]}-{number}"
    store.add([generation(id=name, cases=[case(0), case(1)], collected=targets(5))]).result()
    print(name, flush=True)
