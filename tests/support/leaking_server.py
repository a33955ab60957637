"""`redraft` whose recorder never lets go of 20 kB for each answer, to see that a leak is noticed."""

import os
from typing import Any

from service.cli import main
from service.lifecycle.recorder import Recorder

LEAK_BYTES = 20_000
_held: list[bytes] = []
_record: Any = Recorder.record


def _leak(self: Recorder, generation: Any) -> None:
    # Random: pages that were never written are not in memory.
    _held.append(os.urandom(LEAK_BYTES))
    _record(self, generation)


Recorder.record = _leak

if __name__ == "__main__":
    main()
