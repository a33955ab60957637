"""Tools that people measure servers with, run as they come from the registry, offline but for their installation."""

import pytest

from tests.clients.__main__ import MEASURING, environments, main


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", environments(MEASURING))
def test_measuring_tools_measure_a_real_server(name: str) -> None:
    assert main([name]) == 0
