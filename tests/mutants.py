"""Applies one-line changes to a copy of the project, each of which must fail a named test: `just mutants [NAME ...]`.

The list is tests/mutants.toml. A change passes when its test fails (not when it cannot be collected); it fails when the test
still passes, or when its text no longer occurs exactly once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "service",
    "migrations",
    "configs",
    "tests",
    "docs",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "Justfile",
)
TIMEOUT_SECONDS = 300
FAILED = 1
"""pytest's exit status when tests ran and some failed; 2 to 5 mean that nothing was tried."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of `old`, which occurs once in `file`, to `new`; `test` is the pytest id that must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        """Change the file under `root`. Raises ValueError when the text does not occur exactly once."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has the text {count} times")
        path.write_text(text.replace(self.old, self.new))


def load(path: Path = ROOT / "tests" / "mutants.toml") -> list[Mutant]:
    """The list, in order."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text())["mutant"]]


def survives(mutant: Mutant) -> str | None:
    """Run the test of one change in a copy of the project. Returns why the change was not caught, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, root / name)
        try:
            mutant.apply(root)
        except ValueError as error:
            return f"no longer applies: {error}"
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", mutant.test]
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        try:
            run = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{mutant.test} did not end within {TIMEOUT_SECONDS} s"
        if run.returncode == 0:
            return f"{mutant.test} still passes"
        if run.returncode != FAILED or "failed" not in run.stdout.splitlines()[-1]:
            return f"{mutant.test} could not run:\n{run.stdout[-2000:]}"
        return None


def main(names: Sequence[str]) -> int:
    """Try the named changes, or all. Returns 0 when every one of them fails its test."""
    chosen = [mutant for mutant in load() if not names or mutant.name in names]
    if unknown := set(names) - {mutant.name for mutant in chosen}:
        print(f"no such change: {', '.join(sorted(unknown))}")
        return 2
    survivors = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for mutant, reason in zip(chosen, pool.map(survives, chosen), strict=True):
            print(
                f"{'caught  ' if reason is None else 'SURVIVES'} {mutant.name}{'' if reason is None else ': ' + reason}",
                flush=True,
            )
            survivors += reason is not None
    print(f"{len(chosen) - survivors} of {len(chosen)} changes are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
