"""What is counted by adapter version, however many versions there come to be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from service.core import BARE_DRAFT
from service.metrics.definitions import METRICS, OLDER, PREFIX

ADAPTER_COUNTERS = tuple(item for item in METRICS if item.labels == ("adapter",))
DRAFTS, DRAFTED, ACCEPTED, FAILURES = range(len(ADAPTER_COUNTERS))
"""Their places."""


class AdapterCounts(Collector):
    """Counters per adapter version for the `kept` versions used last; what others had counted is added up as OLDER.

    The unlabelled totals are separate metrics because folding moves counts: a rate over the sum of these series would
    show what an old version had ever counted as if it happened now.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._lock = Lock()
        self._versions: OrderedDict[int, list[int]] = OrderedDict({BARE_DRAFT: [0] * len(ADAPTER_COUNTERS)})
        self._older = [0] * len(ADAPTER_COUNTERS)

    def add(self, adapter: int, counts: Iterable[tuple[int, int]]) -> None:
        """Add to an adapter's counters: pairs of a counter's place (DRAFTS, DRAFTED, ACCEPTED, FAILURES) and an amount.
        Thread-safe."""
        with self._lock:
            row = self._versions.setdefault(adapter, [0] * len(ADAPTER_COUNTERS))
            self._versions.move_to_end(adapter)
            for index, amount in counts:
                row[index] += amount
            while len(self._versions) > self._kept:
                _, folded = self._versions.popitem(last=False)
                self._older = [mine + theirs for mine, theirs in zip(self._older, folded, strict=True)]

    def collect(self) -> Iterable[Metric]:
        """One counter family per metric, with a sample per adapter version and one for OLDER. Called at every scrape."""
        with self._lock:
            rows = [(str(adapter), tuple(row)) for adapter, row in self._versions.items()] + [
                (OLDER, tuple(self._older))
            ]
        for index, item in enumerate(ADAPTER_COUNTERS):
            family = CounterMetricFamily(PREFIX + item.name, item.help, labels=item.labels)
            for label, row in rows:
                family.add_metric([label], row[index])
            yield family
