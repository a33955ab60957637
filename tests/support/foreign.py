"""A working folder with a package named as ours."""

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


def foreign_folder(root: Path) -> Path:
    """Its `service/` leaves a mark and breaks off when it is imported."""
    folder = root / "a project"
    for module in MODULES:
        path = folder / "service" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"open({str(root / MARK)!r}, 'a').write(__name__)\nraise SystemExit('the package of another project')\n"
        )
    return folder


def imported(root: Path) -> bool:
    """Whether anything of it was."""
    return (root / MARK).exists()
