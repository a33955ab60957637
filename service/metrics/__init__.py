"""Every metric and its definition. The one room that knows Prometheus."""

from service.metrics.definitions import CODES, METRICS, OLDER, PREFIX
from service.metrics.registry import Metrics

__all__ = ["CODES", "METRICS", "OLDER", "PREFIX", "Metrics"]
