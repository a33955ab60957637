"""MLX's environment variables are set before it is imported, unless the operator set them."""

import json
import os
import subprocess
import sys

import pytest

NAMES = ("MLX_CUDA_GRAPH_CACHE_SIZE", "MLX_ENABLE_CACHE_THRASHING_CHECK")
SCRIPT = """
import json, os, subprocess, sys
import {module}
assert "mlx.core" in sys.modules or not {loads}
mine = [os.environ.get(name) for name in {names}]
own = "import json, os; print(json.dumps([os.environ.get(name) for name in {names}]))"
child = json.loads(subprocess.run([sys.executable, "-c", own], capture_output=True, check=True, text=True).stdout)
print(json.dumps([mine, child]))
"""


def seen(module: str, loads: bool, **operator: str) -> list[list[str | None]]:
    """The variables in a process that imported a module of the service, and in a child of it."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | operator
    script = SCRIPT.format(module=module, loads=loads, names=NAMES)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("module", "loads"), [("service", False), ("service.engine.sampling", True)])
def test_graphs_are_cached_by_the_thousand_and_misses_end_nothing(module: str, loads: bool) -> None:
    mine, child = seen(module, loads)
    assert mine == child
    size, check = mine
    assert size is not None and int(size) >= 4096 and check == "0"


def test_variables_set_by_the_operator_are_kept() -> None:
    for operator in ({NAMES[0]: "77"}, {NAMES[1]: "1"}, dict(zip(NAMES, ("500", "1"), strict=True))):
        mine, child = seen("service", False, **operator)
        assert mine == child
        assert {name: value for name, value in zip(NAMES, mine, strict=True) if name in operator} == operator
