"""Runs the tests that hold promises, and writes docs/promises.md: `just promises [daily | NUMBER ...]`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import mlx.core as mx

from tests.support.promises import DOCUMENT, ROOT, Outcome, document, marked

DAILY = "daily"
NO_TESTS = 5
"""pytest's exit status when it found none."""


def main(words: Sequence[str]) -> int:
    """Exit status of pytest. words: none for all tests at full length; DAILY: those of every day; numbers of promises: the
    tests of these, at full length, and no document."""
    daily = list(words) == [DAILY]
    numbers = [] if daily else [int(word) for word in words]
    tests = sorted({test for number in numbers for test in marked()[number]}) or ["tests"]
    which = f"promise and not bench and not own_process{' and not nightly' if daily else ''}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        long = ["-m", which, "--timeout", "3600", "-o", "faulthandler_timeout=11100"]
        command = [sys.executable, "-m", "pytest", "-p", "tests.support.promises", "--promises", str(file)]
        status = subprocess.run([*command, *long, *tests], cwd=ROOT, check=False).returncode
        found = json.loads(file.read_text(encoding="utf-8"))
        if not daily:
            # What measures speed runs alone.
            speed = subprocess.run([*command, "-n", "0", "-m", "promise and bench", *tests], cwd=ROOT, check=False)
            found += json.loads(file.read_text(encoding="utf-8"))
            status = status or speed.returncode * (speed.returncode != NO_TESTS)
    outcomes = [
        Outcome(one["test"], tuple(one["promises"]), one["outcome"], one["seconds"], tuple(one["figures"]))
        for one in found
    ]
    for one in (one for one in outcomes if one.figures or one.outcome == "failed"):
        print(one.outcome, one.test, "; ".join(one.figures), sep="\t")
    if not numbers:
        length = "the tests of every day" if daily else "every test at full length"
        device = mx.default_device().type.name
        where = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, MLX on the {device}"
        run = f"Run on {datetime.now(UTC):%Y-%m-%d}, {where}: {length}."
        DOCUMENT.write_text(document(outcomes, run), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
