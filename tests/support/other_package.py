"""A working folder that contains another package named `service`."""

from pathlib import Path

MARK = "imported"
MODULES = (
    "__init__",
    "cli/__init__",
    "cli/__main__",
    "learning/__init__",
    "learning/job",
    "models/__init__",
    "models/machine",
)


def folder_with_other_package(root: Path) -> Path:
    """Importing any module of its `service/` writes a file and ends the process."""
    folder = root / "a project"
    for module in MODULES:
        path = folder / "service" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"open({str(root / MARK)!r}, 'a').write(__name__)\nraise SystemExit('the package of another project')\n"
        )
    return folder


def imported(root: Path) -> bool:
    """Whether any of its modules was imported."""
    return (root / MARK).exists()
