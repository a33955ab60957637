"""Settings of MLX that are environment variables, read once when its CUDA back end is first used.

MLX cuts what it evaluates into CUDA graphs and caches them by their nodes and dependencies. Batches whose rows join, leave and
differ in length make new ones all day. By default MLX raises "Cache thrashing is happening" after 800 misses in the life of a
process, however far apart, and the process ends with it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

DEFAULTS = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_SDPA_CACHE_SIZE": "4096",
}
"""More graphs than MLX's 400 and more attention plans than its 256, so that those in use stay; and no error where there are
more still: the oldest go."""


def set_mlx_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the operator has not set. Child processes inherit it."""
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
