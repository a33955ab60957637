"""Every metric and its definition. The one room that knows Prometheus."""

from service.metrics.definitions import CODES, FINISHED_REASONS, METRICS, MODEL_LABEL, OLDER, PREFIX, TIES
from service.metrics.registry import Metrics

__all__ = ["CODES", "FINISHED_REASONS", "METRICS", "MODEL_LABEL", "OLDER", "PREFIX", "TIES", "Metrics"]
