"""Writes generations until it is killed, and prints each id once it is stored. Arguments: URL, prefix of the ids."""

import itertools
import sys
import zlib

from service.store.database import Database
from service.store.log.generations import Generations
from tests.support.store_rows import case, generation, targets

store = Generations(Database(sys.argv[1]))
for number in itertools.count():
    name = f"{sys.argv[2]}-{number}"
    output = (1, 2, 3, zlib.crc32(name.encode()))
    store.add([generation(id=name, output=output, cases=[case(0), case(1)], collected=targets(4))]).result()
    print(name, flush=True)
