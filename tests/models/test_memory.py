"""Free memory of the system and of a control group."""

from pathlib import Path

import mlx.core as mx
import pytest

from service.models.memory import free_bytes, total_bytes


def group(folder: Path, limit: str, used: int, cached: int) -> Path:
    """A control group's folder, as Linux shows it."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\n")
    return folder


def test_memory_in_use_is_not_free(tmp_path: Path) -> None:
    """Every system is supported; otherwise all memory would count as free."""
    before = free_bytes(tmp_path / "no group")
    assert 2**28 < before < total_bytes()
    taken = mx.ones((2**26,), dtype=mx.float32)
    mx.eval(taken)
    assert free_bytes(tmp_path / "no group") < total_bytes() - taken.nbytes


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected"),
    [("5000", 1000, 0, 4000), ("5000", 1000, 600, 4600), ("5000", 6000, 0, 0)],
    ids=["room left", "cached files can be given up", "over its limit"],
)
def test_free_memory_of_a_control_group_respects_its_limit(
    tmp_path: Path, limit: str, used: int, cached: int, expected: int
) -> None:
    assert free_bytes(group(tmp_path, limit, used, cached)) == expected


def test_a_group_without_a_limit_has_the_systems_free_memory(tmp_path: Path) -> None:
    assert free_bytes(group(tmp_path, "max", 1000, 0)) > 2**28
