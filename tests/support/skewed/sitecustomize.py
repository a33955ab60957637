"""On the PYTHONPATH of a process: its clock is off by SKEW seconds. Waits are not."""

import datetime
import os
import time

_skew = float(os.environ["SKEW"])
_time = time.time


class _Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Skewed":
        return super().now(tz) + datetime.timedelta(seconds=_skew)


datetime.datetime = _Skewed
time.time = lambda: _time() + _skew
